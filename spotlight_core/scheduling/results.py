"""How leases end and what comes of their requests: results, commits, failures, cancellations."""

from spotlight_core.events import (
    Alarm,
    Cancelled,
    Command,
    Committed,
    Event,
    Failed,
    Finished,
    Settle,
    Started,
)
from spotlight_core.scheduling.assignment import Assignment
from spotlight_core.scheduling.departures import Departures
from spotlight_core.scheduling.leases import Leases
from spotlight_core.scheduling.queue import Queue
from spotlight_core.scheduling.records import Counters, Group, Lease, Result
from spotlight_core.scheduling.regroup import Regrouping


class Results:
    """Handlers of the events that carry a lease."""

    def __init__(
        self,
        counters: Counters,
        queue: Queue,
        leases: Leases,
        assignment: Assignment,
        departures: Departures,
        regrouping: Regrouping,
    ) -> None:
        self._counters = counters
        self._queue = queue
        self._leases = leases
        self._assignment = assignment
        self._departures = departures
        self._regrouping = regrouping

    def finished(self, event: Finished, commands: list[Command]) -> None:
        lease = self._leases.running.get(event.lease)
        if lease is None or lease.entry.lease is not lease or lease.entry.request.id != event.request:
            self._finished_late(event, commands)
            return
        self._queue.settle(lease.entry, Result(event.ref, event.digest, lease.entry.shelf))
        commands.append(Settle(request=event.request, outcome="done", ref=event.ref))
        lease.group.node.failures_in_a_row = 0
        self._leases.end(lease)
        self._group_goes_on(lease.group, event, commands)

    def _finished_late(self, event: Finished, commands: list[Command]) -> None:
        """A result under a lease that is not, or no longer, the one of its request."""
        name, leases = event.request, self._leases
        lease = leases.get(event.lease)
        if lease is not None and lease.entry.request.id != name:
            lent = lease.entry.request.id
            commands.append(
                Alarm(detail=f"a result for {name} under lease {event.lease}, which is for {lent}")
            )
            return
        if lease is not None:
            lease.group.node.failures_in_a_row = 0
            leases.end(lease)
        self._take_late(event, lease, commands)
        if lease is not None:
            self._group_goes_on(lease.group, event, commands)

    def _take_late(self, event: Finished, lease: Lease | None, commands: list[Command]) -> None:
        """The first result wins, whoever has it: its bits are those that any other would have."""
        name, queue = event.request, self._queue
        entry = queue.entries.get(name)
        if queue.is_of_former_life(name, event.lease):
            self._counters.refused += 1
        elif entry is None and name in queue.settled:
            self._repeated(event, commands)
        elif not self._is_ours(event, event.lease, name):
            self._counters.refused += 1
        elif entry is None:
            commands.append(Alarm(detail=f"a result for {name}, which was never submitted"))
        else:
            twin = queue.settle(entry, Result(event.ref, event.digest, entry.shelf))
            commands.append(Settle(request=name, outcome="done", ref=event.ref))
            if twin is not None and twin is not lease:
                self._departures.abandon(twin, commands)

    def _is_ours(self, event: Event, lease: str, name: str) -> bool:
        """Whether a lease was given in this epoch, and not to a cancelled namesake of the request."""
        number = lease.partition(".")[2]
        given = number.isdecimal() and int(number) <= self._counters.leases
        ours = given and lease.startswith(f"{event.epoch}.")
        return ours and not self._queue.is_of_former_life(name, lease)

    def _repeated(self, event: Finished, commands: list[Command]) -> None:
        result = self._queue.settled[event.request]
        if result is not None and result.digest != event.digest:
            detail = f"two results of {event.request} differ: {result.digest} and {event.digest}"
            commands.append(Alarm(detail=detail))
        else:
            self._counters.duplicates_dropped += 1

    def committed(self, event: Committed, commands: list[Command]) -> None:
        lease = self._leases.get(event.lease)
        if lease is None and event.held:
            return  # what it holds is given up with its lease
        if lease is None:
            # Its holder has lost the lease, and its commit is as good as any.
            entry = self._queue.entries.get(event.request)
            if entry is None or not self._is_ours(event, event.lease, event.request):
                return
        else:
            entry = lease.entry
            if entry.request.id != event.request:
                return
            if event.held:
                self._regrouping.held(event, lease, commands)
                return
        if event.next_denoise_step >= entry.from_denoise_step:
            entry.from_denoise_step = event.next_denoise_step
            entry.state_ref, entry.state_digest = event.ref, event.digest
        if lease is None:
            return
        if not event.released:
            self._leases.sign_of_life(lease, event.at)
            return
        self._leases.end(lease)
        self._departures.take_back(lease, "released", commands, is_failure=False)
        self._group_goes_on(lease.group, event, commands)
        self._assignment.assign(event, commands)

    def failed(self, event: Failed, commands: list[Command]) -> None:
        lease = self._leases.get(event.lease)
        if lease is None:
            return
        entry, node = lease.entry, lease.group.node
        self._leases.end(lease)
        # A later commit than the one that is damaged may be known: it stays what the request goes on from.
        if event.commit_lost and entry.state_ref == lease.state_ref:
            entry.from_denoise_step, entry.state_ref, entry.state_digest = 0, None, None
        if lease.abandoned:
            self._departures.take_back(lease, event.error, commands, is_failure=False)
        elif event.fault == "nobody":
            self._departures.excuse(lease, event.error, commands)
        elif event.fault == "request":
            if entry.lease is lease:
                self._departures.give_up(lease, event.error, commands)
        else:
            if not event.commit_lost:
                entry.failed_on = node.key
                self._departures.node_failure(node, event, commands)
            self._departures.take_back(lease, event.error, commands, is_failure=True)
        self._group_goes_on(lease.group, event, commands)
        self._assignment.assign(event, commands)

    def started(self, event: Started, commands: list[Command]) -> None:
        lease = self._leases.get(event.lease)
        if lease is not None:
            self._leases.sign_of_life(lease, event.at)

    def cancelled(self, event: Cancelled, commands: list[Command]) -> None:
        for name in event.requests:
            entry = self._queue.entries.get(name)
            if entry is None:
                continue
            lease = self._queue.settle(entry, None)
            if lease is not None:
                self._departures.abandon(lease, commands)
            commands.append(Settle(request=name, outcome="cancelled", detail=event.reason))

    def _group_goes_on(self, group: Group, event: Event, commands: list[Command]) -> None:
        """A lease of the group has ended: what was behind it runs now, and there is room for another."""
        ahead = group.queued
        if ahead is not None and group.running is None:
            self._leases.promote(ahead, event.at)
            self._counters.resumed += ahead.entry.from_denoise_step > 0
        if group.node.draining:
            self._departures.release_if_empty(group.node, commands)
        elif group.settling:
            self._regrouping.consider(group.node, event, commands)
        else:
            self._assignment.feed(group, event, commands)
