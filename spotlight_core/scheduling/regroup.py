"""How the ranks of a node form other groups between two denoise steps.

    a rank comes ─► alone at first, loads what the others hold ─┐
    a rank is under notice, or lost ────────────────────────────┤
                                                                ▼
    groups that change yield, with their states held ─► quiet ─► Regroup ─► Regrouped
                                                                ─► what was held goes on at once

The layout policy says which groups there should be (``elastic.layout``).  Nothing new is placed on a group
that is to change; its requests' states stay in the memory of its ranks, the first of which leads on.  A
state that is held is worth more than the last commit, and is no more than a bonus: whatever goes wrong,
the request goes on from the commit.
"""

from spotlight_core.elastic.layout import Groups as Layout
from spotlight_core.elastic.layout import NodeLayout, changed_groups
from spotlight_core.events import (
    Command,
    Committed,
    Event,
    RankLost,
    RankNotice,
    RankReady,
    Regroup,
    Regrouped,
    ReleaseRank,
    SetTimer,
    SPGroup,
)
from spotlight_core.scheduling.assignment import Assignment
from spotlight_core.scheduling.departures import Departures
from spotlight_core.scheduling.groups import Groups
from spotlight_core.scheduling.leases import Leases
from spotlight_core.scheduling.queue import Queue
from spotlight_core.scheduling.records import Entry, Group, Held, Lease, Node, SchedulingRules, Shelf


class Regrouping:
    """Handlers of the events of ranks; see the module's text."""

    def __init__(
        self,
        layout: NodeLayout,
        rules: SchedulingRules,
        queue: Queue,
        groups: Groups,
        leases: Leases,
        assignment: Assignment,
        departures: Departures,
    ) -> None:
        self._layout = layout
        self._rules = rules
        self._queue = queue
        self._groups = groups
        self._leases = leases
        self._assignment = assignment
        self._departures = departures

    # -- events ---------------------------------------------------------------------------------------

    def rank_noticed(self, event: RankNotice, commands: list[Command]) -> None:
        node = self._groups.nodes.get((event.node, event.incarnation))
        if node is None or node.draining:
            return
        by = event.at + event.seconds_left
        for rank in event.ranks:
            if rank in node.there and by < node.noticed_ranks.get(rank, float("inf")):
                node.noticed_ranks[rank] = by
                commands.append(SetTimer(id=f"rank/{node.label}/{rank}", at=by))
        if len(node.noticed_ranks) == len(node.there):  # of the node nothing stays
            node.noticed = True
            self._departures.drain(node, by, "notice", event, commands)
        self._changed(node, event, commands)

    def rank_lost(self, event: RankLost, commands: list[Command]) -> None:
        node = self._groups.nodes.get((event.node, event.incarnation))
        if node is None or event.rank not in node.there:
            return
        taken = event.cause in ("revoked", "restarted") or event.rank in node.noticed_ranks
        node.there.remove(event.rank)
        node.noticed_ranks.pop(event.rank, None)
        group = node.group_of(event.rank)
        if group is not None:
            running = group.running
            if running is not None and not running.abandoned and not taken:
                running.entry.failed_on = node.key
            self._departures.load_failure(group, event.error or event.cause, commands)
            self._take_apart(
                group, event.error or event.cause, commands, is_failure=not (taken or node.noticed)
            )
        if not taken:
            self._departures.node_failure(node, event, commands)
        self._departures.release_if_empty(node, commands)
        self._changed(node, event, commands)

    def rank_ready(self, node: Node, event: RankReady, commands: list[Command]) -> None:
        if event.rank in node.there:
            return
        node.shelves.pop(event.rank, None)
        node.there.append(event.rank)
        node.there.sort()
        group = node.groups.get((event.rank,))
        if group is not None:  # it was alone, and is again
            group.down = False
            self._groups.relist(group)
            self._departures.release_if_empty(node, commands)
        self._changed(node, event, commands)

    def regrouped(self, event: Regrouped, commands: list[Command]) -> None:
        node = self._groups.nodes.get((event.node, event.incarnation))
        if node is None or not node.regrouping or event.generation != node.generation:
            return
        node.regrouping = False
        for ranks in event.groups:
            # One that lost a rank meanwhile is none; the others are grouped anew.
            if ranks not in node.groups and all(rank in node.there for rank in ranks):
                self._form(node, ranks)
        for rank in [rank for rank in node.noticed_ranks if node.group_of(rank) is None]:
            del node.noticed_ranks[rank]
            node.there.remove(rank)
            commands.append(ReleaseRank(node=event.node, incarnation=event.incarnation, rank=rank))
        self._changed(node, event, commands)

    def held(self, event: Committed, lease: Lease, commands: list[Command]) -> None:
        """A group's ranks hold a state; they let go of its lease, since the group changes or is broken."""
        entry, group, node = lease.entry, lease.group, lease.group.node
        self._leases.end(lease)
        if entry.lease is lease:
            entry.lease = None
            entry.status = "held"
            entry.held = Held(event.ref, event.digest, event.next_denoise_step, group.ref.ranks)
            node.held.append(entry)
        if group.settling or node.draining:
            self._changed(node, event, commands)
            self._departures.release_if_empty(node, commands)
        else:  # broken: word of the rank that is lost is on the way
            self._settle(group)
            at = event.at + self._rules.lease_seconds
            commands.append(SetTimer(id=f"regroup/{node.label}", at=at))

    def deadline(self, label: str, rank: int, event: Event, commands: list[Command]) -> None:
        """A rank's notice is over: what its group still holds is lost."""
        node = self._groups.node_of(label)
        by = node.noticed_ranks.get(rank) if node is not None else None
        if node is None or by is None or event.at < by:
            return
        group = node.group_of(rank)
        if group is not None:
            self._take_apart(group, "no commit before the GPU's deadline", commands, is_failure=False)
        self._changed(node, event, commands)

    def overdue(self, label: str, event: Event, commands: list[Command]) -> None:
        """A group broke, and no word came of a rank that is lost: they go on as they are."""
        node = self._groups.node_of(label)
        if node is not None:
            self._changed(node, event, commands)

    def lost(self, node: Node) -> None:
        """The node is gone, and what its ranks held with it."""
        self._let_go_of_held(node)

    def consider(self, node: Node, event: Event, commands: list[Command]) -> None:
        """Take the next step from the groups that a node has to those that it should have."""
        if node.draining:
            self._let_go_of_held(node)
            return
        if node.regrouping:
            return
        current = tuple(ranks for ranks, group in node.groups.items() if not group.down)
        stay = [rank for rank in node.there if rank not in node.noticed_ranks]
        wanted = self._layout.groups(stay, current)
        ended, formed = changed_groups(current, wanted)
        changing = [node.groups[ranks] for ranks in ended]
        self._resettle(node, changing)
        if not ended and not formed:
            self._go_on(node, event, commands)
        elif ended and all(rank in stay for ranks in ended for rank in ranks):
            # Nothing presses: who comes loads beside the others before these stop for it.
            grouped = {rank for ranks in current for rank in ranks}
            alone = tuple((rank,) for ranks in formed for rank in ranks if rank not in grouped)
            if alone:
                self._regroup(node, (*current, *alone), [], commands)
            elif not self._loads_first(changing, event, commands):
                self._change(node, wanted, changing, formed, event, commands)
        else:
            self._change(node, wanted, changing, formed, event, commands)

    # -- steps ----------------------------------------------------------------------------------------

    def _changed(self, node: Node, event: Event, commands: list[Command]) -> None:
        self.consider(node, event, commands)
        self._assignment.assign(event, commands)

    def _change(
        self,
        node: Node,
        wanted: Layout,
        changing: list[Group],
        formed: Layout,
        event: Event,
        commands: list[Command],
    ) -> None:
        """Quieten the groups that change, and form the others once they are quiet."""
        leaders = {ranks[0] for ranks in formed}
        by = event.at + self._rules.lease_seconds
        for group in changing:
            self._settle(group)
            hold = not leaders.isdisjoint(group.ref.ranks)
            self._departures.yield_(group, by, "regroup", commands, hold=hold)
        if not any(group.occupied for group in changing):
            self._regroup(node, wanted, changing, commands)

    def _resettle(self, node: Node, changing: list[Group]) -> None:
        """Groups that were to change and are not any more take requests again, once they let go of what they
        were told to."""
        for group in node.groups.values():
            lets_go = group.running is not None and group.running.entry.status == "yielding"
            if group.settling and group not in changing and not lets_go:
                group.settling = False
                self._groups.relist(group)

    def _settle(self, group: Group) -> None:
        """Nothing new is placed on a group that is to change."""
        group.settling = True
        self._groups.unlist(group)

    def _take_apart(self, group: Group, why: str, commands: list[Command], *, is_failure: bool) -> None:
        """Take back what a group has; its ranks are in no group from now on, unless it was of one rank,
        which keeps its group for when it is back."""
        node, loaded = group.node, group.loaded
        self._departures.strip(group, why, commands, is_failure=is_failure)
        if group.ref.degree > 1 or group.ref.ranks[0] in node.noticed_ranks:
            node.shelves.update(dict.fromkeys(group.ref.ranks, loaded))
            del node.groups[group.ref.ranks]

    def _loads_first(self, changing: list[Group], event: Event, commands: list[Command]) -> bool:
        """Have idle groups load what the others hold; whether one has yet to come to that."""
        busy = [group for group in changing if group.running is not None]
        shelf = next((group.loaded for group in busy or changing if group.loaded is not None), None)
        waits = False
        for group in changing:
            if group.loading is not None:
                waits = True
            elif group.loaded is not shelf:
                waits = True
                if shelf is not None and not group.occupied:
                    self._settle(group)
                    self._assignment.load(group, shelf, event, commands)
        return waits

    def _regroup(self, node: Node, wanted: Layout, changing: list[Group], commands: list[Command]) -> None:
        for group in changing:
            self._groups.unlist(group)
            node.shelves.update(dict.fromkeys(group.ref.ranks, group.loaded))
            del node.groups[group.ref.ranks]
        # A rank alone whose process is gone is in none of them: it is grouped anew when it is back.
        for ranks in [ranks for ranks, group in node.groups.items() if group.down and ranks not in wanted]:
            del node.groups[ranks]
        node.regrouping = True
        node.generation += 1
        name, incarnation = node.key
        commands.append(
            Regroup(node=name, incarnation=incarnation, generation=node.generation, groups=wanted)
        )

    def _form(self, node: Node, ranks: tuple[int, ...]) -> None:
        name, incarnation = node.key
        ref = SPGroup(node=name, incarnation=incarnation, ranks=ranks, generation=node.generation)
        group = node.groups[ranks] = Group(ref, node)
        held: set[Shelf | None] = {node.shelves.pop(rank, None) for rank in ranks}
        group.loaded = held.pop() if len(held) == 1 else None
        self._groups.relist(group)

    def _go_on(self, node: Node, event: Event, commands: list[Command]) -> None:
        """Requests whose states are held go on where these are; two on one group one after the other."""
        waiting, node.held = node.held, []
        for entry in waiting:
            if entry.status != "held" or entry.held is None:
                continue  # cancelled
            ranks = entry.held.ranks
            group = next((one for one in node.groups.values() if one.ref.ranks[0] in ranks), None)
            if group is not None and self._takes(group, entry):
                self._assignment.go_on(group, entry, event, commands)
            else:
                self._queue.wait(entry)

    def _takes(self, group: Group, entry: Entry) -> bool:
        there = not group.down and not group.settling and group.queued is None
        return there and group.loaded is entry.shelf and self._assignment.may_run(entry, group)

    def _let_go_of_held(self, node: Node) -> None:
        waiting, node.held = node.held, []
        for entry in waiting:
            if entry.status == "held":
                self._queue.wait(entry)
