"""A fleet and its clients at random: what may happen next, and what must hold whatever does.

It keeps its own account of groups, leases, commits and ends from the words alone, and holds every command
against it.  All times are multiples of 1/64, which shifting by a power of two leaves exact.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spotlight_core.events import (
    Abandon,
    Alarm,
    Committed,
    Event,
    Failed,
    Fault,
    Finished,
    Load,
    NodeKey,
    Phase,
    Release,
    SetTimer,
    Settle,
    SPGroup,
    Start,
    Timer,
    Yield,
)
from spotlight_core.scheduling.order import build_order
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.types import GenerationRequest, PolicyVersion
from tests.core.scheduling.books import check_books
from tests.core.scheduling.world import NEXT_POLICY, POLICY

EPOCH, SHIFT = 3, 2.0**20
RULES = {"lease_seconds": 60.0, "max_attempts": 6, "nodes_seconds": 2.0**30}


@dataclass(slots=True, eq=False)
class Life:
    """A submitted request until its end; a cancelled name that comes again has another life."""

    request: GenerationRequest
    step: int = 0
    ref: str | None = None
    digest: str | None = None
    outcome: str | None = None
    result: str | None = None


@dataclass(slots=True, eq=False)
class Lease:
    """What a group holds.  ``taken``: the scheduler told it to drop this, or lost sight of it."""

    start: Start
    life: Life
    yielding: bool = False
    taken: bool = False


@dataclass(slots=True, eq=False)
class Group:
    ref: SPGroup
    running: Lease | None = None
    queued: Lease | None = None
    loading: PolicyVersion | None = None
    loaded: PolicyVersion | None = None
    down: bool = False

    @property
    def leases(self) -> list[Lease]:
        return [lease for lease in (self.running, self.queued) if lease is not None]


@dataclass(slots=True, eq=False)
class Node:
    key: NodeKey
    pool: str
    groups: list[Group]
    leaving: bool = False  # nothing is to be started on it
    released: bool = False


@dataclass(slots=True, eq=False)
class RandomWorld:
    """A scheduler with two doubles: one told the same, one told the same at other times."""

    order: str = "fifo"
    prefetch: bool = True
    events: int = 0
    at: float = 0.0
    phase: Phase = "publish"
    nodes: dict[NodeKey, Node] = field(default_factory=dict)
    lives: dict[str, Life] = field(default_factory=dict)  # the present one of each name
    lost_leases: list[Lease] = field(default_factory=list)  # whose holders may still speak
    told: list[tuple[Finished, Life]] = field(default_factory=list)  # results, to be told again
    asked_again: Counter[str] = field(default_factory=Counter)  # of what is done
    winning: Life | None = None  # whose result is being told
    timers: list[tuple[float, int, str]] = field(default_factory=list)
    load_failures: Counter[PolicyVersion] = field(default_factory=Counter)
    incarnations: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    schedulers: tuple[RequestScheduler, ...] = ()

    def __post_init__(self) -> None:
        rules = SchedulingRules(prefetch=self.prefetch, **RULES)  # type: ignore[arg-type]
        self.schedulers = tuple(RequestScheduler(rules, build_order(self.order)) for _ in range(3))

    # -- telling ------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Tell the scheduler and its doubles, compare what they say, hold it against the account."""
        self.events += 1
        event = event.stamped(self.at, self.events, EPOCH)
        commands, again, shifted = (
            scheduler.decide(told)
            for scheduler, told in zip(self.schedulers, (event, event, shift(event, SHIFT)), strict=True)
        )
        assert commands == again
        assert commands == [shift(command, -SHIFT) for command in shifted]
        for command in commands:
            self.seen[type(command).__name__] += 1
            getattr(self, f"_{type(command).__name__.lower()}")(command)
        assert all(lease.taken or lease.life.outcome is None for lease in self.held())
        check_books(self.schedulers[0])

    def _start(self, start: Start) -> None:
        node = self.nodes[start.group.node, start.group.incarnation]
        group = self.group(start.group)
        life = self.lives[start.request.id]
        assert not node.leaving
        assert not node.released
        assert not group.down
        assert group.loading is None
        assert group.loaded == start.request.policy
        assert life.outcome is None
        assert start.request == life.request
        resume = (start.from_denoise_step, start.state_ref, start.state_digest)
        assert resume == (life.step, life.ref, life.digest)
        assert not [lease for lease in self.held() if lease.life is life and not lease.taken]
        if self.phase == "train":
            assert node.pool != "reserved"
        else:
            assert start.request.kind != "explore" or self.phase == "remainder"
        lease = Lease(start, life)
        if start.queued:
            assert self.prefetch
            assert group.running is not None
            assert group.queued is None
            group.queued = lease
        else:
            assert group.running is None
            assert group.queued is None
            group.running = lease
        self.seen["queued"] += start.queued
        self.seen["resumed"] += start.from_denoise_step > 0

    def _yield(self, command: Yield) -> None:
        [lease] = [x for x in self.group(command.group).leases if x.start.lease == command.lease]
        assert command.by >= self.at
        assert not lease.taken
        assert not lease.yielding
        lease.yielding = True
        if command.reason != "training":
            self.nodes[command.group.node, command.group.incarnation].leaving = True

    def _abandon(self, command: Abandon) -> None:
        [lease] = [x for x in self.group(command.group).leases if x.start.lease == command.lease]
        assert not lease.taken
        lease.taken = True

    def _load(self, command: Load) -> None:
        node, group = self.nodes[command.group.node, command.group.incarnation], self.group(command.group)
        assert not node.leaving
        assert not node.released
        assert not group.down
        assert not group.leases
        assert group.loading is None
        assert group.loaded != command.policy
        group.loading, group.loaded = command.policy, None

    def _release(self, command: Release) -> None:
        node = self.nodes[command.node, command.incarnation]
        assert not node.released
        assert all(lease.taken for group in node.groups for lease in group.leases)
        node.released = node.leaving = True

    def _settimer(self, command: SetTimer) -> None:
        assert command.at >= self.at
        self.timers.append((command.at, self.events, command.id))

    def _settle(self, command: Settle) -> None:
        life = self.lives[command.request]
        if life.outcome == "done":  # told again to who asks again
            assert self.asked_again[command.request] > 0
            self.asked_again[command.request] -= 1
            assert command == Settle(request=command.request, outcome="done", ref=life.result)
            return
        assert life.outcome is None
        life.outcome, life.result = command.outcome, command.ref
        assert (command.outcome == "done") == (command.ref is not None)
        assert command.outcome != "done" or self.winning is life
        self.seen[command.outcome] += 1

    def _alarm(self, command: Alarm) -> None:
        policies = [policy for policy in (POLICY, NEXT_POLICY) if f"loads of {policy.name}" in command.detail]
        assert policies, command.detail
        assert self.load_failures[policies[0]] >= RULES["max_attempts"], command.detail

    # -- the account --------------------------------------------------------------------------------

    def group(self, ref: SPGroup) -> Group:
        return self.nodes[ref.node, ref.incarnation].groups[ref.ranks[0]]

    def groups(self) -> list[Group]:
        return [group for node in self.nodes.values() for group in node.groups]

    def held(self) -> list[Lease]:
        return [lease for group in self.groups() for lease in group.leases]

    def forget(self, lease: Lease) -> None:
        """A group holds the lease no more; what was behind it runs."""
        for group in self.groups():
            if group.running is lease:
                group.running, group.queued = group.queued, None
            elif group.queued is lease:
                group.queued = None

    def lose(self, group: Group) -> None:
        """Everything a group holds is gone, but for words of it that are still under way."""
        for lease in group.leases:
            lease.taken = True
            self.lost_leases = [*self.lost_leases[-20:], lease]
        group.running = group.queued = group.loading = group.loaded = None
        group.down = True

    def commit(self, lease: Lease, step: int, *, released: bool) -> None:
        """The store has acknowledged; whoever committed, the request goes on from there."""
        name = lease.start.request.id
        ref = f"{name}@{lease.life.request.policy.name}@{step}"
        if lease.life is self.lives[name] and lease.life.outcome is None and step >= lease.life.step:
            lease.life.step, lease.life.ref, lease.life.digest = step, ref, f"digest of {ref}"
        event = Committed(
            lease=lease.start.lease,
            request=name,
            next_denoise_step=step,
            ref=ref,
            digest=f"digest of {ref}",
            released=released,
        )
        if released:
            self.forget(lease)
        self.tell(event)

    def finish(self, lease: Lease) -> None:
        request = lease.start.request
        event = Finished(
            lease=lease.start.lease,
            request=request.id,
            ref=f"result of {request.id}",
            digest=f"{request.id} {request.policy.name}",
        )
        self.told = [*self.told[-20:], (event, lease.life)]
        self.forget(lease)
        self.tell_result(event, lease.life)

    def tell_result(self, event: Finished, life: Life) -> None:
        """A result may only ever end the life of the request that it is of."""
        self.winning = life
        self.tell(event)
        self.winning = None

    def fail(self, lease: Lease, error: str, fault: Fault, *, commit_lost: bool = False) -> None:
        life = lease.life
        if commit_lost and life.outcome is None and life.ref == lease.start.state_ref:
            life.step, life.ref, life.digest = 0, None, None
        self.forget(lease)
        self.tell(Failed(lease=lease.start.lease, error=error, fault=fault, commit_lost=commit_lost))

    def _note_load_that_ends_here(self, timer: str) -> None:
        for group in self.groups():
            label = f"{group.ref.node}#{group.ref.incarnation}/{group.ref.ranks[0]}"
            if timer == f"load/{label}" and group.loading is not None:
                self.load_failures[group.loading] += 1

    def pass_time(self, seconds: float) -> None:
        """Timers fire in their order on the way."""
        until = self.at + seconds
        while due := sorted(timer for timer in self.timers if timer[0] <= until):
            self.timers.remove(due[0])
            self.at = max(self.at, due[0][0])
            self._note_load_that_ends_here(due[0][2])
            self.tell(Timer(id=due[0][2]))
        self.at = until


def shift(word: Any, seconds: float) -> Any:
    """The same word at another time."""
    names = {"at", "by", "deadline"} & set(type(word).__struct_fields__)
    values = {name: getattr(word, name) for name in names}
    return msgspec.structs.replace(
        word, **{name: value + seconds for name, value in values.items() if value is not None}
    )
