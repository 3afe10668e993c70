"""The promises about what a preemption costs: nothing with a notice, few denoise steps without, and money."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, get_args

from spotlight_core import events as ev
from spotlight_core.config.fleet import Pool
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Word
from spotlight_core.market.audit_books import Books, Given
from spotlight_core.market.audit_promises import Evidence, Verdict, counts
from spotlight_core.market.billing import NodeBill
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.node_records import NodeRecord
from spotlight_core.market.prices import PriceBook

TAKEN = ("killed", "silent")
SECONDS = 1e-6  # two records of one moment agree to this


@dataclass(slots=True, kw_only=True)
class _Warned:
    given: Given
    deadline: float


@dataclass(slots=True)
class NoticeLosesNothing:
    """What was under way at a notice ends within the grace: committed and let go, finished, or unwanted.

    A provider that takes the node before its own deadline has given no notice: the next promise holds.
    """

    said: ClassVar[str] = "with a notice, no denoise step was lost"
    notices: int = 0
    in_flight: int = 0
    cut_short: int = 0
    breaches: list[str] = field(default_factory=list)
    _warned: dict[str, _Warned] = field(default_factory=dict)

    def see(self, word: Word, books: Books) -> None:
        match word:
            case ev.Notice():
                self._noticed(word, books)
            case ev.Finished() | ev.Committed(released=True):
                self._warned.pop(word.lease, None)
            case ev.Failed() if word.lease in self._warned:
                self._breach(word.lease, f"ended with: {word.error}")
            case ev.Settle():
                self._unwanted(word.request)
            case ev.RankLost():
                for given in books.with_rank((word.node, word.incarnation), word.rank):
                    self.cut_short += self._warned.pop(given.id, None) is not None
            case ev.Lost():
                self._lost(word, books)

    def _noticed(self, word: ev.Notice, books: Books) -> None:
        key = (word.node, word.incarnation)
        if key in books.noticed or key in books.gone or key not in books.joined:
            return
        self.notices += 1
        deadline = word.at + word.seconds_left
        for given in books.on_node(key):
            if given.state == "running" and not given.abandoned:
                self.in_flight += 1
                self._warned[given.id] = _Warned(given=given, deadline=deadline)

    def _lost(self, word: ev.Lost, books: Books) -> None:
        for given in books.on_node((word.node, word.incarnation)):
            warned = self._warned.get(given.id)
            if warned is None:
                continue
            if word.cause == "shutdown" or (word.cause in TAKEN and word.at < warned.deadline):
                self.cut_short += word.cause in TAKEN
                del self._warned[given.id]
            else:
                self._breach(given.id, f"was not committed when the node was {word.cause}")

    def _unwanted(self, request: str) -> None:
        for lease in [name for name, one in self._warned.items() if one.given.key[0] == request]:
            del self._warned[lease]

    def _breach(self, lease: str, why: str) -> None:
        given = self._warned.pop(lease).given
        node, incarnation = given.node
        self.breaches.append(f"{given.key[0]} on {node}#{incarnation} {why}")

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        counted = counts(
            notices=self.notices,
            requests_in_flight=self.in_flight,
            cut_short_by_the_provider=self.cut_short,
            under_way=len(self._warned),
        )
        return Verdict(said=self.said, counted=counted, breaches=tuple(self.breaches))


@dataclass(slots=True)
class KillLosesFew:
    """A kill costs each request in flight at most the denoise steps between two acknowledged commits.

    Known to the step only where the node said how far it was, as it does before a replayed kill.
    """

    said: ClassVar[str] = "without a notice, no request lost more than fleet.commit_every_steps denoise steps"
    _killed: list[Given] = field(default_factory=list)

    def see(self, word: Word, books: Books) -> None:
        leases: list[Given] = []
        match word:
            case ev.RankLost():
                leases = books.with_rank((word.node, word.incarnation), word.rank)
            case ev.Lost() if word.cause in TAKEN:
                key = (word.node, word.incarnation)
                # One that its own coordinator did not outlive was reaped with it, and nothing went on.
                leases = books.on_node(key) if books.joined_in.get(key) == word.epoch else []
        self._killed += [given for given in leases if given.state == "running" and not given.abandoned]

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        most = evidence.commit_every_steps
        lost = {
            given.id: max(0, evidence.strikes[given.id].denoise_step - given.committed_denoise_step)
            for given in self._killed
            if given.id in evidence.strikes
        }
        counted = counts(requests_in_flight=len(self._killed), known_to_the_step=len(lost))
        if lost:
            counted += f", the worst lost {max(lost.values())}"
        if not most:
            return Verdict(said=self.said, counted=f"{counted}; no bound: commits on notice only")
        breaches = [
            f"{given.key[0]} on {given.node[0]}#{given.node[1]} lost {lost[given.id]} denoise steps, "
            f"and at most {most} were promised"
            for given in self._killed
            if lost.get(given.id, 0) > most
        ]
        return Verdict(said=self.said, counted=counted, breaches=tuple(breaches))


def _unpriced() -> CostLedger:
    return CostLedger(PriceBook(dict.fromkeys(get_args(Pool), 0.0)))


@dataclass(slots=True)
class LedgerIsNodeLogs:
    """What the ledger bills is what the nodes themselves say: the same lives, GPUs and seconds.

    It is the ledger itself that is asked, fed with the same words: its useful, idle and lost GPU-seconds
    have to be those of the logs.
    """

    said: ClassVar[str] = "the ledger's node-seconds are those of the nodes' own logs"
    _ledger: CostLedger = field(default_factory=_unpriced)
    _refused: str | None = None

    def see(self, word: Word, books: Books) -> None:
        if self._refused is None:
            try:
                self._ledger.apply(word)
            except SpotlightError as error:
                self._refused = f"the ledger refuses the journal: {error.problem}"

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        bills = {(bill.node, bill.incarnation): bill for bill in self._ledger.bills}
        logged = {(life.node, life.incarnation): life for life in evidence.lives}
        breaches = [] if self._refused is None else [self._refused]
        breaches += [f"{key[0]}#{key[1]} has no log" for key in bills if key not in logged]
        ahead = 0  # the logs of a running run may know of a life before the journal does
        for key, life in logged.items():
            bill = bills.get(key)
            if bill is None or (bill.stopped_at is None and life.stopped_at is not None):
                ahead += 1
                if evidence.finished:
                    lacking = "start" if bill is None else "end"
                    breaches.append(f"the journal lacks the {lacking} of {key[0]}#{key[1]}")
            else:
                breaches += _differences(bill, life)
        if not breaches and not ahead:
            breaches += self._sums(evidence)
        stopped = [
            bill.stopped_at - bill.started_at for bill in bills.values() if bill.stopped_at is not None
        ]
        counted = counts(lives=len(bills), not_journaled_yet=ahead)
        return Verdict(
            said=self.said,
            counted=f"{counted}, {math.fsum(stopped):,.1f} s of ended ones",
            breaches=tuple(breaches),
        )

    def _sums(self, evidence: Evidence) -> list[str]:
        """Nothing that the GPUs did is billed twice or left out."""
        now = self._ledger.last_at
        billed = math.fsum(self._ledger.gpu_hours(now).values()) * 3600.0
        ends = [(life, now if life.stopped_at is None else life.stopped_at) for life in evidence.lives]
        logged = math.fsum(life.gpus * max(0.0, end - life.started_at) for life, end in ends)
        if math.isclose(billed, logged, rel_tol=1e-9, abs_tol=SECONDS * (1 + len(ends))):
            return []
        return [f"{billed!r} GPU-seconds are billed, and the nodes logged {logged!r}"]


def _differences(bill: NodeBill, life: NodeRecord) -> list[str]:
    name = f"{life.node}#{life.incarnation}"
    if (bill.pool, bill.gpus) != (life.pool, life.gpus):
        return [f"{name} is {life.gpus} x {life.pool}, and billed as {bill.gpus} x {bill.pool}"]
    if abs(bill.started_at - life.started_at) > SECONDS:
        return [f"{name} began at {life.started_at!r} and is billed from {bill.started_at!r}"]
    stop = bill.stopped_at
    if stop is not None and (life.stopped_at is None or abs(stop - life.stopped_at) > SECONDS):
        return [f"{name} ended at {life.stopped_at!r} and is billed until {stop!r}"]
    return []
