"""The request scheduler: one central queue, groups that pull, resume from committed latents.

A pure state machine.  A request goes ``pending → in_flight → done``; a notice or a release takes it
through ``yielding`` back to ``pending`` at the committed denoise step; a loss back to ``pending`` at
the last commit (the start when there is none: recompute).  Time is ``event.at`` and ties break by
arrival number, so a recorded event log replays to identical commands.

What belongs together is in files of its own: ``queue`` (requests that wait), ``leases`` (lifetimes),
``groups`` (who is idle), ``assignment`` (who gets what), ``results`` (how leases end), ``departures``
(how groups and nodes leave), ``regroup`` (how ranks form other groups), ``sleeping`` (who makes room for
training).
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from spotlight_core.elastic.layout import FixedDegree, NodeLayout
from spotlight_core.events import (
    Alarm,
    Asleep,
    Cancelled,
    Command,
    Committed,
    Event,
    Failed,
    Finished,
    LoadFailed,
    Lost,
    NodeJoined,
    Notice,
    Phase,
    PhaseChanged,
    RankLost,
    RankNotice,
    RankReady,
    Regrouped,
    SetTimer,
    Settle,
    Started,
    Submitted,
    Timer,
    WeightsLoaded,
)
from spotlight_core.scheduling.assignment import Assignment
from spotlight_core.scheduling.departures import Departures
from spotlight_core.scheduling.groups import Groups
from spotlight_core.scheduling.leases import Leases
from spotlight_core.scheduling.order import KINDS, URGENCY, FirstComeFirstServed, Order
from spotlight_core.scheduling.queue import Queue
from spotlight_core.scheduling.records import Counters, Group, QueueSnapshot, SchedulingRules
from spotlight_core.scheduling.regroup import Regrouping
from spotlight_core.scheduling.results import Results
from spotlight_core.scheduling.sleeping import Sleeping
from spotlight_core.types import GenerationRequest


class RequestScheduler:
    """Event in, commands out; see the module's text."""

    def __init__(
        self, rules: SchedulingRules, order: Order | None = None, layout: NodeLayout | None = None
    ) -> None:
        """``order``: by arrival when absent.  ``layout``: each rank alone when absent."""
        self.rules = rules
        self.phase: Phase = "publish"
        self.counters = Counters()
        self._queue = Queue(order or FirstComeFirstServed())
        self._groups = Groups()
        self._leases = Leases(rules.lease_seconds)
        parts = (rules, self.counters, self._queue, self._groups, self._leases)
        self._assignment = Assignment(*parts)
        self._departures = Departures(*parts)
        self._regrouping = Regrouping(
            layout or FixedDegree(1),
            rules,
            self._queue,
            self._groups,
            self._leases,
            self._assignment,
            self._departures,
        )
        self._results = Results(
            self.counters,
            self._queue,
            self._leases,
            self._assignment,
            self._departures,
            self._regrouping,
        )
        self._sleeping = Sleeping(rules.sleep, self._groups)
        self._handlers = self._by_event()
        self._stranded: int | None = None  # the event since which requests have had no node

    def decide(self, event: Event) -> list[Command]:
        """Take one event, return the commands it causes, in order."""
        commands: list[Command] = []
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event, commands)
            self._leases.watch(event.seq, commands)
            if not self._groups.staying or self._stranded is not None:
                self._watch_for_nodes(event, commands)
        return commands

    def _by_event(self) -> dict[type[Event], Callable[[Any, list[Command]], None]]:
        results, regrouping = self._results, self._regrouping
        return {
            Submitted: self._submitted,
            Started: results.started,
            Finished: results.finished,
            Committed: results.committed,
            Failed: results.failed,
            Cancelled: results.cancelled,
            NodeJoined: self._joined,
            Notice: self._noticed,
            Lost: self._lost,
            WeightsLoaded: self._loaded,
            LoadFailed: self._load_failed,
            RankNotice: regrouping.rank_noticed,
            RankLost: regrouping.rank_lost,
            RankReady: self._rank_ready,
            Regrouped: regrouping.regrouped,
            Asleep: self._sleeping.asleep,
            PhaseChanged: self._phase_changed,
            Timer: self._timer,
        }

    def snapshot(self) -> QueueSnapshot:
        """Counts of the present moment, for gauges."""
        groups = [group for node in self._groups.nodes.values() for group in node.groups.values()]
        return QueueSnapshot(
            pending=dict(zip(KINDS, self._queue.waiting, strict=True)),
            in_flight=len(self._leases.running),
            queued=len(self._leases.queued),
            groups_idle=sum(not group.down and not group.occupied for group in groups),
            groups_busy=sum(group.running is not None for group in groups),
            groups_loading=sum(group.loading is not None for group in groups),
            groups_lost=sum(group.down for group in groups),
            nodes_draining=sum(node.draining for node in self._groups.nodes.values()),
            trainer_alone=self._sleeping.trainer_alone,
            counters=asdict(self.counters),
        )

    # -- requests -----------------------------------------------------------------------------------

    def _submitted(self, event: Submitted, commands: list[Command]) -> None:
        queue, counters, deadline = self._queue, self.counters, event.deadline
        policy, shelf = None, None
        for request in event.requests:
            if shelf is None or request.policy is not policy:
                policy = request.policy
                shelf = queue.shelf(policy)
            if queue.submit(request, shelf, deadline, counters.leases):
                counters.submitted += 1
            else:
                self._submitted_again(request, commands)
        self._assignment.assign(event, commands)

    def _submitted_again(self, request: GenerationRequest, commands: list[Command]) -> None:
        """One that is here is waited for by one client more; one that is done is told of again."""
        entry, result = self._queue.entries.get(request.id), self._queue.settled.get(request.id)
        known = entry or result
        if known is not None and known.shelf is not self._queue.shelf(request.policy):
            detail = f"{request.id} was submitted for {known.shelf.policy.name}"
            commands.append(Alarm(detail=f"{detail}, and again for {request.policy.name}"))
        elif result is not None:
            commands.append(Settle(request=request.id, outcome="done", ref=result.ref))

    # -- groups and nodes -----------------------------------------------------------------------------

    def _joined(self, event: NodeJoined, commands: list[Command]) -> None:
        node = self._groups.join(event)
        if node is not None:
            for group in node.groups.values():
                self._groups.relist(group)
            self._sleeping.consider(node, commands)
            self._regrouping.consider(node, event, commands)
            self._assignment.assign(event, commands)

    def _rank_ready(self, event: RankReady, commands: list[Command]) -> None:
        node = self._groups.nodes.get((event.node, event.incarnation))
        if node is not None:
            self._sleeping.consider(node, commands)
            self._regrouping.rank_ready(node, event, commands)

    def _noticed(self, event: Notice, commands: list[Command]) -> None:
        node = self._groups.nodes.get((event.node, event.incarnation))
        if node is None:
            return
        # Said again, it changes nothing unless its deadline is an earlier one.
        node.noticed = node.noticed or event.source != "fleet"
        self._departures.drain(node, event.at + event.seconds_left, "notice", event, commands)
        if node.held:
            self._regrouping.consider(node, event, commands)
            self._assignment.assign(event, commands)

    def _lost(self, event: Lost, commands: list[Command]) -> None:
        self._sleeping.lost((event.node, event.incarnation))
        node = self._groups.remove((event.node, event.incarnation))
        if node is not None:
            for group in node.groups.values():
                self._departures.strip(group, f"{event.node} {event.cause}", commands, is_failure=False)
            self._regrouping.lost(node)
            self._assignment.assign(event, commands)

    def _loaded(self, event: WeightsLoaded, commands: list[Command]) -> None:
        group = self._groups.find(event.group)
        if group is None:
            return
        if event.digest != event.policy.digest:
            holds = f"{event.group.node} holds other weights than {event.policy.name}"
            is_and_should = f"{event.digest[:12]} instead of {event.policy.digest[:12]}"
            commands.append(Alarm(detail=f"{holds}: {is_and_should}"))
            return
        shelf = self._queue.shelf(event.policy)
        shelf.failures_in_a_row = 0  # late or not: it can be loaded
        if group.down or group.running is not None or group.loading not in (None, shelf):
            return  # a late word of a load that is no longer waited for
        if group.loading is not None:
            shelf.loading -= 1
        group.loading, group.loaded = None, shelf
        shelf.failed_on.discard(group.node.key)
        self._group_changed(group, event, commands)

    def _load_failed(self, event: LoadFailed, commands: list[Command]) -> None:
        group = self._groups.find(event.group)
        if group is None or group.loading is not self._queue.shelf(event.policy):
            return
        self._departures.load_failure(group, event.error, commands)
        self._departures.node_failure(group.node, event, commands)
        self._group_changed(group, event, commands)

    def _group_changed(self, group: Group, event: Event, commands: list[Command]) -> None:
        """Let the group go if it was only waited for, else give it what there is."""
        self._groups.relist(group)
        self._departures.release_if_empty(group.node, commands)
        self._regrouping.consider(group.node, event, commands)
        self._assignment.assign(event, commands)

    def _phase_changed(self, event: PhaseChanged, commands: list[Command]) -> None:
        self.phase = event.phase
        self._assignment.change_phase(event.phase)
        by = event.at + self.rules.lease_seconds
        for node in self._groups.nodes.values():
            training = event.phase == "train" and node.side == 1
            for group in node.groups.values():
                self._take_back_what_may_not_run(group, commands)
                lease = group.running
                if training and lease is not None and lease.entry.urgency != URGENCY["rollout"]:
                    self._departures.yield_(group, by, "training", commands)
        self._sleeping.phase_changed(event, commands)
        self._assignment.assign(event, commands)

    def _take_back_what_may_not_run(self, group: Group, commands: list[Command]) -> None:
        ahead = group.queued
        if ahead is not None and not ahead.begun and not self._assignment.may_run(ahead.entry, group):
            self._departures.abandon(ahead, commands)

    # -- timers -----------------------------------------------------------------------------------------

    def _timer(self, event: Timer, commands: list[Command]) -> None:
        kind, _, rest = event.id.partition("/")
        if kind == "lease":
            for lease in self._leases.expired(event.id, event.at):
                self._departures.silent(lease, event, commands)
        elif kind == "nodes":
            self._no_node_came(rest, commands)
        elif kind == "drain":
            node = self._groups.node_of(rest)
            if node is not None and node.draining and not node.released and event.at >= node.drain_by:
                self._departures.overdue(node, commands)
        elif kind == "load":
            label, _, ranks = rest.rpartition("/")
            node = self._groups.node_of(label)
            group = node.groups.get(tuple(map(int, ranks.split(",")))) if node is not None else None
            if group is not None and group.loading is not None and event.at >= group.load_by:
                self._departures.stuck_loading(group, event, commands)
        elif kind == "rank":
            label, _, rank = rest.rpartition("/")
            self._regrouping.deadline(label, int(rank), event, commands)
        elif kind == "regroup":
            self._regrouping.overdue(rest, event, commands)
        self._assignment.assign(event, commands)

    def _watch_for_nodes(self, event: Event, commands: list[Command]) -> None:
        """Requests that no node can take are waited for only so long: a hang would be told to nobody."""
        if self._groups.staying or not self._queue.entries:
            self._stranded = None
        elif self._stranded is None:
            self._stranded = event.seq
            commands.append(SetTimer(id=f"nodes/#{event.seq}", at=event.at + self.rules.nodes_seconds))

    def _no_node_came(self, since: str, commands: list[Command]) -> None:
        if since == f"#{self._stranded}":
            waited = f"no node for {self.rules.nodes_seconds:g} s"
            commands.append(Alarm(detail=f"{waited}, and {len(self._queue.entries)} requests wait for one"))
