"""Money and time of a run, as a pure fold over the journal's words.

The same fold runs live (each event and command as it is journalled) and over a journal read back
after a crash; it reads no clock.  What a node costs is decided by two numbers of its own log, the
start and the stop, carried by ``NodeJoined`` and ``Lost``, or by the ``BootFailed`` of one that never
joined; what it did is decided by its leases.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from spotlight_core import events as ev
from spotlight_core.errors import FleetError
from spotlight_core.events import Event, NodeKey, SPGroup, Word
from spotlight_core.market.billing import (
    LeaseBill,
    NodeBill,
    Piece,
    Segment,
    gpu_seconds,
    pieces,
    segments_of,
)
from spotlight_core.market.preemptions import InFlight, Preemption, PreemptionLog
from spotlight_core.market.prices import PriceBook
from spotlight_core.types import Kind

RESERVED = "reserved"
FLEET = "fleet"


class CostLedger:
    """What every node cost and did.

    Work begins when its group says ``Started``, else at its ``Start``; a queued one begins at the latest
    when the one before it ends.  Work that nobody could use is ``lost``: from its beginning, or its last
    commit, to the loss of its node or process, its failure or its abandonment.  A run's next epoch closes
    no node by itself: whoever reaps the nodes of a dead coordinator journals their ``Lost``.
    """

    def __init__(self, prices: PriceBook) -> None:
        self.prices = prices
        self._bills: dict[NodeKey, NodeBill] = {}
        self._leases: dict[str, LeaseBill] = {}
        self._by_group: dict[SPGroup, list[LeaseBill]] = {}
        self._trainings: list[tuple[float, float]] = []
        self._training_since: float | None = None
        self._epoch = 0
        self._now = 0.0
        self._pace: dict[str, tuple[int, float]] = {}
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
            FleetError: the same incarnation of a node began twice.
        """
        if isinstance(word, Event):
            self._now = max(self._now, word.at)
            if word.epoch > self._epoch:
                # A dead coordinator trains no more, and its last PhaseChanged has no successor.
                self._end_training()
                self._epoch = word.epoch
        match word:
            case ev.Start() | ev.Started() | ev.Committed() | ev.Finished() | ev.Failed() | ev.Abandon():
                self._lease_word(word)
            case ev.Settle(outcome="aborted" | "cancelled"):
                self._log.dropped(word.request, self._now)
            case ev.PhaseChanged():
                self._end_training()
                self._training_since = self._now if word.phase == "train" else None
            case ev.NodeJoined() | ev.BootFailed() | ev.Notice() | ev.Lost() | ev.RankLost():
                self._node_event(word)

    @property
    def bills(self) -> Collection[NodeBill]:
        """Every node's life so far, in the order in which they were heard of."""
        return self._bills.values()

    def lives(self, now: float) -> Iterator[tuple[NodeBill, list[Piece]]]:
        """Every node's life with what it did up to ``now``, cut wherever that changed."""
        for bill in self._bills.values():
            yield bill, list(self._pieces(bill, now))

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

    def denoise_steps_per_second(self, kind: str) -> float:
        """The pace of finished leases of a kind, 0 before the first."""
        steps, seconds = self._pace.get(kind, (0, 0.0))
        return steps / seconds if seconds else 0.0

    @property
    def last_at(self) -> float:
        """Time of the last event seen."""
        return self._now

    def _node_event(self, word: ev.NodeJoined | ev.BootFailed | ev.Notice | ev.Lost | ev.RankLost) -> None:
        match word:
            case ev.NodeJoined():
                self._began(word, word.started_at)
            case ev.BootFailed():
                if word.started_at is not None and word.stopped_at is not None:
                    bill = self._began(word, word.started_at)
                    bill.stopped_at = max(word.started_at, word.stopped_at)
            case ev.Notice():
                # The fleet's own are no preemption: it lets a node go that it no longer needs.
                if word.source != FLEET:
                    key = (word.node, word.incarnation)
                    self._log.notice(key, self._now, self._in_flight(key))
            case ev.RankLost():
                key = (word.node, word.incarnation)
                gone = [
                    one for one in self._leases.values() if one.node == key and word.rank in one.group.ranks
                ]
                self._break_all(gone, self._now)
            case ev.Lost():
                self._lost((word.node, word.incarnation), word)

    def _lease_word(
        self, word: ev.Start | ev.Started | ev.Committed | ev.Finished | ev.Failed | ev.Abandon
    ) -> None:
        match word:
            case ev.Start():
                self._start(word)
            case ev.Started():
                self._said(word)
            case ev.Committed():
                self._committed(word)
            case ev.Finished():
                self._finished(word)
            case ev.Failed() | ev.Abandon():
                self._break(word.lease, self._now)

    def _began(self, word: ev.NodeJoined | ev.BootFailed, started_at: float) -> NodeBill:
        # An unknown pool fails here, when its node first costs something, not at the end of a run.
        self.prices.usd_per_hour(word.pool)
        key = (word.node, word.incarnation)
        if key in self._bills:
            problem = f"node {word.node} began twice as incarnation {word.incarnation}"
            raise FleetError(
                problem, "count incarnations on across restarts, or its first bill is overwritten"
            )
        bill = self._bills[key] = NodeBill(
            node=word.node,
            incarnation=word.incarnation,
            pool=word.pool,
            gpus=word.gpus,
            epoch=word.epoch,
            started_at=started_at,
        )
        return bill

    def _start(self, word: ev.Start) -> None:
        self._break(word.lease, self._now)  # a lease's name is used once; a reused one ends its first use
        before = self._by_group.setdefault(word.group, [])
        lease = self._leases[word.lease] = LeaseBill(
            id=word.lease,
            group=word.group,
            request=word.request,
            queued=word.queued and bool(before),
            started=self._now,
            since=self._now,
            from_denoise_step=word.from_denoise_step,
            committed_denoise_step=word.from_denoise_step,
        )
        before.append(lease)
        if not lease.queued:
            self._begin(lease)

    def _begin(self, lease: LeaseBill) -> None:
        """The lease is work from now on."""
        lease.queued, lease.started, lease.since = False, self._now, self._now
        self._log.started(lease.request.id, lease.from_denoise_step, lease.group.node, self._now)

    def _said(self, word: ev.Started) -> None:
        """A group began; said again later, it is a mere sign of life."""
        lease = self._leases.get(word.lease)
        if lease is None or lease.said:
            return
        lease.said = True
        if lease.queued:
            self._begin(lease)
        elif lease.since == lease.started:  # no commit yet: until now the group only got ready
            lease.started = lease.since = self._now

    def _end(self, name: str) -> LeaseBill | None:
        """Take a lease off the books; the one queued behind it begins."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return None
        others = self._by_group[lease.group]
        others.remove(lease)
        if others and others[0].queued and not lease.queued:
            self._begin(others[0])
        return lease

    def _committed(self, word: ev.Committed) -> None:
        lease = self._leases.get(word.lease)
        if lease is None:
            return  # a late word of a closed lease bills nothing
        self._log.committed(lease.request.id, word.next_denoise_step)
        self._span(lease, self._now, lease.request.kind)
        lease.since, lease.committed_denoise_step = self._now, word.next_denoise_step
        if word.released:
            self._end(word.lease)

    def _finished(self, word: ev.Finished) -> None:
        lease = self._end(word.lease)
        if lease is None:
            return
        if lease.queued:  # its beginning was never heard of, so neither were its seconds
            lease.started = lease.since = self._now
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
        self._break_all([lease for lease in self._leases.values() if lease.node == key], bill.stopped_at)

    def _break_all(self, leases: list[LeaseBill], at: float) -> None:
        """End leases that went with their process: the queued first, or the end of another begins them."""
        for lease in sorted(leases, key=lambda lease: not lease.queued):
            self._break(lease.id, at)

    def _break(self, name: str, at: float) -> None:
        """End a lease with nothing to show since its last commit."""
        lease = self._end(name)
        if lease is None or lease.queued:
            return
        self._span(lease, at, "lost")
        seconds = max(0.0, at - lease.since)
        work = self._work(lease)
        self._log.broken(lease.node, work, seconds * len(lease.group.ranks), self._steps(lease, seconds))

    def _steps(self, lease: LeaseBill, seconds: float) -> float:
        """About how many denoise steps the lease did in so many seconds since its last commit."""
        left = lease.request.fidelity.denoise_steps - lease.committed_denoise_step
        return min(float(left), seconds * self.denoise_steps_per_second(lease.request.kind))

    def _span(self, lease: LeaseBill, end: float, activity: Kind | Literal["lost"]) -> None:
        bill = self._bills.get(lease.node)
        if bill is not None and end > lease.since:
            bill.spans.append(lease.span(end, activity))

    def _work(self, lease: LeaseBill) -> InFlight:
        return InFlight(
            request=lease.request.id,
            kind=lease.request.kind,
            lease=lease.id,
            saved_denoise_step=lease.committed_denoise_step,
        )

    def _in_flight(self, key: NodeKey) -> list[InFlight]:
        return [
            self._work(lease) for lease in self._leases.values() if lease.node == key and not lease.queued
        ]

    def _end_training(self) -> None:
        if self._training_since is not None:
            self._trainings.append((self._training_since, self._now))
            self._training_since = None

    def _pieces(self, bill: NodeBill, now: float) -> Iterator[Piece]:
        """The node's life cut up, with what is still under way taken to last until ``now``."""
        key = (bill.node, bill.incarnation)
        going = [
            lease.span(now, lease.request.kind)
            for lease in self._leases.values()
            if lease.node == key and not lease.queued
        ]
        training: list[tuple[float, float]] = []
        if bill.pool == RESERVED:
            training = list(self._trainings)
            if self._training_since is not None:
                training.append((self._training_since, now))
        return pieces(bill, [*bill.spans, *going], training, now)
