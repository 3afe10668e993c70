"""What may happen next in a random world; each does nothing when there is nothing for it to happen to."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from spotlight_core.events import (
    Cancelled,
    Fault,
    Finished,
    LoadFailed,
    Lost,
    NodeJoined,
    Notice,
    Phase,
    PhaseChanged,
    Started,
    Submitted,
    WeightsLoaded,
)
from spotlight_core.scheduling.order import KINDS
from tests.core.scheduling.random_world import Group, Lease, Life, Node, RandomWorld
from tests.core.scheduling.world import NEXT_POLICY, POLICY, group, rank_lost, rank_ready, request

Action = Callable[[RandomWorld, Random], None]
Thing = TypeVar("Thing")
STEPS, MOST_NODES, MOST_REQUESTS = 10, 7, 40
PHASES: tuple[Phase, ...] = ("rollout", "train", "remainder", "evaluate", "publish")


def one(rng: Random, things: Sequence[Thing]) -> list[Thing]:
    """One of the things, or nothing of nothing."""
    return [rng.choice(things)] if things else []


# -- clients --------------------------------------------------------------------------------------------


def submit(world: RandomWorld, rng: Random) -> None:
    if sum(life.outcome is None for life in world.lives.values()) >= MOST_REQUESTS:
        return
    policy, requests = rng.choice((POLICY, NEXT_POLICY)), []
    for _ in range(rng.randint(1, 4)):
        again = rng.random() < 0.15
        name = f"r{rng.randrange(len(world.lives) + 1) if again else len(world.lives)}"
        asked = request(name, rng.choice(KINDS), policy, denoise_steps=STEPS, rows=rng.randint(1, 3))
        life = world.lives.get(name)
        if life is None or life.outcome in ("cancelled", "aborted"):
            world.lives[name] = Life(asked)
        else:
            asked = life.request
            world.asked_again[name] += life.outcome == "done"
            world.seen["asked again"] += life.outcome == "done"
        requests.append(asked)
    deadline = rng.choice((None, world.at + rng.randint(0, 99)))
    world.tell(Submitted(requests=tuple(requests), deadline=deadline))
    assert not any(world.asked_again.values())


def cancel(world: RandomWorld, rng: Random) -> None:
    names = [name for name, life in world.lives.items() if life.outcome is None]
    if names:
        some = rng.sample(names, rng.randint(1, min(3, len(names))))
        world.tell(Cancelled(requests=(*some, "unknown"), reason="deadline"))
        assert {world.lives[name].outcome for name in some} == {"cancelled"}


def change_phase(world: RandomWorld, rng: Random) -> None:
    world.phase = rng.choice(PHASES)
    world.tell(PhaseChanged(phase=world.phase, iteration=0))


# -- nodes ----------------------------------------------------------------------------------------------


def join(world: RandomWorld, rng: Random) -> None:
    if len(world.nodes) >= MOST_NODES:
        return
    pool = rng.choice(("reserved", "spot", "spot", "on_demand"))
    name = f"{pool}-{rng.randrange(3)}"
    if any(node.key[0] == name for node in world.nodes.values()):
        return
    world.incarnations[name] += 1
    incarnation, gpus = world.incarnations[name], rng.randint(1, 3)
    groups = [Group(group(name, rank, incarnation)) for rank in range(gpus)]
    world.nodes[name, incarnation] = Node((name, incarnation), pool, groups)
    world.tell(NodeJoined(node=name, incarnation=incarnation, pool=pool, gpus=gpus, started_at=0.0))


def notice(world: RandomWorld, rng: Random) -> None:
    for node in one(rng, list(world.nodes.values())):
        node.leaving = True
        source = rng.choice(("provider", "trace", "fleet"))
        left = rng.choice((0.25, 5.0, 30.0))
        world.tell(Notice(node=node.key[0], incarnation=node.key[1], seconds_left=left, source=source))


def lose(world: RandomWorld, node: Node, cause: str) -> None:
    for one_group in node.groups:
        world.lose(one_group)
    del world.nodes[node.key]
    world.tell(Lost(node=node.key[0], incarnation=node.key[1], cause=cause, stopped_at=world.at))


def kill(world: RandomWorld, rng: Random) -> None:
    for node in one(rng, list(world.nodes.values())):
        lose(world, node, rng.choice(("killed", "silent")))


def let_go(world: RandomWorld, rng: Random) -> None:
    for node in one(rng, [node for node in world.nodes.values() if node.released]):
        lose(world, node, "released")


def actor_dies(world: RandomWorld, rng: Random) -> None:
    for some in one(rng, [it for it in world.groups() if not it.down]):
        if some.loading is not None:
            world.load_failures[some.loading] += 1
        world.lose(some)
        world.tell(rank_lost(some.ref, "killed by signal 9"))


def actor_returns(world: RandomWorld, rng: Random) -> None:
    for some in one(rng, [it for it in world.groups() if it.down]):
        some.down = False
        world.tell(rank_ready(some.ref))


def load(world: RandomWorld, rng: Random) -> None:
    for some in one(rng, [it for it in world.groups() if it.loading is not None]):
        policy, some.loading = some.loading, None
        assert policy is not None
        if rng.random() < 0.1:
            world.load_failures[policy] += 1
            world.tell(LoadFailed(group=some.ref, policy=policy, error="no space left"))
        else:
            some.loaded = policy
            world.load_failures[policy] = 0
            world.tell(WeightsLoaded(group=some.ref, policy=policy, digest=policy.digest))


def pass_time(world: RandomWorld, rng: Random) -> None:
    world.pass_time(rng.choice((1 / 64, 0.5, 0.5, 2.0, 2.0, 2.0, 8.0, 31.0)))


# -- leases ---------------------------------------------------------------------------------------------


def running(world: RandomWorld) -> list[Lease]:
    return [it.running for it in world.groups() if it.running is not None]


def begin(world: RandomWorld, rng: Random) -> None:
    """A sign of life; of one that waits only when the end of the one before is still under way."""
    leases = running(world) if rng.random() < 0.95 else world.held()
    for lease in one(rng, leases):
        world.tell(Started(lease=lease.start.lease))


def commit(world: RandomWorld, rng: Random) -> None:
    for lease in one(rng, running(world)):
        step = rng.randint(lease.start.from_denoise_step, STEPS - 1)
        world.commit(lease, step, released=lease.yielding and rng.random() < 0.5)


def let_go_of_lease(world: RandomWorld, rng: Random) -> None:
    for lease in one(rng, [lease for lease in running(world) if lease.yielding]):
        world.commit(lease, max(lease.start.from_denoise_step, lease.life.step), released=True)


def finish(world: RandomWorld, rng: Random) -> None:
    for lease in one(rng, running(world)):
        world.finish(lease)


def fail(world: RandomWorld, rng: Random) -> None:
    for lease in one(rng, [lease for lease in running(world) if not lease.taken]):
        damaged = lease.start.state_ref is not None and rng.random() < 0.3
        fault: Fault = rng.choices(("node", "nobody", "request"), (65, 30, 5))[0]
        world.fail(lease, "cuda", fault, commit_lost=damaged)


def drop(world: RandomWorld, rng: Random) -> None:
    for lease in one(rng, [lease for lease in world.held() if lease.taken]):
        world.fail(lease, "abandoned", "nobody")


def repeat(world: RandomWorld, rng: Random) -> None:
    for event, life in one(rng, world.told):
        world.tell_result(event, life)


def late_word(world: RandomWorld, rng: Random) -> None:
    """A holder that was taken for lost speaks: a result, or a commit."""
    for lease in one(rng, world.lost_leases):
        if rng.random() < 0.5:
            world.finish(lease)
        else:
            world.commit(lease, rng.randint(lease.start.from_denoise_step, STEPS - 1), released=False)


def former_epoch(world: RandomWorld, rng: Random) -> None:
    for name in one(rng, [name for name, life in world.lives.items() if life.outcome is None]):
        world.tell(Finished(lease="2.1", request=name, ref="of a former epoch", digest="any"))
        assert world.lives[name].outcome is None


ACTIONS: tuple[Action, ...] = (
    *(submit,) * 10,
    *(finish,) * 12,
    *(load,) * 8,
    *(join,) * 5,
    *(commit,) * 6,
    *(begin,) * 4,
    *(pass_time,) * 4,
    *(drop,) * 4,
    *(let_go_of_lease,) * 3,
    *(let_go,) * 3,
    *(late_word,) * 2,
    *(repeat,) * 2,
    *(actor_returns,) * 2,
    *(fail,) * 3,
    *(notice, kill, actor_dies, change_phase, cancel, former_epoch),
)


def bring_to_an_end(world: RandomWorld) -> None:
    """Nothing bad happens any more: whatever was submitted must reach its end, and soon."""
    rng = Random(0)
    world.phase = "remainder"
    world.tell(PhaseChanged(phase="remainder", iteration=0))
    for _ in range(2_000):
        if all(life.outcome is not None for life in world.lives.values()) and not world.held():
            return
        for action in (join, load, load, finish, drop, let_go_of_lease, let_go, actor_returns):
            action(world, rng)
        world.pass_time(1.0)
    left = [name for name, life in world.lives.items() if life.outcome is None]
    raise AssertionError(f"{left} never ended, {world.schedulers[0].snapshot()}")
