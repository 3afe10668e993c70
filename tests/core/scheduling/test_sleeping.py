"""Who makes room for training, and when the trainer may take it."""

import pytest

from spotlight_core.events import (
    Asleep,
    Command,
    Lost,
    NodeJoined,
    RankLost,
    RankReady,
    Sleep,
    SPGroup,
    Yield,
)
from tests.core.scheduling.world import World, request

SLEEP = Sleep(node="reserved-0", incarnation=1)
ASLEEP = Asleep(node="reserved-0", incarnation=1)


def join(node: str, pool: str, gpus: int = 1) -> NodeJoined:
    return NodeJoined(node=node, incarnation=1, pool=pool, gpus=gpus, started_at=0.0)


def sleeps(commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, Sleep)]


@pytest.fixture
def world() -> World:
    world = World(sleep=True)
    world.phase("rollout")
    world(join("reserved-0", "reserved", gpus=2))
    world(join("spot-0", "spot"))
    return world


def alone(world: World) -> int | None:
    return world.scheduler.snapshot().trainer_alone


def test_reserved_nodes_sleep_while_training_runs_and_the_trainer_waits_for_them(world: World) -> None:
    assert alone(world) is None
    assert sleeps(world.phase("train")) == [SLEEP]
    assert alone(world) is None
    world(ASLEEP)
    assert alone(world) == 0
    assert sleeps(world.phase("remainder")) == []
    assert alone(world) is None


def test_without_sleep_nobody_waits() -> None:
    world = World()
    world.phase("rollout")
    world(join("reserved-0", "reserved"))
    assert sleeps(world.phase("train")) == []
    assert alone(world) == 0


def test_a_node_lets_go_of_its_request_before_it_is_told_to_sleep(world: World) -> None:
    world.submit(*(request(name, kind="evaluate") for name in "abc"))
    for load in (SPGroup(node="reserved-0", incarnation=1, ranks=(rank,)) for rank in (0, 1)):
        world.loaded(load)
    commands = world.phase("train")
    assert [type(command) for command in commands if isinstance(command, Yield | Sleep)] == [
        Yield,
        Yield,
        Sleep,
    ]


def test_a_node_or_a_rank_that_comes_while_training_runs_sleeps_as_well(world: World) -> None:
    world.phase("train")
    world(ASLEEP)
    assert sleeps(world(join("reserved-1", "reserved"))) == [Sleep(node="reserved-1", incarnation=1)]
    assert alone(world) is None
    world(Asleep(node="reserved-1", incarnation=1))
    world(RankLost(node="reserved-0", incarnation=1, rank=1, cause="died"))
    assert sleeps(world(RankReady(node="reserved-0", incarnation=1, rank=1))) == [SLEEP]
    world(ASLEEP)
    assert alone(world) == 0
    assert sleeps(world(join("spot-1", "spot"))) == []


def test_nobody_waits_for_a_node_that_is_gone(world: World) -> None:
    world.phase("train")
    world(Lost(node="reserved-0", incarnation=1, cause="killed", stopped_at=1.0))
    assert alone(world) == 0
