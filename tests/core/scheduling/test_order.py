"""Which request goes next under each order."""

import math

import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.scheduling.order import (
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    ShortestRemainingFirst,
    build_order,
)
from tests.core.scheduling.world import SPOT, World, committed, failed, finished, request, starts


@pytest.mark.parametrize(
    ("from_denoise_step", "left"),
    [(0, 7), (2, 5), (3, 5), (6, 3), (9, 1)],
)
def test_what_remains_is_computed_steps_times_rows(from_denoise_step: int, left: int) -> None:
    some_reused = request("a", denoise_steps=10, rows=4, reused_steps=(2, 4, 7))
    assert ShortestRemainingFirst().key(some_reused, from_denoise_step, None) == left * 4


def test_a_request_without_a_deadline_comes_after_all_that_have_one() -> None:
    order = EarliestDeadlineFirst()
    assert order.key(request("a"), 0, 5.0) == 5.0
    assert order.key(request("a"), 0, None) == math.inf
    assert FirstComeFirstServed().key(request("a"), 7, 5.0) == 0.0


def test_a_recipe_names_its_order() -> None:
    assert isinstance(build_order("fifo"), FirstComeFirstServed)
    assert isinstance(build_order("shortest_remaining"), ShortestRemainingFirst)
    assert isinstance(build_order("earliest_deadline"), EarliestDeadlineFirst)
    with pytest.raises(BadInputError, match="no order 'random'"):
        build_order("random")


def one_after_the_other(world: World) -> list[str]:
    """The order in which one group finishes all there is."""
    names, commands = [], world.loaded(SPOT)
    while found := starts(commands):
        [(name, _, _)] = found
        names.append(name)
        commands = world(finished(f"1.{world.scheduler.counters.leases}", name))
    return names


def on_one_node(order: str) -> World:
    world = World(build_order(order))
    world.phase("remainder")
    world.join("spot-0")
    return world


def test_first_come_first_served_within_an_urgency() -> None:
    world = on_one_node("fifo")
    world.submit(request("e", "explore"), request("v", "evaluate"), request("a", "audit"), request("r"))
    world.submit(request("r2"), request("a2", "audit"))
    assert one_after_the_other(world) == ["r", "r2", "a", "a2", "v", "e"]


def test_the_shortest_goes_first_but_never_before_a_more_urgent_kind() -> None:
    world = on_one_node("shortest_remaining")
    world.submit(
        request("explore", "explore", denoise_steps=1),
        request("long", denoise_steps=20),
        request("short", denoise_steps=5),
        request("short-too", denoise_steps=5),
    )
    assert one_after_the_other(world) == ["short", "short-too", "long", "explore"]


def test_what_is_committed_shortens_what_remains() -> None:
    world = on_one_node("shortest_remaining")
    world.submit(request("long", denoise_steps=20))
    assert starts(world.loaded(SPOT)) == [("long", "spot-0", 0)]
    world.submit(request("short", denoise_steps=5))
    world(committed("1.1", "long", 18))
    assert starts(world(failed("1.1"))) == [("long", "spot-0", 18)]


def test_the_earliest_deadline_goes_first() -> None:
    world = on_one_node("earliest_deadline")
    world.submit(request("whenever"))
    world.submit(request("later"), deadline=90.0)
    world.submit(request("soon"), deadline=30.0)
    assert one_after_the_other(world) == ["soon", "later", "whenever"]
