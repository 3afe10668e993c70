"""Money and time of a run, as a pure fold over the journal's words.

The same fold runs live (each event and command as it is journalled) and over a journal read back
after a crash; it reads no clock.  What a node costs is decided by two numbers of its own log, the
start and the stop, carried by ``NodeJoined`` and ``Lost``; what it did is decided by its leases.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from spotlight_core import events as ev
from spotlight_core.errors import BadInputError, FleetError
from spotlight_core.events import Event, NodeKey, Word
from spotlight_core.market.billing import (
    NodeBill,
    Piece,
    Segment,
    Span,
    gpu_seconds,
    pieces,
    segments_of,
)
from spotlight_core.market.preemptions import Preemption, PreemptionLog
from spotlight_core.market.prices import PriceBook
from spotlight_core.types import GenerationRequest, Kind

RESERVED = "reserved"


@dataclass(slots=True, kw_only=True)
class _Lease:
    """A group's work on a request: ``since`` its start or its last commit."""

    node: NodeKey
    request: GenerationRequest
    ranks: int
    started: float
    since: float
    from_denoise_step: int
    committed_denoise_step: int


class CostLedger:
    """What every node cost and did.

    Work that nobody could use is ``lost``: from a lease's start, or its last commit, to the loss of
    its node, its failure or its abandonment.  A run's next epoch closes no node by itself: whoever
    reaps the nodes of a dead coordinator journals their ``Lost``.
    """

    def __init__(self, prices: PriceBook) -> None:
        self.prices = prices
        self._bills: dict[NodeKey, NodeBill] = {}
        self._leases: dict[str, _Lease] = {}
        self._trainings: list[tuple[float, float]] = []
        self._training_since: float | None = None
        self._epoch = 0
        self._now = 0.0
        self._pace: dict[Kind, tuple[int, float]] = {}
        self._log = PreemptionLog()

    @classmethod
    def replayed(cls, prices: PriceBook, words: Iterable[Word]) -> "CostLedger":
        """The ledger after all of a journal's words, in order."""
        ledger = cls(prices)
        for word in words:
            ledger.apply(word)
        return ledger

    def apply(self, word: Word) -> None:
        """Account for the next word of the journal; a command happens at its event's time.

        Raises:
            BadInputError: a node joined from a pool that has no price.
            FleetError: the same incarnation of a node joined twice.
        """
        if isinstance(word, Event):
            self._now = max(self._now, word.at)
            if word.epoch > self._epoch:
                # A dead coordinator trains no more, and its last PhaseChanged has no successor.
                self._end_training()
                self._epoch = word.epoch
        match word:
            case ev.Start():
                self._start(word)
            case ev.Committed():
                self._committed(word)
            case ev.Finished():
                self._finished(word)
            case ev.Failed() | ev.Abandon():
                self._break(word.lease, self._now)
            case ev.Settle(outcome="aborted"):
                self._log.dropped(word.request, self._now)
            case ev.PhaseChanged():
                self._end_training()
                self._training_since = self._now if word.phase == "train" else None
            case ev.NodeJoined() | ev.Notice() | ev.Lost():
                self._node_event(word)

    def segments(self, now: float) -> list[Segment]:
        """Every node's billed life up to ``now``, contiguous and without overlaps, node by node."""
        return [part for bill in self._bills.values() for part in segments_of(bill, self._pieces(bill, now))]

    def usd(self, now: float, pool: str | None = None) -> float:
        """Dollars billed up to ``now``, of one pool or of all: price x GPUs x time, idle or not."""
        return math.fsum(
            self.prices.usd_per_hour(bill.pool) / 3600.0 * bill.gpus * (bill.end(now) - bill.started_at)
            for bill in self._bills.values()
            if pool in (None, bill.pool)
        )

    def gpu_hours(self, now: float, pool: str | None = None) -> dict[str, float]:
        """Billed GPU-hours split into ``useful`` (training too), ``idle`` and ``lost``."""
        parts: dict[str, list[float]] = {"useful": [], "idle": [], "lost": []}
        for bill in self._bills.values():
            if pool in (None, bill.pool):
                for name, seconds in gpu_seconds(bill, self._pieces(bill, now)).items():
                    parts[name] += seconds
        return {name: math.fsum(seconds) / 3600.0 for name, seconds in parts.items()}

    @property
    def preemptions(self) -> list[Preemption]:
        """Every preemption so far, in order, with what became of the requests in flight."""
        return self._log.preemptions()

    @property
    def resumed_requests(self) -> int:
        """Starts at a denoise step > 0."""
        return self._log.resumed

    @property
    def recomputed_requests(self) -> int:
        """Starts from noise of a request that was lost, had failed or had been committed further on."""
        return self._log.recomputed

    @property
    def denoise_steps_lost(self) -> float:
        """Denoise steps whose work was thrown away.

        Exact where a commit was not used; where a lease died, its time since the last commit at the
        pace of finished leases of its kind, since no per-step words reach the journal.
        """
        return self._log.denoise_steps_lost

    @property
    def last_at(self) -> float:
        """Time of the last event seen."""
        return self._now

    def _node_event(self, word: ev.NodeJoined | ev.Notice | ev.Lost) -> None:
        key = (word.node, word.incarnation)
        if isinstance(word, ev.NodeJoined):
            self._joined(key, word)
        elif isinstance(word, ev.Notice):
            self._log.notice(key, self._now, self._in_flight(key))
        else:
            self._lost(key, word)

    def _joined(self, key: NodeKey, word: ev.NodeJoined) -> None:
        # An unknown pool fails here, when its node first costs something, not at the end of a run.
        self.prices.usd_per_hour(word.pool)
        if key in self._bills:
            problem = f"node {word.node} joined twice as incarnation {word.incarnation}"
            raise FleetError(
                problem, "count incarnations on across restarts, or its first bill is overwritten"
            )
        self._bills[key] = NodeBill(
            node=word.node,
            incarnation=word.incarnation,
            pool=word.pool,
            gpus=word.gpus,
            epoch=word.epoch,
            started_at=word.started_at,
        )

    def _start(self, word: ev.Start) -> None:
        self._break(word.lease, self._now)  # a lease's name is used once; a reused one ends its first use
        self._log.started(word.request.id, word.from_denoise_step, word.group.node, self._now)
        self._leases[word.lease] = _Lease(
            node=(word.group.node, word.group.generation),
            request=word.request,
            ranks=len(word.group.ranks),
            started=self._now,
            since=self._now,
            from_denoise_step=word.from_denoise_step,
            committed_denoise_step=word.from_denoise_step,
        )

    def _committed(self, word: ev.Committed) -> None:
        lease = self._leases.get(word.lease)
        if lease is None:
            return  # a late word of a closed lease bills nothing
        self._log.committed(lease.request.id, word.next_denoise_step)
        self._span(lease, self._now, lease.request.kind)
        lease.since, lease.committed_denoise_step = self._now, word.next_denoise_step
        if word.released:
            del self._leases[word.lease]

    def _finished(self, word: ev.Finished) -> None:
        lease = self._leases.pop(word.lease, None)
        if lease is None:
            return
        self._span(lease, self._now, lease.request.kind)
        steps, seconds = self._pace.get(lease.request.kind, (0, 0.0))
        steps += lease.request.fidelity.denoise_steps - lease.from_denoise_step
        self._pace[lease.request.kind] = (steps, seconds + self._now - lease.started)
        self._log.finished(lease.request.id, lease.node[0], self._now)

    def _lost(self, key: NodeKey, word: ev.Lost) -> None:
        bill = self._bills.get(key)
        if bill is None or bill.stopped_at is not None:
            return
        bill.stopped_at = max(bill.started_at, word.stopped_at)
        # Nodes that outlived their coordinator and were reaped by the next one were not preempted.
        cause = word.cause if word.epoch == bill.epoch else "reaped"
        self._log.lost(key, cause, bill.stopped_at, self._in_flight(key))
        for name, lease in list(self._leases.items()):
            if lease.node == key:
                self._break(name, bill.stopped_at)

    def _break(self, name: str, at: float) -> None:
        """End a lease with nothing to show since its last commit."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return
        self._span(lease, at, "lost")
        seconds = max(0.0, at - lease.since)
        steps, pace_seconds = self._pace.get(lease.request.kind, (0, 0.0))
        left = lease.request.fidelity.denoise_steps - lease.committed_denoise_step
        done = min(float(left), seconds * steps / pace_seconds) if pace_seconds else 0.0
        self._log.broken(lease.request.id, lease.request.kind, lease.node, seconds * lease.ranks, done)

    def _span(self, lease: _Lease, end: float, activity: Kind | Literal["lost"]) -> None:
        bill = self._bills.get(lease.node)
        if bill is not None and end > lease.since:
            bill.spans.append(_span(lease, end, activity))

    def _in_flight(self, key: NodeKey) -> list[tuple[str, str]]:
        return [
            (lease.request.id, lease.request.kind) for lease in self._leases.values() if lease.node == key
        ]

    def _end_training(self) -> None:
        if self._training_since is not None:
            self._trainings.append((self._training_since, self._now))
            self._training_since = None

    def _pieces(self, bill: NodeBill, now: float) -> Iterator[Piece]:
        """The node's life cut up, with what is still under way taken to last until ``now``."""
        key = (bill.node, bill.incarnation)
        going = [
            _span(lease, now, lease.request.kind) for lease in self._leases.values() if lease.node == key
        ]
        training: list[tuple[float, float]] = []
        if bill.pool == RESERVED:
            training = list(self._trainings)
            if self._training_since is not None:
                training.append((self._training_since, now))
        return pieces(bill, [*bill.spans, *going], training, now)


def _span(lease: _Lease, end: float, activity: Kind | Literal["lost"]) -> Span:
    return Span(start=lease.since, end=end, activity=activity, request=lease.request.id, ranks=lease.ranks)


def recompute_usd(node_logs: Path, prices: PriceBook, now: float) -> dict[str, float]:
    """Dollars by pool from the nodes' own start and stop logs: the check on ``CostLedger.usd``.

    Shares no arithmetic with the ledger: exact rationals, rounded once.  A node that logged no stop
    runs until ``now``; where both it and the coordinator logged one, the first counts.

    Raises:
        BadInputError: a line that is not a start or stop record, or a stop without a start.
    """
    started: dict[tuple[str, int], tuple[str, int, float]] = {}
    stopped: dict[tuple[str, int], float] = {}
    for path in sorted(node_logs.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
                key, at = (str(record["node"]), int(record["incarnation"])), float(record["at"])
                if record["event"] == "start":
                    started[key] = (str(record["pool"]), int(record["gpus"]), at)
                elif record["event"] == "stop" and key in started:
                    stopped[key] = min(at, stopped.get(key, at))
                else:
                    raise ValueError(f"{record['event']!r} before any start")
            except (ValueError, KeyError, TypeError) as error:
                raise BadInputError(
                    f"{path}:{number} is not a node's start or stop record ({error})",
                    "restore the node's log",
                ) from error
    totals: dict[str, Fraction] = {}
    for key, (pool, gpus, start) in started.items():
        seconds = max(Fraction(0), Fraction(stopped.get(key, now)) - Fraction(start))
        usd = Fraction(prices.usd_per_hour(pool)) * gpus * seconds / 3600
        totals[pool] = totals.get(pool, Fraction(0)) + usd
    return {pool: float(total) for pool, total in totals.items()}
