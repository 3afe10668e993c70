"""What a journal says so far: who holds which lease, which nodes are leaving, what is committed.

Kept apart from the scheduler on purpose: an audit that asked the code it audits would prove nothing.
"""

from dataclasses import dataclass, field
from typing import Literal

from spotlight_core import events as ev
from spotlight_core.events import Event, NodeKey, SPGroup, Word

RequestKey = tuple[str, str]  # a request's id and its policy version


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Where a committed request goes on."""

    denoise_step: int
    ref: str
    digest: str
    holder: NodeKey | None = None  # the only node that can go on from it, when it is not in the store


@dataclass(slots=True, kw_only=True, eq=False)
class Given:
    """A lease.  ``abandoned``: nobody waits for it, and its group has not yet said that it let go."""

    start: ev.Start
    epoch: int
    state: Literal["queued", "running", "over"]
    said: bool = False
    abandoned: bool = False
    committed_denoise_step: int

    @property
    def id(self) -> str:
        return self.start.lease

    @property
    def node(self) -> NodeKey:
        return self.start.group.node, self.start.group.incarnation

    @property
    def key(self) -> RequestKey:
        return self.start.request.id, self.start.request.policy.name


@dataclass(slots=True)
class Books:
    """The state before the next word; ``apply`` turns it."""

    at: float = 0.0
    epoch: int = -1
    seq: int = 0
    leases: dict[str, Given] = field(default_factory=dict)
    open: dict[SPGroup, list[Given]] = field(default_factory=dict)
    joined: dict[NodeKey, ev.NodeJoined] = field(default_factory=dict)
    joined_in: dict[NodeKey, int] = field(default_factory=dict)
    noticed: dict[NodeKey, ev.Notice] = field(default_factory=dict)
    gone: dict[NodeKey, ev.Lost] = field(default_factory=dict)
    dead: set[tuple[NodeKey, int]] = field(default_factory=set)  # ranks without a process
    saved: dict[RequestKey, list[Saved | None]] = field(default_factory=dict)
    former: dict[RequestKey, Saved] = field(default_factory=dict)

    def on_node(self, key: NodeKey) -> list[Given]:
        """The leases that the node holds."""
        return [
            given
            for group, leases in self.open.items()
            if (group.node, group.incarnation) == key
            for given in leases
        ]

    def with_rank(self, key: NodeKey, rank: int) -> list[Given]:
        """The leases of the groups that a rank is in."""
        return [given for given in self.on_node(key) if rank in given.start.group.ranks]

    def running(self, group: SPGroup) -> list[Given]:
        """What the group's ranks denoise now; more than one is what must not be."""
        sharing = [group]
        if group.generation:  # before, each rank is a group of its own
            key, ranks = (group.node, group.incarnation), set(group.ranks)
            sharing = [
                other
                for other in self.open
                if (other.node, other.incarnation) == key and not ranks.isdisjoint(other.ranks)
            ]
        return [
            given
            for other in sharing
            for given in self.open.get(other, ())
            if given.state == "running" and not given.abandoned
        ]

    def apply(self, word: Word) -> None:
        """Account for the word."""
        if isinstance(word, Event):
            self._stamp(word)
        match word:
            case ev.Start():
                self._start(word)
            case ev.Started():
                given = self.leases.get(word.lease)
                if given is not None and given.state != "over":
                    given.state, given.said = "running", True
            case ev.Finished() | ev.Failed() | ev.Committed():
                self._lease_word(word)
            case ev.Abandon():
                if word.lease in self.leases:
                    self.leases[word.lease].abandoned = True
            case _:
                self._node_word(word)

    def _stamp(self, event: Event) -> None:
        self.at, self.seq = event.at, event.seq
        if event.epoch <= self.epoch:
            return
        self.epoch = event.epoch
        for leases in list(self.open.values()):
            for given in list(leases):
                self._over(given)
        for key, saved in self.saved.items():
            for one in saved:
                if one is not None and one.holder is None:
                    self.former[key] = one
        self.saved.clear()

    def _start(self, word: ev.Start) -> None:
        others = self.open.setdefault(word.group, [])
        given = Given(
            start=word,
            epoch=self.epoch,
            state="queued" if word.queued and others else "running",
            committed_denoise_step=word.from_denoise_step,
        )
        self.leases[word.lease] = given
        others.append(given)

    def _lease_word(self, word: ev.Finished | ev.Failed | ev.Committed) -> None:
        given = self.leases.get(word.lease)
        if given is None:
            return
        if isinstance(word, ev.Committed):
            self._committed(given, word)
            if not word.released:
                return
        elif isinstance(word, ev.Failed) and word.commit_lost:
            # Only what the lease began from is damaged; a later commit may be known by now.
            known = self.saved.get(given.key, [])
            left = [one for one in known if one is None or one.ref != given.start.state_ref]
            if not known or len(left) < len(known):
                self.saved[given.key] = [None, *left]
        self._over(given)

    def _committed(self, given: Given, word: ev.Committed) -> None:
        holder = given.node if word.held else None
        saved = Saved(denoise_step=word.next_denoise_step, ref=word.ref, digest=word.digest, holder=holder)
        if word.held:  # beside the last commit, which it may have to fall back to
            self.saved.setdefault(given.key, [None]).append(saved)
            given.committed_denoise_step = word.next_denoise_step
        elif given.state == "over" or given.abandoned:
            # Whether anybody still listened is the scheduler's business: it may be used or not.
            self.saved.setdefault(given.key, [None]).append(saved)
        else:
            given.committed_denoise_step = word.next_denoise_step
            self.saved[given.key] = [saved]

    def _over(self, given: Given) -> None:
        """The lease ended; what waits behind it begins."""
        if given.state == "over":
            return
        was, given.state = given.state, "over"
        others = self.open[given.start.group]
        others.remove(given)
        if others and was == "running":
            others[0].state = "running"

    def _node_word(self, word: Word) -> None:
        match word:
            case ev.NodeJoined():
                self.joined[word.node, word.incarnation] = word
                self.joined_in[word.node, word.incarnation] = self.epoch
            case ev.Notice():
                self.noticed.setdefault((word.node, word.incarnation), word)
            case ev.Lost():
                key = (word.node, word.incarnation)
                self.gone[key] = word
                self._all_over(self.on_node(key))
            case ev.RankLost():
                key = (word.node, word.incarnation)
                self.dead.add((key, word.rank))
                self._all_over(self.with_rank(key, word.rank))
            case ev.RankReady():
                self.dead.discard(((word.node, word.incarnation), word.rank))

    def _all_over(self, leases: list[Given]) -> None:
        # The queued first: with their process gone they do not begin.
        for given in sorted(leases, key=lambda given: given.state != "queued"):
            self._over(given)
