"""The scheduler's books, counted again: what it keeps up to date must be what it would find by looking."""

from collections import Counter

from spotlight_core.scheduling.records import Entry, Group
from spotlight_core.scheduling.requests import RequestScheduler


def check_books(scheduler: RequestScheduler) -> None:
    """AssertionError when a count, a list or a lease is not what requests and groups say."""
    queue, leases = scheduler._queue, scheduler._leases
    groups = [group for node in scheduler._groups.nodes.values() for group in node.groups.values()]
    pending = [entry for entry in queue.entries.values() if entry.status == "pending"]
    waiting = Counter((entry.shelf, entry.urgency) for entry in pending)
    for shelf in queue._shelves.values():
        assert shelf.loading == sum(group.loading is shelf for group in groups)
        for urgency in range(len(shelf.waiting)):
            assert shelf.waiting[urgency] == waiting[shelf, urgency]
            assert (shelf in queue.ready[urgency]) == (waiting[shelf, urgency] > 0)
            assert len(shelf.heaps[urgency]) <= 2 * waiting[shelf, urgency] + 64
    assert [sum(waiting[key] for key in waiting if key[1] == u) for u in range(4)] == queue.waiting
    assert {x.id: x for group in groups if (x := group.running)} == leases.running
    assert {x.id: x for group in groups if (x := group.queued)} == leases.queued
    lives = [lease.alive_until for lease in leases.running.values()]
    assert lives == sorted(lives)
    assert leases._timer is not None or not lives
    assert scheduler._groups.staying == sum(not node.draining for node in scheduler._groups.nodes.values())
    for group in groups:
        _check_lists(scheduler, group)
        for entry in pending:
            assert not _could_start(scheduler, group, entry), (group, entry)


def _check_lists(scheduler: RequestScheduler, group: Group) -> None:
    free = not (group.down or group.node.draining or group.loading or group.queued)
    lists = scheduler._groups.room if group.running else scheduler._groups.idle
    assert (group in lists[group.node.side].get(group.loaded, ())) == free
    assert (group.listed is not None) == free


def _could_start(scheduler: RequestScheduler, group: Group, entry: Entry) -> bool:
    """Whether a group stands idle beside a request that it could have."""
    free = group.listed is not None and group.running is None
    fits = group.loaded is entry.shelf and scheduler._assignment.may_run(entry, group)
    return free and fits and entry.failed_on is None
