"""The request scheduler: one central queue, groups that pull, resume from committed latents.

A pure state machine.  A request goes ``pending → in_flight → done``; a notice or a release takes it
through ``yielding`` back to ``pending`` at the committed denoise step; a loss back to ``pending`` at
the last commit (the start when there is none: recompute).  Time is ``event.at`` and ties break by
arrival number, so a recorded event log replays to identical commands.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from spotlight_core.events import (
    Abandon,
    Alarm,
    Cancelled,
    Command,
    Committed,
    Event,
    Failed,
    Finished,
    Load,
    Lost,
    NodeJoined,
    Notice,
    Phase,
    PhaseChanged,
    Release,
    SetTimer,
    Settle,
    SPGroup,
    Start,
    Submitted,
    Timer,
    WeightsLoaded,
    Yield,
)
from spotlight_core.scheduling.order import Candidate, FirstComeFirstServed, Order
from spotlight_core.types import GenerationRequest, PolicyVersion

Status = Literal["pending", "in_flight", "yielding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingRules:
    """Limits of the queue.  ``lease_seconds``: silence after which a lease is taken for lost."""

    lease_seconds: float
    max_attempts: int


@dataclass(slots=True, kw_only=True)
class _Entry:
    request: GenerationRequest
    arrival: int
    status: Status = "pending"
    from_denoise_step: int = 0
    state_ref: str | None = None
    attempts: int = 0


@dataclass(slots=True, kw_only=True)
class _Node:
    name: str
    incarnation: int
    pool: str
    idle_since: int
    draining: bool = False
    loading: str | None = None
    loaded: str | None = None
    lease: str | None = None

    @property
    def group(self) -> SPGroup:
        return SPGroup(node=self.name, generation=self.incarnation)

    @property
    def idle(self) -> bool:
        return not self.draining and self.loading is None and self.lease is None


@dataclass(slots=True, kw_only=True)
class _Lease:
    id: str
    request: str
    node: tuple[str, int]


@dataclass(slots=True)
class Counters:
    """What the queue lived through."""

    resumed: int = 0
    recomputed: int = 0
    duplicates_dropped: int = 0
    leases: int = 0
    submitted: int = 0


@dataclass(slots=True)
class RequestScheduler:
    """Event in, commands out; see the module's text.  Each node is one SP group of degree 1."""

    rules: SchedulingRules
    order: Order = field(default_factory=FirstComeFirstServed)
    phase: Phase = "publish"
    counters: Counters = field(default_factory=Counters)
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _settled: dict[str, str | None] = field(default_factory=dict)  # digest of the result, None if aborted
    _nodes: dict[tuple[str, int], _Node] = field(default_factory=dict)
    _leases: dict[str, _Lease] = field(default_factory=dict)
    _renewals: dict[str, int] = field(default_factory=dict)

    def decide(self, event: Event) -> list[Command]:
        """Take one event, return the commands it causes, in order."""
        handler = _HANDLERS.get(type(event))
        commands = handler(self, event) if handler else []
        return commands + self._assign(event)

    # -- requests -----------------------------------------------------------------------------------

    def _submitted(self, event: Submitted) -> list[Command]:
        for request in event.requests:
            if request.id not in self._entries and request.id not in self._settled:
                self.counters.submitted += 1
                self._entries[request.id] = _Entry(request=request, arrival=self.counters.submitted)
        return []

    def _finished(self, event: Finished) -> list[Command]:
        lease = self._end_lease(event.lease, event.seq)
        if event.request in self._settled:
            return self._repeated(event) + self._release_if_drained(lease)
        if event.request not in self._entries:
            return [Alarm(detail=f"a result for {event.request}, which was never submitted")]
        twin = self._lease_of(event.request)
        self._settle(event.request, event.digest)
        commands: list[Command] = [Settle(request=event.request, outcome="done", ref=event.ref)]
        if twin is not None:
            commands.append(Abandon(lease=twin.id, group=self._nodes[twin.node].group))
        return commands + self._release_if_drained(lease)

    def _repeated(self, event: Finished) -> list[Command]:
        digest = self._settled[event.request]
        if digest is not None and digest != event.digest:
            return [Alarm(detail=f"two results of {event.request} differ: {digest} and {event.digest}")]
        self.counters.duplicates_dropped += 1
        return []

    def _committed(self, event: Committed) -> list[Command]:
        lease = self._leases.get(event.lease)
        entry = self._entries.get(event.request)
        if lease is None or lease.request != event.request or entry is None:
            return []
        entry.from_denoise_step, entry.state_ref = event.next_denoise_step, event.ref
        if not event.released:
            return [self._lease_timer(event.lease, event.at)]
        entry.status = "pending"
        return self._release_if_drained(self._end_lease(event.lease, event.seq))

    def _failed(self, event: Failed) -> list[Command]:
        lease = self._end_lease(event.lease, event.seq)
        if lease is None:
            return []
        if event.retryable or lease.request not in self._entries:
            commands = self._back_to_queue(lease.request, event.error)
        else:
            commands = self._abort(lease.request, event.error)
        return commands + self._release_if_drained(lease)

    def _cancelled(self, event: Cancelled) -> list[Command]:
        commands: list[Command] = []
        for name in event.requests:
            lease = self._lease_of(name)
            if lease is not None:
                commands.append(Abandon(lease=lease.id, group=self._nodes[lease.node].group))
            if name in self._entries:
                commands += self._abort(name, event.reason)
        return commands

    def _abort(self, request: str, detail: str) -> list[Command]:
        self._settle(request, None)
        return [Settle(request=request, outcome="aborted", detail=detail)]

    def _settle(self, request: str, digest: str | None) -> None:
        del self._entries[request]
        self._settled[request] = digest

    def _back_to_queue(self, request: str, why: str) -> list[Command]:
        entry = self._entries.get(request)
        if entry is None:  # another lease has settled it meanwhile
            return []
        if entry.attempts >= self.rules.max_attempts:
            return self._abort(request, f"{entry.attempts} attempts used up, the last one ended with: {why}")
        entry.status = "pending"
        if entry.state_ref is None:
            self.counters.recomputed += 1
        return []

    # -- nodes --------------------------------------------------------------------------------------

    def _joined(self, event: NodeJoined) -> list[Command]:
        key = (event.node, event.incarnation)
        self._nodes[key] = _Node(
            name=event.node, incarnation=event.incarnation, pool=event.pool, idle_since=event.seq
        )
        return []

    def _noticed(self, event: Notice) -> list[Command]:
        node = self._nodes.get((event.node, event.incarnation))
        if node is None or node.draining:
            return []
        node.draining = True
        if node.lease is None:
            return [Release(node=node.name, incarnation=node.incarnation)]
        by = event.at + event.seconds_left
        entry = self._entries.get(self._leases[node.lease].request)
        if entry is not None:
            entry.status = "yielding"
        return [
            Yield(lease=node.lease, group=node.group, by=by, reason="notice"),
            SetTimer(id=f"drain/{node.name}/{node.incarnation}", at=by),
        ]

    def _lost(self, event: Lost) -> list[Command]:
        node = self._nodes.pop((event.node, event.incarnation), None)
        if node is None or node.lease is None:
            return []
        lease = self._leases.pop(node.lease)
        return self._back_to_queue(lease.request, f"{node.name} {event.cause}")

    def _loaded(self, event: WeightsLoaded) -> list[Command]:
        node = self._nodes.get((event.node, event.incarnation))
        if node is None:
            return []
        if event.digest != event.policy.digest:
            return [
                Alarm(
                    detail=f"{event.node} holds other weights than {event.policy.name}: "
                    f"{event.digest[:12]} instead of {event.policy.digest[:12]}"
                )
            ]
        node.loading, node.loaded, node.idle_since = None, event.policy.name, event.seq
        if node.draining:
            return [Release(node=node.name, incarnation=node.incarnation)]
        return []

    def _phase_changed(self, event: PhaseChanged) -> list[Command]:
        self.phase = event.phase
        return []

    def _timer(self, event: Timer) -> list[Command]:
        kind, _, name = event.id.partition("/")
        if kind == "drain":
            node_name, _, incarnation = name.rpartition("/")
            node = self._nodes.get((node_name, int(incarnation)))
            if node is None or node.lease is None:
                return []
            expired, why = node.lease, "no commit before the provider's deadline"
        else:
            lease_id, _, renewal = name.rpartition("#")
            if lease_id not in self._leases or self._renewals.get(lease_id) != int(renewal):
                return []
            expired, why = lease_id, f"silent for {self.rules.lease_seconds:g} s"
        lease = self._leases[expired]
        node = self._nodes[lease.node]
        # A node that went silent or overran its deadline may still hold the work: it gets no more.
        node.draining = True
        self._end_lease(expired, event.seq)
        return [
            Abandon(lease=expired, group=node.group),
            *self._back_to_queue(lease.request, why),
            Release(node=node.name, incarnation=node.incarnation),
        ]

    # -- leases -------------------------------------------------------------------------------------

    def _lease_timer(self, lease: str, at: float) -> SetTimer:
        self._renewals[lease] = self._renewals.get(lease, 0) + 1
        return SetTimer(id=f"lease/{lease}#{self._renewals[lease]}", at=at + self.rules.lease_seconds)

    def _lease_of(self, request: str) -> _Lease | None:
        return next((lease for lease in self._leases.values() if lease.request == request), None)

    def _end_lease(self, lease_id: str, seq: int) -> _Lease | None:
        lease = self._leases.pop(lease_id, None)
        self._renewals.pop(lease_id, None)
        node = self._nodes.get(lease.node) if lease else None
        if node is not None:
            node.lease, node.idle_since = None, seq
        return lease

    def _release_if_drained(self, lease: _Lease | None) -> list[Command]:
        node = self._nodes.get(lease.node) if lease else None
        if node is None or not node.draining:
            return []
        return [Release(node=node.name, incarnation=node.incarnation)]

    # -- assignment ---------------------------------------------------------------------------------

    def _may_run(self, entry: _Entry, pool: str) -> bool:
        """Exploration runs on spot while training runs and on all nodes for a remainder; training owns
        the reserved nodes."""
        if self.phase == "train":
            return pool != "reserved"
        return entry.request.kind != "explore" or self.phase == "remainder"

    def _assign(self, event: Event) -> list[Command]:
        commands: list[Command] = []
        for node in sorted(self._nodes.values(), key=lambda n: (n.idle_since, n.name)):
            entry = self._next_for(node) if node.idle else None
            if entry is None:
                continue
            if node.loaded == entry.request.policy.name:
                commands += self._start(node, entry, event)
            else:
                commands.append(self._load(node, entry.request.policy))
        return commands

    def _next_for(self, node: _Node) -> _Entry | None:
        candidates = [
            Candidate(
                request=name,
                kind=entry.request.kind,
                arrival=entry.arrival,
                remaining_denoise_steps=entry.request.fidelity.denoise_steps - entry.from_denoise_step,
            )
            for name, entry in self._entries.items()
            if entry.status == "pending" and self._may_run(entry, node.pool)
        ]
        return self._entries[self.order.first(candidates).request] if candidates else None

    def _load(self, node: _Node, policy: PolicyVersion) -> Load:
        node.loading = policy.name
        return Load(node=node.name, incarnation=node.incarnation, policy=policy)

    def _start(self, node: _Node, entry: _Entry, event: Event) -> list[Command]:
        self.counters.leases += 1
        lease = f"{event.epoch}.{self.counters.leases}"
        self._leases[lease] = _Lease(id=lease, request=entry.request.id, node=(node.name, node.incarnation))
        node.lease = lease
        entry.status = "in_flight"
        entry.attempts += 1
        if entry.from_denoise_step:
            self.counters.resumed += 1
        start = Start(
            group=node.group,
            lease=lease,
            request=entry.request,
            from_denoise_step=entry.from_denoise_step,
            state_ref=entry.state_ref,
        )
        return [start, self._lease_timer(lease, event.at)]


_HANDLERS: dict[type[Event], Callable[[RequestScheduler, Any], list[Command]]] = cast(
    Any,
    {
        Submitted: RequestScheduler._submitted,
        Finished: RequestScheduler._finished,
        Committed: RequestScheduler._committed,
        Failed: RequestScheduler._failed,
        Cancelled: RequestScheduler._cancelled,
        NodeJoined: RequestScheduler._joined,
        Notice: RequestScheduler._noticed,
        Lost: RequestScheduler._lost,
        WeightsLoaded: RequestScheduler._loaded,
        PhaseChanged: RequestScheduler._phase_changed,
        Timer: RequestScheduler._timer,
    },
)
