"""The central queue: every request that has not reached its end, and what came of the others."""

from heapq import heapify, heappop, heappush

from spotlight_core.events import NodeKey
from spotlight_core.scheduling.order import KINDS, URGENCY, Order
from spotlight_core.scheduling.records import Entry, HeapItem, Lease, Result, Shelf
from spotlight_core.types import GenerationRequest, PolicyVersion

_SLACK = 64  # settled entries that a heap may hold before it is swept


class Queue:
    """Requests by name, and those that wait by urgency and policy version.

    ``waiting``: how many wait, by urgency; ``ready``: the shelves on which some do.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        self.entries: dict[str, Entry] = {}
        self.settled: dict[str, Result | None] = {}  # None when it was cancelled or given up
        self.waiting = [0] * len(KINDS)
        self.ready: tuple[dict[Shelf, None], ...] = tuple({} for _ in KINDS)
        self._shelves: dict[tuple[str, int, str], Shelf] = {}
        self._former_leases: dict[str, int] = {}  # leases up to this number are of a cancelled namesake
        self._arrivals = 0

    def shelf(self, policy: PolicyVersion) -> Shelf:
        """The shelf of a policy version; its digest belongs to its name."""
        key = (policy.label, policy.number, policy.digest)
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = Shelf(policy)
        return shelf

    def submit(self, request: GenerationRequest, shelf: Shelf, deadline: float | None, leases: int) -> bool:
        """Take a request in; False when it is here already, or done.

        One that was cancelled or given up begins anew: what it had committed is forgotten, and the
        ``leases`` given so far have no say in its new life.
        """
        name = request.id
        if name in self.entries:
            return False
        if name in self.settled:
            if self.settled[name] is not None:
                return False
            del self.settled[name]
            self._former_leases[name] = leases
        self._arrivals = arrival = self._arrivals + 1
        urgency = URGENCY[request.kind]
        entry = Entry(request=request, arrival=arrival, urgency=urgency, shelf=shelf, deadline=deadline)
        self.entries[name] = entry
        self.wait(entry)
        return True

    def wait(self, entry: Entry) -> None:
        """The entry waits for a group."""
        entry.status, entry.held = "pending", None
        urgency, shelf = entry.urgency, entry.shelf
        key = self.order.key(entry.request, entry.from_denoise_step, entry.deadline)
        heappush(shelf.heaps[urgency], (key, entry.arrival, entry))
        self.waiting[urgency] += 1
        waiting = shelf.waiting
        waiting[urgency] += 1
        if waiting[urgency] == 1:
            self.ready[urgency][shelf] = None

    def take(self, shelf: Shelf, urgency: int, avoided_by: NodeKey | None) -> Entry | None:
        """The first that waits on a shelf, but for those that failed on the node ``avoided_by``.

        It is taken off the heap, and its status is the caller's to change.
        """
        heap = shelf.heaps[urgency]
        skipped: list[HeapItem] = []
        found = None
        while heap:
            item = heappop(heap)
            entry = item[2]
            if entry.status != "pending":
                continue
            if entry.failed_on is not None and entry.failed_on == avoided_by:
                skipped.append(item)
                continue
            found = entry
            self._no_longer_waits(shelf, urgency)
            break
        for item in skipped:
            heappush(heap, item)
        return found

    def first(self, shelf: Shelf, urgency: int, avoided_by: NodeKey | None = None) -> HeapItem | None:
        """The first that waits on a shelf, left there; see ``take``."""
        heap = shelf.heaps[urgency]
        while heap and heap[0][2].status != "pending":
            heappop(heap)
        if not heap or avoided_by is None or heap[0][2].failed_on != avoided_by:
            return heap[0] if heap else None
        others = (item for item in heap if item[2].status == "pending" and item[2].failed_on != avoided_by)
        return min(others, default=None)

    def settle(self, entry: Entry, result: Result | None) -> Lease | None:
        """The entry's end; returns the lease that it still had, which is no longer its own."""
        name = entry.request.id
        was_pending = entry.status == "pending"
        entry.status = "settled"
        if was_pending:
            self._no_longer_waits(entry.shelf, entry.urgency)
            self._sweep(entry.shelf, entry.urgency)
        del self.entries[name]
        self.settled[name] = result
        lease, entry.lease = entry.lease, None
        return lease

    def is_of_former_life(self, name: str, lease: str) -> bool:
        """Whether a lease was given to a cancelled namesake of a request."""
        last = self._former_leases.get(name)
        if last is None:
            return False
        number = lease.partition(".")[2]
        return not number.isdecimal() or int(number) <= last

    def _no_longer_waits(self, shelf: Shelf, urgency: int) -> None:
        self.waiting[urgency] -= 1
        waiting = shelf.waiting
        waiting[urgency] -= 1
        if not waiting[urgency]:
            del self.ready[urgency][shelf]

    def _sweep(self, shelf: Shelf, urgency: int) -> None:
        """Drop settled entries once they are most of a heap: taking would do it, but perhaps never does."""
        heap = shelf.heaps[urgency]
        if len(heap) > 2 * shelf.waiting[urgency] + _SLACK:
            heap[:] = [item for item in heap if item[2].status == "pending"]
            heapify(heap)
