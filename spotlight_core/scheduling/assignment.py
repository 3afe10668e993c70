"""Who gets what: idle groups pull, others load what is asked for, busy ones get one request ahead."""

from collections.abc import Iterable

from spotlight_core.events import Command, Event, Load, Phase, SetTimer, Start
from spotlight_core.scheduling.groups import SIDES, Groups
from spotlight_core.scheduling.leases import Leases
from spotlight_core.scheduling.order import KINDS, URGENCY
from spotlight_core.scheduling.queue import Queue
from spotlight_core.scheduling.records import Counters, Entry, Group, Lease, SchedulingRules, Shelf

_ALL = tuple(range(len(KINDS)))
_EXPLORE = URGENCY["explore"]


class Assignment:
    """Turns requests that wait and groups that could take them into ``Start`` and ``Load``."""

    def __init__(
        self, rules: SchedulingRules, counters: Counters, queue: Queue, groups: Groups, leases: Leases
    ) -> None:
        self._rules = rules
        self._counters = counters
        self._queue = queue
        self._groups = groups
        self._leases = leases
        self.change_phase("publish")

    def change_phase(self, phase: Phase) -> None:
        """What each side of the fleet may run from now on.

        Exploration runs on spot while training runs and on all nodes for a remainder; training owns the
        reserved nodes.
        """
        usual = _ALL if phase == "remainder" else _ALL[:_EXPLORE]
        self._allowed = (_ALL, ()) if phase == "train" else (usual, usual)
        self._sides = tuple(tuple(side for side in SIDES if kind in self._allowed[side]) for kind in _ALL)

    def may_run(self, entry: Entry, group: Group) -> bool:
        return entry.urgency in self._allowed[group.node.side]

    def assign(self, event: Event, commands: list[Command]) -> None:
        """Give out what waits: to idle groups that hold its policy, by loading it, ahead to busy ones."""
        waiting, groups = self._queue.waiting, self._groups
        if groups.idle[0] or groups.idle[1]:
            for urgency in _ALL:
                if waiting[urgency]:
                    self._start_on_idle(urgency, event, commands)
                    self._load_on_idle(urgency, event, commands)
        if self._rules.prefetch and (groups.room[0] or groups.room[1]):
            self._hand_ahead(event, commands)

    def feed(self, group: Group, event: Event, commands: list[Command]) -> None:
        """What ``assign`` would do for a group that has just become free, when nothing else has changed."""
        if group.listed is not None:
            self._groups.unlist(group)
        shelf, waiting = group.loaded, self._queue.waiting
        if shelf is not None:
            for urgency in self._allowed[group.node.side]:
                if waiting[urgency]:
                    here = shelf.waiting[urgency]
                    if group.running is not None and (here <= shelf.loading or not self._rules.prefetch):
                        break
                    entry = self._take(shelf, urgency, group) if here else None
                    if entry is None:
                        break  # it is for others, or for other weights
                    self._start(group, entry, event, commands)
                    if group.queued is not None:
                        return
                    self.feed(group, event, commands)
                    return
        self._groups.relist(group)
        if group.running is None and any(waiting):
            self.assign(event, commands)

    # -- idle groups ----------------------------------------------------------------------------------

    def _start_on_idle(self, urgency: int, event: Event, commands: list[Command]) -> None:
        passed: list[Group] = []
        for shelf in tuple(self._queue.ready[urgency]):
            while shelf.waiting[urgency]:
                group = self._groups.first_idle(self._sides[urgency], shelf)
                if group is None:
                    break
                self._groups.unlist(group)
                entry = self._take(shelf, urgency, group)
                if entry is None:
                    passed.append(group)  # all that waits has failed there: others go first
                else:
                    self._start(group, entry, event, commands)
                    self._groups.relist(group)
        self._restore(passed)

    def _load_on_idle(self, urgency: int, event: Event, commands: list[Command]) -> None:
        ready, passed = self._queue.ready[urgency], []
        while any(_unclaimed(shelf, urgency) for shelf in ready):
            group = self._groups.first_idle_of_any(self._sides[urgency])
            if group is None:
                break
            self._groups.unlist(group)
            shelf = self._wanted(urgency, group)
            if shelf is None:
                passed.append(group)
            else:
                self.load(group, shelf, event, commands)
        self._restore(passed)

    def _wanted(self, urgency: int, group: Group) -> Shelf | None:
        """The version that the group should load: that of the first request for which nobody loads yet."""
        best, best_item = None, None
        for shelf in self._queue.ready[urgency]:
            if shelf is group.loaded or not _unclaimed(shelf, urgency):
                continue
            if group.node.key in shelf.failed_on and self._elsewhere(urgency, group, shelf.failed_on):
                continue
            item = self._queue.first(shelf, urgency)
            if item is not None and self._failed_here(item[2], group):
                # Or two versions' failed requests would have it load both in turn, for ever.
                item = self._queue.first(shelf, urgency, group.node.key)
            if item is not None and (best_item is None or item < best_item):
                best, best_item = shelf, item
        return best

    def _failed_here(self, entry: Entry, group: Group) -> bool:
        """Whether the request failed on this node, and another one could try."""
        key = group.node.key
        return entry.failed_on == key and self._elsewhere(entry.urgency, group, (key,))

    def _restore(self, passed: list[Group]) -> None:
        for group in passed:
            self._groups.relist(group)

    # -- busy groups ----------------------------------------------------------------------------------

    def _hand_ahead(self, event: Event, commands: list[Command]) -> None:
        """One request ahead for busy groups, of what idle and loading ones leave.

        Only of the most urgent kind that waits: a less urgent one would hold the group back from it.
        """
        urgency = next((u for u in _ALL if self._queue.waiting[u]), None)
        if urgency is None:
            return
        passed: list[Group] = []
        for shelf in tuple(self._queue.ready[urgency]):
            while shelf.waiting[urgency] > shelf.loading:
                group = self._groups.first_with_room(self._sides[urgency], shelf)
                if group is None:
                    break
                self._groups.unlist(group)
                entry = self._take(shelf, urgency, group)
                if entry is None:
                    passed.append(group)
                else:
                    self._start(group, entry, event, commands)
        self._restore(passed)

    # -- both -----------------------------------------------------------------------------------------

    def _take(self, shelf: Shelf, urgency: int, group: Group) -> Entry | None:
        first = self._queue.first(shelf, urgency)
        if first is None:
            return None
        avoid = first[2].failed_on is not None and self._failed_here(first[2], group)
        return self._queue.take(shelf, urgency, group.node.key if avoid else None)

    def go_on(self, group: Group, entry: Entry, event: Event, commands: list[Command]) -> None:
        """Start a request from the state that the group's ranks hold, behind what the group runs."""
        self._groups.unlist(group)
        self._start(group, entry, event, commands)
        self._groups.relist(group)

    def _elsewhere(self, urgency: int, group: Group, failed_on: Iterable[tuple[str, int]]) -> bool:
        """Whether some other node that stays may run this kind, and has not failed."""
        sides = self._sides[urgency]
        return any(
            not node.draining and node.side in sides and key not in failed_on
            for key, node in self._groups.nodes.items()
            if key != group.node.key
        )

    def load(self, group: Group, shelf: Shelf, event: Event, commands: list[Command]) -> None:
        """Have an idle group load a policy version."""
        shelf.loading += 1
        group.loading, group.loaded = shelf, None
        group.load_by = event.at + self._rules.lease_seconds
        commands.append(Load(group=group.ref, policy=shelf.policy))
        ranks = ",".join(map(str, group.ref.ranks))
        commands.append(SetTimer(id=f"load/{group.node.label}/{ranks}", at=group.load_by))

    def _start(self, group: Group, entry: Entry, event: Event, commands: list[Command]) -> None:
        counters = self._counters
        counters.leases = number = counters.leases + 1
        name = f"{event.epoch}.{number}"
        step, ref, digest = entry.from_denoise_step, entry.state_ref, entry.state_digest
        if entry.held is not None:
            step, ref, digest = entry.held.denoise_step, entry.held.ref, entry.held.digest
            entry.held = None
        entry.lease = lease = Lease(id=name, entry=entry, group=group, state_ref=ref)
        entry.status = "in_flight"
        ahead = group.running is not None
        if ahead:
            group.queued = self._leases.queued[name] = lease
        else:
            group.running = lease
            self._leases.begin(lease, event.at)
            counters.resumed += step > 0
        commands.append(
            Start(
                group=group.ref,
                lease=name,
                request=entry.request,
                from_denoise_step=step,
                state_ref=ref,
                state_digest=digest,
                queued=ahead,
            )
        )


def _unclaimed(shelf: Shelf, urgency: int) -> bool:
    """Whether more waits, of this urgency or a greater one, than groups load for it."""
    return sum(shelf.waiting[: urgency + 1]) > shelf.loading
