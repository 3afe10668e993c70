"""The request scheduler: one central queue, groups that pull, resume from committed latents.

A pure state machine.  A request goes ``pending → in_flight → done``; a notice or a release takes it
through ``yielding`` back to ``pending`` at the committed denoise step; a loss back to ``pending`` at
the last commit (the start when there is none: recompute).  Time is ``event.at`` and ties break by
arrival number, so a recorded event log replays to identical commands.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

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
    Start,
    Started,
    Submitted,
    Timer,
    WeightsLoaded,
    Yield,
)
from spotlight_core.scheduling.order import Candidate, FirstComeFirstServed, Order
from spotlight_core.scheduling.records import Counters, Entry, Lease, Node, NodeKey, SchedulingRules
from spotlight_core.types import PolicyVersion


@dataclass(slots=True)
class RequestScheduler:
    """Event in, commands out; see the module's text.  Each node is one SP group of degree 1."""

    rules: SchedulingRules
    order: Order = field(default_factory=FirstComeFirstServed)
    phase: Phase = "publish"
    counters: Counters = field(default_factory=Counters)
    _entries: dict[str, Entry] = field(default_factory=dict)
    _settled: dict[str, str | None] = field(default_factory=dict)  # digest of the result, None if aborted
    _nodes: dict[NodeKey, Node] = field(default_factory=dict)
    _leases: dict[str, Lease] = field(default_factory=dict)
    _stranded: int | None = None  # the event since which requests have had no node

    def decide(self, event: Event) -> list[Command]:
        """Take one event, return the commands it causes, in order."""
        handler = _HANDLERS.get(type(event))
        commands = handler(self, event) if handler else []
        return commands + self._assign(event) + self._watch_for_nodes(event)

    # -- requests -----------------------------------------------------------------------------------

    def _submitted(self, event: Submitted) -> list[Command]:
        for request in event.requests:
            if request.id not in self._entries and request.id not in self._settled:
                self.counters.submitted += 1
                self._entries[request.id] = Entry(request=request, arrival=self.counters.submitted)
        return []

    def _finished(self, event: Finished) -> list[Command]:
        lease = self._end_lease(event.lease, event.seq)
        if lease is not None and lease.node in self._nodes:
            self._nodes[lease.node].failures_in_a_row = 0
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
            self._renew(event.lease, event.at)
            return []
        entry.status = "pending"
        return self._release_if_drained(self._end_lease(event.lease, event.seq))

    def _failed(self, event: Failed) -> list[Command]:
        lease = self._end_lease(event.lease, event.seq)
        if lease is None:
            return []
        if lease.request not in self._entries:  # cancelled, or another lease has settled it
            return self._release_if_drained(lease)
        if not event.retryable:
            return self._abort(lease.request, event.error) + self._release_if_drained(lease)
        entry = self._entries[lease.request]
        entry.failed_on = lease.node
        if event.commit_lost:
            entry.from_denoise_step, entry.state_ref = 0, None
        self._note_failure(lease.node)
        return self._back_to_queue(lease.request, event.error) + self._release_if_drained(lease)

    def _note_failure(self, key: NodeKey) -> None:
        """A node that fails fast is idle first: unchecked it would eat every request's attempts."""
        node = self._nodes.get(key)
        if node is not None:
            node.failures_in_a_row += 1
            node.draining |= node.failures_in_a_row >= self.rules.max_node_failures

    def _started(self, event: Started) -> list[Command]:
        self._renew(event.lease, event.at)
        return []

    def _cancelled(self, event: Cancelled) -> list[Command]:
        commands: list[Command] = []
        for name in event.requests:
            lease = self._lease_of(name)
            if lease is not None:
                commands.append(Abandon(lease=lease.id, group=self._nodes[lease.node].group))
            if name in self._entries:
                self._settle(name, None)
                commands.append(Settle(request=name, outcome="cancelled", detail=event.reason))
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
        entry.failures += 1
        if entry.failures >= self.rules.max_attempts:
            return self._abort(request, f"{entry.failures} attempts used up, the last one ended with: {why}")
        entry.status = "pending"
        if entry.state_ref is None:
            self.counters.recomputed += 1
        return []

    # -- nodes --------------------------------------------------------------------------------------

    def _joined(self, event: NodeJoined) -> list[Command]:
        key = (event.node, event.incarnation)
        self._nodes[key] = Node(
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
            SetTimer(id=f"drain/{node.name}#{node.incarnation}", at=by),
        ]

    def _lost(self, event: Lost) -> list[Command]:
        node = self._nodes.pop((event.node, event.incarnation), None)
        if node is None or node.lease is None:
            return []
        lease = self._leases.pop(node.lease)
        return self._back_to_queue(lease.request, f"{node.name} {event.cause}")

    def _loaded(self, event: WeightsLoaded) -> list[Command]:
        node = self._nodes.get((event.group.node, event.group.generation))
        if node is None:
            return []
        if event.digest != event.policy.digest:
            return [
                Alarm(
                    detail=f"{event.group.node} holds other weights than {event.policy.name}: "
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
        kind, _, rest = event.id.partition("/")
        name, _, number = rest.rpartition("#")
        if kind in ("drain", "load"):
            return self._node_timer(kind, name, int(number), event)
        if kind == "nodes":
            return self._no_node_came(int(number))
        lease = self._leases.get(rest)
        if lease is None:
            return []
        if event.at < lease.alive_until:
            return [SetTimer(id=event.id, at=lease.alive_until)]
        return self._expire(lease, f"silent for {self.rules.lease_seconds:g} s", event.seq)

    def _node_timer(self, kind: str, name: str, incarnation: int, event: Timer) -> list[Command]:
        node = self._nodes.get((name, incarnation))
        if node is None:
            return []
        if kind == "drain" and node.lease is not None:
            why = "no commit before the provider's deadline"
            return self._expire(self._leases[node.lease], why, event.seq)
        if kind == "load" and node.loading is not None and event.at >= node.load_by:
            node.draining = True
            return [Release(node=node.name, incarnation=node.incarnation)]
        return []

    def _expire(self, lease: Lease, why: str, seq: int) -> list[Command]:
        node = self._nodes[lease.node]
        # A node that went silent or overran its deadline may still hold the work: it gets no more.
        node.draining = True
        self._end_lease(lease.id, seq)
        return [
            Abandon(lease=lease.id, group=node.group),
            *self._back_to_queue(lease.request, why),
            Release(node=node.name, incarnation=node.incarnation),
        ]

    def _watch_for_nodes(self, event: Event) -> list[Command]:
        """Requests that no node can take are waited for only so long: a hang would be told to nobody."""
        stranded = bool(self._entries) and all(node.draining for node in self._nodes.values())
        if not stranded:
            self._stranded = None
        elif self._stranded is None:
            self._stranded = event.seq
            return [SetTimer(id=f"nodes/#{event.seq}", at=event.at + self.rules.lease_seconds)]
        return []

    def _no_node_came(self, since: int) -> list[Command]:
        if self._stranded != since:
            return []
        waited = f"no node for {self.rules.lease_seconds:g} s"
        return [Alarm(detail=f"{waited}, and {len(self._entries)} requests wait for one")]

    # -- leases -------------------------------------------------------------------------------------

    def _renew(self, lease_id: str, at: float) -> None:
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.alive_until = at + self.rules.lease_seconds

    def _lease_of(self, request: str) -> Lease | None:
        return next((lease for lease in self._leases.values() if lease.request == request), None)

    def _end_lease(self, lease_id: str, seq: int) -> Lease | None:
        lease = self._leases.pop(lease_id, None)
        node = self._nodes.get(lease.node) if lease else None
        if node is not None:
            node.lease, node.idle_since = None, seq
        return lease

    def _release_if_drained(self, lease: Lease | None) -> list[Command]:
        node = self._nodes.get(lease.node) if lease else None
        if node is None or not node.draining:
            return []
        return [Release(node=node.name, incarnation=node.incarnation)]

    # -- assignment ---------------------------------------------------------------------------------

    def _may_run(self, entry: Entry, pool: str) -> bool:
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
                commands += self._load(node, entry.request.policy, event)
        return commands

    def _next_for(self, node: Node) -> Entry | None:
        alone = not any(other.key != node.key and not other.draining for other in self._nodes.values())
        candidates = [
            Candidate(request=name, kind=entry.request.kind, arrival=entry.arrival)
            for name, entry in self._entries.items()
            if entry.status == "pending"
            and self._may_run(entry, node.pool)
            and (entry.failed_on != node.key or alone)
        ]
        return self._entries[self.order.first(candidates).request] if candidates else None

    def _load(self, node: Node, policy: PolicyVersion, event: Event) -> list[Command]:
        node.loading, node.load_by = policy.name, event.at + self.rules.lease_seconds
        return [
            Load(group=node.group, policy=policy),
            SetTimer(id=f"load/{node.name}#{node.incarnation}", at=node.load_by),
        ]

    def _start(self, node: Node, entry: Entry, event: Event) -> list[Command]:
        self.counters.leases += 1
        lease = f"{event.epoch}.{self.counters.leases}"
        alive_until = event.at + self.rules.lease_seconds
        self._leases[lease] = Lease(
            id=lease, request=entry.request.id, node=node.key, alive_until=alive_until
        )
        node.lease = lease
        entry.status = "in_flight"
        if entry.from_denoise_step:
            self.counters.resumed += 1
        start = Start(
            group=node.group,
            lease=lease,
            request=entry.request,
            from_denoise_step=entry.from_denoise_step,
            state_ref=entry.state_ref,
        )
        return [start, SetTimer(id=f"lease/{lease}", at=alive_until)]


_HANDLERS: dict[type[Event], Callable[[RequestScheduler, Any], list[Command]]] = cast(
    Any,
    {
        Submitted: RequestScheduler._submitted,
        Started: RequestScheduler._started,
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
