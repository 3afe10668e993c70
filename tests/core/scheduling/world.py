"""A scheduler, and words in which to tell it what happens."""

from spotlight_core.elastic.layout import NodeLayout
from spotlight_core.events import (
    Alarm,
    Command,
    Committed,
    Event,
    Failed,
    Fault,
    Finished,
    Lost,
    NodeJoined,
    Notice,
    Phase,
    PhaseChanged,
    RankLost,
    RankReady,
    SPGroup,
    Start,
    Submitted,
    Timer,
    WeightsLoaded,
)
from spotlight_core.scheduling.order import Order
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.types import Fidelity, GenerationRequest, Kind, PolicyVersion, Prompt

POLICY = PolicyVersion(label="old", number=1, digest="d1")
NEXT_POLICY = PolicyVersion(label="old", number=2, digest="d2")


def group(node: str, rank: int = 0, incarnation: int = 1) -> SPGroup:
    return SPGroup(node=node, incarnation=incarnation, ranks=(rank,))


def rank_lost(lost: SPGroup, error: str = "killed") -> RankLost:
    """The process behind a group of one rank died."""
    (rank,) = lost.ranks
    return RankLost(node=lost.node, incarnation=lost.incarnation, rank=rank, cause="died", error=error)


def rank_ready(back: SPGroup) -> RankReady:
    (rank,) = back.ranks
    return RankReady(node=back.node, incarnation=back.incarnation, rank=rank)


RESERVED, SPOT = group("reserved-0"), group("spot-0")


def request(
    name: str,
    kind: Kind = "rollout",
    policy: PolicyVersion = POLICY,
    denoise_steps: int = 10,
    rows: int = 2,
    reused_steps: tuple[int, ...] = (),
) -> GenerationRequest:
    prompt = Prompt(occurrence=name, text='A sign "12"')
    fidelity = Fidelity(denoise_steps=denoise_steps, reused_steps=reused_steps)
    return GenerationRequest(
        id=name, kind=kind, prompts=(prompt,), seeds=tuple(range(rows)), policy=policy, fidelity=fidelity
    )


class World:
    """Feeds stamped events to a scheduler, which hands nothing ahead unless told to."""

    def __init__(
        self, order: Order | None = None, *, layout: NodeLayout | None = None, **rules: float
    ) -> None:
        limits = {"lease_seconds": 60, "max_attempts": 3, "prefetch": False} | rules
        self.scheduler = RequestScheduler(SchedulingRules(**limits), order, layout)  # type: ignore[arg-type]
        self.seq = 0

    def __call__(self, event: Event, at: float = 0.0) -> list[Command]:
        self.seq += 1
        return self.scheduler.decide(event.stamped(at, self.seq, 1))

    def phase(self, phase: Phase, at: float = 0.0) -> list[Command]:
        return self(PhaseChanged(phase=phase, iteration=0), at)

    def join(self, node: str, incarnation: int = 1, gpus: int = 1) -> list[Command]:
        pool = "reserved" if node.startswith("reserved") else "spot"
        return self(NodeJoined(node=node, incarnation=incarnation, pool=pool, gpus=gpus, started_at=0.0))

    def loaded(self, ref: SPGroup, policy: PolicyVersion = POLICY, at: float = 0.0) -> list[Command]:
        return self(WeightsLoaded(group=ref, policy=policy, digest=policy.digest), at)

    def submit(self, *requests: GenerationRequest, deadline: float | None = None) -> list[Command]:
        return self(Submitted(requests=requests, deadline=deadline))

    def notice(self, node: str, seconds_left: float = 5.0, at: float = 0.0) -> list[Command]:
        return self(Notice(node=node, incarnation=1, seconds_left=seconds_left), at)

    def lost(self, node: str, cause: str = "killed", at: float = 0.0, incarnation: int = 1) -> list[Command]:
        return self(Lost(node=node, incarnation=incarnation, cause=cause, stopped_at=at), at)

    def timer(self, name: str, at: float) -> list[Command]:
        return self(Timer(id=name), at)


def ready(
    *requests: GenerationRequest, phase: Phase = "rollout", order: Order | None = None, **rules: float
) -> tuple[World, list[Command]]:
    """A reserved and a spot node that hold POLICY, and what they were given once both did."""
    world = World(order, **rules)
    world.phase(phase)
    for ref in (RESERVED, SPOT):
        world.join(ref.node)
        world.loaded(ref)
    return world, world.submit(*requests)


def starts(commands: list[Command]) -> list[tuple[str, str, int]]:
    """Request, node and denoise step of each start that is not for later."""
    return [
        (c.request.id, c.group.node, c.from_denoise_step)
        for c in commands
        if isinstance(c, Start) and not c.queued
    ]


def ahead(commands: list[Command]) -> list[tuple[str, str]]:
    """Request and node of each start behind a lease that runs."""
    return [(c.request.id, c.group.node) for c in commands if isinstance(c, Start) and c.queued]


def without_timers(commands: list[Command]) -> list[Command]:
    """Commands that concern requests and nodes."""
    return [command for command in commands if type(command).__name__ != "SetTimer"]


def finished(lease: str, name: str, digest: str = "x") -> Finished:
    return Finished(lease=lease, request=name, ref=f"ref-{name}", digest=digest)


def committed(lease: str, name: str, step: int, *, released: bool = False, ref: str = "") -> Committed:
    return Committed(
        lease=lease,
        request=name,
        next_denoise_step=step,
        ref=ref or f"{name}@{step}",
        digest=f"digest-{name}@{step}",
        released=released,
    )


def failed(lease: str, error: str = "cuda", *, fault: Fault = "node", commit_lost: bool = False) -> Failed:
    return Failed(lease=lease, error=error, fault=fault, commit_lost=commit_lost)


def dropped(lease: str) -> Failed:
    """A group has let go of a lease that it was told to drop."""
    return failed(lease, "abandoned", fault="nobody")


def alarm(commands: list[Command]) -> str:
    """The detail of the one alarm among the commands."""
    [detail] = [command.detail for command in commands if isinstance(command, Alarm)]
    return detail
