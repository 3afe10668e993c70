"""Who gets what: exact commands for idle groups."""

import pytest

from spotlight_core.events import Load, Phase, SetTimer, Settle, Start
from tests.core.scheduling.world import (
    NEXT_POLICY,
    RESERVED,
    SPOT,
    World,
    failed,
    finished,
    group,
    ready,
    request,
    starts,
    without_timers,
)


def test_an_idle_group_loads_the_version_before_it_pulls() -> None:
    world = World()
    world.phase("rollout")
    assert world.join("spot-0") == []
    assert world.submit(request("a")) == [
        Load(group=SPOT, policy=request("a").policy),
        SetTimer(id="load/spot-0#1/0", at=60.0),
    ]
    assert world.loaded(SPOT) == [
        Start(group=SPOT, lease="1.1", request=request("a")),
        SetTimer(id="lease/4", at=60.0),
    ]


def test_groups_pull_in_order_of_arrival_and_settle_once() -> None:
    world, commands = ready(request("a"), request("b"), request("c"))
    assert starts(commands) == [("a", "reserved-0", 0), ("b", "spot-0", 0)]
    commands = world(finished("1.2", "b"), at=1.0)
    assert commands[0] == Settle(request="b", outcome="done", ref="ref-b")
    assert starts(commands) == [("c", "spot-0", 0)]


def test_every_gpu_of_a_node_is_a_group_of_its_own() -> None:
    world = World()
    world.phase("rollout")
    world.join("spot-0", gpus=3)
    loads = without_timers(world.submit(request("a"), request("b"), request("c"), request("d")))
    assert [load.group for load in loads if isinstance(load, Load)] == [group("spot-0", i) for i in range(3)]
    given = [world.loaded(group("spot-0", rank))[0] for rank in range(3)]
    assert [(c.group.ranks, c.request.id) for c in given if isinstance(c, Start)] == [
        ((0,), "a"),
        ((1,), "b"),
        ((2,), "c"),
    ]


def test_no_more_groups_load_a_version_than_requests_wait_for_it() -> None:
    world = World()
    world.phase("rollout")
    world.join("reserved-0")
    world.join("spot-0")
    world.join("spot-1")
    assert without_timers(world.submit(request("a"))) == [Load(group=RESERVED, policy=request("a").policy)]
    assert without_timers(world.submit(request("b"))) == [Load(group=SPOT, policy=request("b").policy)]


def test_a_group_that_holds_the_version_goes_before_one_that_has_waited_longer() -> None:
    world, _ = ready()
    world.submit(request("x", policy=NEXT_POLICY))  # reserved-0 loads it
    world.loaded(RESERVED, NEXT_POLICY)
    world(finished("1.1", "x"))
    assert starts(world.submit(request("y", policy=NEXT_POLICY))) == [("y", "reserved-0", 0)]


def test_a_group_loads_for_a_more_urgent_kind_before_it_goes_on_with_its_own_version() -> None:
    world = World()
    world.phase("remainder")
    world.join("spot-0")
    world.submit(request("e", "explore"), request("e2", "explore"))
    world.loaded(SPOT)
    world.submit(request("r", policy=NEXT_POLICY))
    assert without_timers(world(finished("1.1", "e")))[1:] == [Load(group=SPOT, policy=NEXT_POLICY)]


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("rollout", []),
        ("publish", []),
        ("evaluate", []),
        ("train", [("e", "spot-0", 0)]),
        ("remainder", [("e", "reserved-0", 0)]),
    ],
)
def test_exploration_runs_on_spot_while_training_and_on_all_for_a_remainder(
    phase: Phase, expected: list[tuple[str, str, int]]
) -> None:
    world, _ = ready(phase="rollout")
    assert starts(world.submit(request("e", "explore"))) == []
    assert starts(world.phase(phase)) == expected


def test_training_keeps_everything_off_the_reserved_nodes() -> None:
    world, _ = ready(phase="train")
    assert starts(world.submit(request("v", "evaluate"), request("r"))) == [("r", "spot-0", 0)]


def test_rollout_goes_before_exploration_that_came_first() -> None:
    world = World()
    world.join("spot-0")
    world.phase("remainder")
    world.submit(request("e", "explore"), request("r"))
    assert starts(world.loaded(SPOT)) == [("r", "spot-0", 0)]


def test_a_failed_request_is_tried_on_another_node_first() -> None:
    world, _ = ready(request("a"), request("b"))  # a on reserved-0, b on spot-0
    assert starts(world(failed("1.2"))) == []
    assert starts(world.submit(request("c"))) == [("c", "spot-0", 0)]
    assert starts(world(finished("1.1", "a"))) == [("b", "reserved-0", 0)]


def test_a_failed_request_goes_back_to_its_node_when_no_other_may_run_it() -> None:
    world, _ = ready(phase="train")
    world.submit(request("e", "explore"))  # training owns the other node
    assert starts(world(failed("1.1"))) == [("e", "spot-0", 0)]


def test_failed_requests_of_two_versions_do_not_make_a_node_load_both_in_turn() -> None:
    world, _ = ready(request("a"), request("b"))
    world(failed("1.2"))
    world.submit(request("c", policy=NEXT_POLICY))
    world.loaded(SPOT, NEXT_POLICY)
    assert without_timers(world(failed("1.3"))) == []
    assert starts(world(finished("1.1", "a"))) == [("b", "reserved-0", 0)]
