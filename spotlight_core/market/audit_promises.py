"""What a journal is held to: each promise is an object that sees every word, with the books before it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from spotlight_core import events as ev
from spotlight_core.events import Event, SPGroup, Word
from spotlight_core.market.audit_books import Books, Given, Saved
from spotlight_core.market.node_records import NodeRecord, Strike
from spotlight_core.types import Fidelity


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What an audit knows beside the journal: the nodes' own logs, read after it, and the recipe.

    ``finished``: the run has ended, so nothing may be open.
    """

    finished: bool
    commit_every_steps: int
    lives: tuple[NodeRecord, ...]
    strikes: dict[str, Strike]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``said``: what was promised; ``counted``: what was looked at; ``breaches``: where it failed."""

    said: str
    counted: str
    breaches: tuple[str, ...] = ()

    @property
    def kept(self) -> bool:
        return not self.breaches


class Promise(Protocol):
    def see(self, word: Word, books: Books) -> None: ...

    def verdict(self, books: Books, evidence: Evidence) -> Verdict: ...


def counts(**numbers: int) -> str:
    """``3 requests, 1 open``: zeros but the first are left out."""
    parts: list[str] = []
    for name, number in numbers.items():
        noun, _, rest = name.replace("_", " ").partition(" ")
        if number == 1:
            noun = "life" if noun == "lives" else noun.removesuffix("s")
        if number or not parts:
            parts.append(f"{number:,} {noun} {rest}".rstrip())
    return ", ".join(parts)


@dataclass(slots=True)
class InOrder:
    """Events are numbered without a step back, and no epoch speaks after the next one has begun."""

    said: ClassVar[str] = "events are in order, and no coordinator wrote after its successor"
    events: int = 0
    breaches: list[str] = field(default_factory=list)

    def see(self, word: Word, books: Books) -> None:
        if not isinstance(word, Event):
            return
        self.events += 1
        if (word.epoch, word.seq) <= (books.epoch, books.seq):
            self.breaches.append(f"event {word.epoch}/{word.seq} follows event {books.epoch}/{books.seq}")

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        counted = counts(events=self.events, epochs=max(0, books.epoch + 1))
        return Verdict(said=self.said, counted=counted, breaches=tuple(self.breaches))


@dataclass(slots=True)
class SettledOnce:
    """Each request of an epoch is settled once, and once more if it is asked again after that.

    What an epoch left open when it was killed is asked again of the next.
    """

    said: ClassVar[str] = "every submitted request was settled exactly once"
    requests: int = 0
    cut_off: int = 0
    breaches: list[str] = field(default_factory=list)
    _epoch: int = -1
    _open: set[str] = field(default_factory=set)
    _settled: set[str] = field(default_factory=set)

    def see(self, word: Word, books: Books) -> None:
        if isinstance(word, Event) and word.epoch > self._epoch:
            self._epoch = word.epoch
            self.cut_off += len(self._open)
            self._open.clear()
            self._settled.clear()
        match word:
            case ev.Submitted():
                asked = {request.id for request in word.requests}
                self.requests += len(asked - self._open - self._settled)
                self._open |= asked
                self._settled -= asked
            case ev.Settle(request=request) if request in self._settled:
                self.breaches.append(f"{request} was settled twice")
            case ev.Settle(request=request) if request not in self._open:
                self.breaches.append(f"{request} was settled and never submitted")
            case ev.Settle(request=request):
                self._open.discard(request)
                self._settled.add(request)

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        left = [f"{request} was never settled" for request in sorted(self._open)] if evidence.finished else []
        counted = counts(
            requests=self.requests,
            open=0 if evidence.finished else len(self._open),
            cut_off_with_a_coordinator=self.cut_off,
        )
        return Verdict(said=self.said, counted=counted, breaches=(*self.breaches, *left))


@dataclass(slots=True)
class DoneHasResult:
    """Who is told that a request is done is told of a result that a group with its lease made."""

    said: ClassVar[str] = "every done request has its result, made under a lease that was given for it"
    done: int = 0
    breaches: list[str] = field(default_factory=list)
    _results: dict[tuple[int, str], set[str]] = field(default_factory=dict)

    def see(self, word: Word, books: Books) -> None:
        match word:
            case ev.Finished():
                given = books.leases.get(word.lease)
                if given is not None and given.epoch == word.epoch and given.key[0] == word.request:
                    self._results.setdefault((word.epoch, word.request), set()).add(word.ref)
            case ev.Settle(outcome="done"):
                self.done += 1
                if word.ref not in self._results.get((books.epoch, word.request), ()):
                    self.breaches.append(f"{word.request} is done with {word.ref}, which no lease of it made")

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        return Verdict(said=self.said, counted=counts(done=self.done), breaches=tuple(self.breaches))


@dataclass(slots=True)
class OneDigest:
    """However often a request is computed, its result is the same to the bit."""

    said: ClassVar[str] = "no two results of one request differ"
    results: int = 0
    repeated: int = 0
    breaches: list[str] = field(default_factory=list)
    _digests: dict[tuple[str, str, tuple[int, ...], Fidelity], str] = field(default_factory=dict)

    def see(self, word: Word, books: Books) -> None:
        match word:
            case ev.Alarm():
                self.breaches.append(f"an alarm was raised: {word.detail}")
            case ev.Finished() if word.lease in books.leases:
                request = books.leases[word.lease].start.request
                key = (request.id, request.policy.digest, request.seeds, request.fidelity)
                self.results += 1
                self.repeated += key in self._digests
                digest = self._digests.setdefault(key, word.digest)
                if digest != word.digest:
                    self.breaches.append(f"{request.id} has the results {digest[:12]} and {word.digest[:12]}")

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        counted = counts(results=self.results, computed_again=self.repeated)
        return Verdict(said=self.said, counted=counted, breaches=tuple(self.breaches))


@dataclass(slots=True)
class OneLease:
    """A group denoises one request at a time, with at most one more in line; a lease is given once."""

    said: ClassVar[str] = "no group ran two requests at once, and no lease was given twice"
    leases: int = 0
    queued: int = 0
    breaches: list[str] = field(default_factory=list)

    def see(self, word: Word, books: Books) -> None:
        match word:
            case ev.Start():
                self._given(word, books)
            case ev.Started():
                given = books.leases.get(word.lease)
                if given is None or given.state == "over" or given.said:
                    return
                before = [one for one in books.running(given.start.group) if one is not given]
                self._both(before[:1], word.lease)

    def _given(self, word: ev.Start, books: Books) -> None:
        self.leases += 1
        self.queued += word.queued
        if word.lease in books.leases:
            self.breaches.append(f"lease {word.lease} was given twice")
        if not word.queued:
            self._both(books.running(word.group)[:1], word.lease)
        elif any(one.state == "queued" and not one.abandoned for one in books.open.get(word.group, ())):
            self.breaches.append(f"lease {word.lease} is the second in line on {group_name(word.group)}")

    def _both(self, before: Iterable[Given], lease: str) -> None:
        for one in before:
            self.breaches.append(f"{group_name(one.start.group)} ran {one.id} when {lease} began")

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        counted = counts(leases=self.leases, handed_over_early=self.queued)
        return Verdict(said=self.said, counted=counted, breaches=tuple(self.breaches))


@dataclass(slots=True)
class ResumedFromLast:
    """A request goes on from its last commit of the same policy, or from noise when there is none."""

    said: ClassVar[str] = "every start goes on from the request's last commit"
    starts: int = 0
    resumed: int = 0
    breaches: list[str] = field(default_factory=list)

    def see(self, word: Word, books: Books) -> None:
        if not isinstance(word, ev.Start):
            return
        self.starts += 1
        self.resumed += word.from_denoise_step > 0
        key = (word.request.id, word.request.policy.name)
        # A new coordinator may find what the former one's nodes had committed, or begin anew.
        choices = books.saved.get(key) or [None, books.former.get(key)]
        if not any(_goes_on(word, saved) for saved in choices):
            last = choices[-1]
            where = "noise" if last is None else f"denoise step {last.denoise_step}"
            self.breaches.append(
                f"lease {word.lease} of {word.request.id} begins at denoise step {word.from_denoise_step}, "
                f"and the last commit is {where}"
            )

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        counted = counts(starts=self.starts, resumed=self.resumed)
        return Verdict(said=self.said, counted=counted, breaches=tuple(self.breaches))


def _goes_on(word: ev.Start, saved: Saved | None) -> bool:
    if saved is None:
        return word.from_denoise_step == 0 and word.state_ref is None
    same = (word.from_denoise_step, word.state_ref) == (saved.denoise_step, saved.ref)
    if saved.holder not in (None, (word.group.node, word.group.incarnation)):
        return False
    return same and word.state_digest in (None, saved.digest)


@dataclass(slots=True)
class NoneToLeaving:
    """No work and no weights for a node that was told to go, is gone or never came, or a dead process."""

    said: ClassVar[str] = "nothing was given to a node that was leaving or lost"
    given: int = 0
    breaches: list[str] = field(default_factory=list)

    def see(self, word: Word, books: Books) -> None:
        if not isinstance(word, ev.Start | ev.Load):
            return
        self.given += 1
        key = (word.group.node, word.group.incarnation)
        what = f"lease {word.lease}" if isinstance(word, ev.Start) else f"weights {word.policy.name}"
        for there, why in (
            (key not in books.joined, "which never joined"),
            (key in books.noticed, "after its notice"),
            (key in books.gone, "after its loss"),
            (any((key, rank) in books.dead for rank in word.group.ranks), "whose process was dead"),
        ):
            if there:
                self.breaches.append(f"{what} went to {group_name(word.group)}, {why}")

    def verdict(self, books: Books, evidence: Evidence) -> Verdict:
        return Verdict(said=self.said, counted=counts(given=self.given), breaches=tuple(self.breaches))


def group_name(group: SPGroup) -> str:
    return f"{group.node}#{group.incarnation} {','.join(map(str, group.ranks))}"
