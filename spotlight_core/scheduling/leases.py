"""Leases and their lifetimes: one timer for all, since each lives equally long from its last sign of life."""

from spotlight_core.events import Command, SetTimer
from spotlight_core.scheduling.records import Lease


class Leases:
    """Leases by id.

    ``running`` is in the order of the last sign of life, so that the first is the first to run out.  A
    lease in ``queued`` waits behind another one: its life begins when that one ends.
    """

    def __init__(self, lease_seconds: float) -> None:
        self.running: dict[str, Lease] = {}
        self.queued: dict[str, Lease] = {}
        self._lease_seconds = lease_seconds
        self._timer: str | None = None

    def get(self, lease: str) -> Lease | None:
        return self.running.get(lease) or self.queued.get(lease)

    def begin(self, lease: Lease, at: float) -> None:
        lease.begun = True
        lease.alive_until = at + self._lease_seconds
        self.running[lease.id] = lease

    def sign_of_life(self, lease: Lease, at: float) -> None:
        """The holder has just been heard of; a lease that still waits behind another one has begun."""
        lease.begun = True
        if self.running.pop(lease.id, None) is not None:
            self.begin(lease, at)

    def end(self, lease: Lease) -> None:
        """Forget a lease, and take its group's next one for running if there is one."""
        group = lease.group
        if group.running is lease:
            del self.running[lease.id]
            group.running = None
        elif group.queued is lease:
            del self.queued[lease.id]
            group.queued = None

    def promote(self, lease: Lease, at: float) -> None:
        """What was behind the lease of its group runs now: the group began it by itself."""
        group = lease.group
        del self.queued[lease.id]
        group.queued, group.running = None, lease
        self.begin(lease, at)

    def watch(self, seq: int, commands: list[Command]) -> None:
        """See to it that a timer is set while anything runs."""
        if self._timer is None and self.running:
            first = next(iter(self.running.values()))
            self._timer = f"lease/{seq}"
            commands.append(SetTimer(id=self._timer, at=first.alive_until))

    def expired(self, timer: str, at: float) -> list[Lease]:
        """What has been silent for too long when a timer of ours passes."""
        if timer == self._timer:
            self._timer = None
        late: list[Lease] = []
        for lease in self.running.values():
            if lease.alive_until > at:
                break
            late.append(lease)
        return late
