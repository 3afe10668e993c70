"""How groups and nodes leave: what runs yields, what waits is taken back, and then the node is let go."""

from spotlight_core.events import Abandon, Alarm, Command, Event, Release, SetTimer, Settle, Yield
from spotlight_core.scheduling.groups import Groups
from spotlight_core.scheduling.leases import Leases
from spotlight_core.scheduling.queue import Queue
from spotlight_core.scheduling.records import EXCUSED, Counters, Group, Lease, Node, SchedulingRules


class Departures:
    """Takes leases off groups and nodes out of the fleet; what that frees is assigned by its caller."""

    def __init__(
        self, rules: SchedulingRules, counters: Counters, queue: Queue, groups: Groups, leases: Leases
    ) -> None:
        self._rules = rules
        self._counters = counters
        self._queue = queue
        self._groups = groups
        self._leases = leases

    # -- leases ---------------------------------------------------------------------------------------

    def take_back(self, lease: Lease, why: str, commands: list[Command], *, is_failure: bool) -> None:
        """The lease has ended without a result: its request waits again, or is given up.

        A lease whose request has another one, or has reached its end, changes nothing.
        """
        entry = lease.entry
        if entry.lease is not lease:
            return
        entry.lease = None
        if is_failure:
            entry.failures += 1
            if entry.failures >= self._rules.max_attempts:
                detail = f"{entry.failures} attempts used up, the last one ended with: {why}"
                self.give_up(lease, detail, commands)
                return
        if lease.begun and not lease.abandoned and entry.state_ref is None:
            self._counters.recomputed += 1
        self._queue.wait(entry)

    def excuse(self, lease: Lease, why: str, commands: list[Command]) -> None:
        """The lease ended by itself through nobody's fault: its request waits again, but not for ever."""
        entry = lease.entry
        entry.excused += 1
        if entry.lease is lease and entry.excused > EXCUSED * self._rules.max_attempts:
            detail = f"{entry.excused} leases ended through no fault of its own, the last one with: {why}"
            self.give_up(lease, detail, commands)
        else:
            self.take_back(lease, why, commands, is_failure=False)

    def give_up(self, lease: Lease, detail: str, commands: list[Command]) -> None:
        """The lease's request is aborted."""
        self._queue.settle(lease.entry, None)
        commands.append(Settle(request=lease.entry.request.id, outcome="aborted", detail=detail))

    def abandon(self, lease: Lease, commands: list[Command]) -> None:
        """Have a group drop a lease; it is occupied until it says that it has."""
        if not lease.abandoned:
            lease.abandoned = True
            commands.append(Abandon(lease=lease.id, group=lease.group.ref))

    def yield_(
        self, group: Group, by: float, reason: str, commands: list[Command], *, hold: bool = False
    ) -> None:
        """Have a group commit what it runs, or ``hold`` it, and take back what it has not begun.

        The latter first: letting go of the one begins the other.
        """
        for lease in (group.queued, group.running):
            if lease is None or lease.abandoned:
                continue
            if not lease.begun:
                self.abandon(lease, commands)
            elif lease.entry.status == "in_flight":
                lease.entry.status = "yielding"
                commands.append(Yield(lease=lease.id, group=group.ref, by=by, reason=reason, hold=hold))

    def strip(self, group: Group, why: str, commands: list[Command], *, is_failure: bool) -> None:
        """Nothing is to be expected of a group any more: take back all it has."""
        self._groups.unlist(group)
        if group.loading is not None:
            group.loading.loading -= 1
        group.loading = group.loaded = None
        group.down = True
        # The one behind first: ending the one that runs does not begin it here.
        for lease in (group.queued, group.running):
            if lease is not None:
                self._leases.end(lease)
                self.take_back(lease, why, commands, is_failure=is_failure and lease.begun)

    # -- nodes ----------------------------------------------------------------------------------------

    def drain(self, node: Node, by: float, reason: str, event: Event, commands: list[Command]) -> None:
        """Place nothing else on a node, and let it go once it has nothing left, or at ``by``."""
        if node.draining:
            if by < node.drain_by and not node.released:
                node.drain_by = by
                self._set_drain_timer(node, commands)
            return
        self._groups.drain(node)
        node.drain_by = by
        for group in node.groups.values():
            self.yield_(group, by, reason, commands)
        if not self.release_if_empty(node, commands):
            self._set_drain_timer(node, commands)

    def _set_drain_timer(self, node: Node, commands: list[Command]) -> None:
        commands.append(SetTimer(id=f"drain/{node.label}", at=node.drain_by))

    def release_if_empty(self, node: Node, commands: list[Command]) -> bool:
        """Let a draining node go that has nothing left; returns whether it is let go."""
        empty = node.draining and not any(group.occupied for group in node.groups.values())
        if empty and not node.released:
            node.released = True
            commands.append(Release(node=node.key[0], incarnation=node.key[1]))
        return node.released

    def overdue(self, node: Node, commands: list[Command]) -> None:
        """A draining node's time is up: nothing it still holds will be waited for."""
        for group in node.groups.values():
            if group.occupied:
                self._cut(group, "no commit before the node's deadline", commands, is_failure=False)
        self.release_if_empty(node, commands)

    def silent(self, lease: Lease, event: Event, commands: list[Command]) -> None:
        """A lease ran out: its group may still hold the work, so its node gets no more of it."""
        group, node = lease.group, lease.group.node
        self._counters.expired += 1
        why = f"silent for {self._rules.lease_seconds:g} s"
        self._cut(group, why, commands, is_failure=not node.noticed)
        self.drain(node, event.at + self._rules.lease_seconds, "silence", event, commands)
        self.release_if_empty(node, commands)

    def stuck_loading(self, group: Group, event: Event, commands: list[Command]) -> None:
        """A load of weights never ended."""
        self.load_failure(group, f"no answer in {self._rules.lease_seconds:g} s", commands)
        self._cut(group, "weights were not loaded in time", commands, is_failure=False)
        self.drain(group.node, event.at + self._rules.lease_seconds, "silence", event, commands)
        self.release_if_empty(group.node, commands)

    def _cut(self, group: Group, why: str, commands: list[Command], *, is_failure: bool) -> None:
        held = [lease for lease in (group.queued, group.running) if lease is not None]
        commands += [Abandon(lease=x.id, group=group.ref) for x in held if not x.abandoned]
        self.strip(group, why, commands, is_failure=is_failure)

    def load_failure(self, group: Group, error: str, commands: list[Command]) -> None:
        """A group could not load a version: others go first, and when none can the run must not hang."""
        shelf = group.loading
        if shelf is None:
            return
        shelf.loading -= 1
        group.loading = None
        shelf.failed_on.add(group.node.key)
        shelf.failures_in_a_row += 1
        if shelf.failures_in_a_row >= self._rules.max_attempts:
            tries = f"{shelf.failures_in_a_row} loads of {shelf.policy.name} failed in a row"
            commands.append(Alarm(detail=f"{tries}, the last one on {group.node.label} with: {error}"))

    def node_failure(self, node: Node, event: Event, commands: list[Command]) -> None:
        """A node that fails fast is idle first: unchecked it would eat every request's attempts."""
        node.failures_in_a_row += 1
        if node.failures_in_a_row >= self._rules.max_node_failures:
            self.drain(node, event.at + self._rules.lease_seconds, "quarantine", event, commands)
