"""Groups that re-form between two denoise steps: who stops, who goes on where, and from what."""

import pytest

from spotlight_core.elastic.layout import FixedDegree
from spotlight_core.events import (
    Abandon,
    Cancelled,
    Command,
    Committed,
    Failed,
    Load,
    Lost,
    NodeJoined,
    Notice,
    RankLost,
    RankNotice,
    RankReady,
    Regroup,
    Regrouped,
    Release,
    ReleaseRank,
    SPGroup,
    Start,
    Timer,
    WeightsLoaded,
    Yield,
)
from tests.core.scheduling.world import POLICY, World, request, without_timers

NODE = "spot-0"


def group(*ranks: int, generation: int) -> SPGroup:
    return SPGroup(node=NODE, incarnation=1, ranks=ranks, generation=generation)


def regrouped(generation: int, *groups: tuple[int, ...]) -> Regrouped:
    return Regrouped(node=NODE, incarnation=1, generation=generation, groups=groups)


def regroup(generation: int, *groups: tuple[int, ...]) -> Regroup:
    return Regroup(node=NODE, incarnation=1, generation=generation, groups=groups)


def loaded(which: SPGroup) -> WeightsLoaded:
    return WeightsLoaded(group=which, policy=POLICY, digest=POLICY.digest)


def held(start: Start, step: int) -> Committed:
    return Committed(
        lease=start.lease,
        request=start.request.id,
        next_denoise_step=step,
        ref=f"held:{start.lease}",
        digest="h",
        released=True,
        held=True,
    )


def stored(start: Start, step: int, *, released: bool = False) -> Committed:
    return Committed(
        lease=start.lease,
        request=start.request.id,
        next_denoise_step=step,
        ref=f"{start.request.id}@{step}",
        digest="s",
        released=released,
    )


def rank_lost(rank: int, cause: str = "died") -> RankLost:
    return RankLost(node=NODE, incarnation=1, rank=rank, cause=cause, error="gone")  # type: ignore[arg-type]


def rank_ready(rank: int) -> RankReady:
    return RankReady(node=NODE, incarnation=1, rank=rank)


def rank_notice(*ranks: int, seconds_left: float = 30.0) -> RankNotice:
    return RankNotice(node=NODE, incarnation=1, ranks=ranks, seconds_left=seconds_left)


def starts(commands: list[Command]) -> list[tuple[str, tuple[int, ...], int, int, str | None]]:
    return [
        (c.request.id, c.group.ranks, c.group.generation, c.from_denoise_step, c.state_ref)
        for c in commands
        if isinstance(c, Start)
    ]


def the_start(commands: list[Command]) -> Start:
    (start,) = (command for command in commands if isinstance(command, Start))
    return start


def elsewhere(world: World) -> list[Command]:
    """Another node joins and loads what is asked for."""
    world.join("spot-1")
    return world.loaded(SPGroup(node="spot-1", incarnation=1))


def world_of(gpus: int, degree: int = 2, *, min_degree: int = 1, prefetch: bool = False) -> World:
    world = World(layout=FixedDegree(degree, min_degree), prefetch=prefetch)
    world.phase("rollout")
    world(NodeJoined(node=NODE, incarnation=1, pool="spot", gpus=gpus, started_at=0.0))
    return world


@pytest.fixture
def pair() -> tuple[World, Start]:
    """Two ranks that denoise request a together, the last commit of which is before step 2."""
    world = world_of(2)
    assert without_timers(world(regrouped(1, (0, 1)))) == []
    world.submit(request("a"))
    start = the_start(world(loaded(group(0, 1, generation=1))))
    world(stored(start, 2))
    return world, start


def test_a_node_joins_and_its_ranks_group() -> None:
    world = World(layout=FixedDegree(2))
    world.phase("rollout")
    joined = NodeJoined(node=NODE, incarnation=1, pool="spot", gpus=5, started_at=0.0)
    assert without_timers(world(joined)) == [regroup(1, (4,), (0, 1), (2, 3))]
    # The last one stays by itself, and takes work at once; nothing is placed on ranks that are to group.
    assert without_timers(world.submit(request("a"), request("b"))) == [
        Load(group=group(4, generation=0), policy=POLICY)
    ]
    loads = [c for c in world(regrouped(1, (4,), (0, 1), (2, 3))) if isinstance(c, Load)]
    assert loads == [Load(group=group(0, 1, generation=1), policy=POLICY)]
    assert starts(world(loaded(group(0, 1, generation=1)))) == [("a", (0, 1), 1, 0, None)]


def test_a_noticed_rank_leaves_and_the_survivor_goes_on_at_the_next_step(pair: tuple[World, Start]) -> None:
    world, start = pair
    (yielding,) = without_timers(world(rank_notice(1)))
    assert isinstance(yielding, Yield)
    assert (yielding.lease, yielding.hold) == (start.lease, True)
    assert without_timers(world(held(start, 6))) == [regroup(2, (0,))]
    commands = world(regrouped(2, (0,)))
    assert ReleaseRank(node=NODE, incarnation=1, rank=1) in commands
    assert starts(commands) == [("a", (0,), 2, 6, f"held:{start.lease}")]
    assert without_timers(world(rank_lost(1, "revoked"))) == []


def test_a_rank_that_comes_loads_first_and_then_joins(pair: tuple[World, Start]) -> None:
    world, start = pair
    world(rank_notice(1))
    world(held(start, 4))
    alone = the_start(world(regrouped(2, (0,))))
    world(rank_lost(1, "revoked"))
    assert without_timers(world(rank_ready(1))) == [regroup(3, (0,), (1,))]
    # The other goes on denoising meanwhile.
    assert without_timers(world(regrouped(3, (0,), (1,)))) == [
        Load(group=group(1, generation=3), policy=POLICY)
    ]
    (yielding,) = without_timers(world(loaded(group(1, generation=3))))
    assert isinstance(yielding, Yield)
    assert (yielding.lease, yielding.hold, yielding.group) == (alone.lease, True, group(0, generation=2))
    assert without_timers(world(held(alone, 7))) == [regroup(4, (0, 1))]
    assert starts(world(regrouped(4, (0, 1)))) == [("a", (0, 1), 4, 7, f"held:{alone.lease}")]


def test_a_member_that_dies_costs_nothing_that_the_survivors_hold(pair: tuple[World, Start]) -> None:
    world, start = pair
    world.submit(request("b"))
    assert without_timers(world(held(start, 5))) == [], "broken: nothing new is placed there"
    assert without_timers(world(rank_lost(0))) == [regroup(2, (1,))]
    assert starts(world(regrouped(2, (1,)))) == [("a", (1,), 2, 5, f"held:{start.lease}")]


def test_without_a_held_state_the_last_commit_counts(pair: tuple[World, Start]) -> None:
    world, _ = pair
    assert without_timers(world(rank_lost(1))) == [regroup(2, (0,))]
    assert starts(world(regrouped(2, (0,)))) == [("a", (0,), 2, 2, "a@2")]


def test_a_broken_group_of_which_nobody_is_lost_goes_on(pair: tuple[World, Start]) -> None:
    world, start = pair
    (timer,) = world(held(start, 5))
    again = world(Timer(id=timer.id))  # type: ignore[attr-defined]
    assert starts(again) == [("a", (0, 1), 1, 5, f"held:{start.lease}")]


@pytest.mark.parametrize("gone", ["node", "notice"])
def test_what_a_lost_node_held_goes_on_from_the_commit(pair: tuple[World, Start], gone: str) -> None:
    world, start = pair
    world(rank_notice(1))
    world(held(start, 6))
    if gone == "node":
        world(Lost(node=NODE, incarnation=1, cause="killed", stopped_at=9.0))
    else:
        world(Notice(node=NODE, incarnation=1, seconds_left=20.0))
    ((name, _, _, step, ref),) = starts(elsewhere(world))
    assert (name, step, ref) == ("a", 2, "a@2")


def test_a_held_state_that_is_not_there_falls_back_to_the_commit(pair: tuple[World, Start]) -> None:
    world, start = pair
    world(rank_notice(1))
    world(held(start, 6))
    lease = the_start(world(regrouped(2, (0,)))).lease
    failed = Failed(lease=lease, error="not held here", fault="nobody", commit_lost=True)
    assert starts(world(failed)) == [("a", (0,), 2, 2, "a@2")]


def test_a_later_commit_replaces_what_was_held(pair: tuple[World, Start]) -> None:
    world, start = pair
    world(rank_notice(1))
    world(held(start, 6))
    going = the_start(world(regrouped(2, (0,))))
    world(stored(going, 8))
    assert without_timers(world(rank_lost(0))) == []
    assert [start[3:] for start in starts(elsewhere(world))] == [(8, "a@8")]


def test_two_requests_of_groups_that_join_go_on_one_after_the_other() -> None:
    """The one whose rank leads is held; the other has its state stored, which any group can read."""
    world = world_of(2, degree=1)
    world.submit(request("a"), request("b"))
    first = the_start(world(loaded(group(0, generation=0))))
    second = the_start(world(loaded(group(1, generation=0))))
    world.scheduler._regrouping._layout = FixedDegree(2)  # as a planner may change its mind
    yields = [c for c in world(Timer(id=f"regroup/{NODE}#1")) if isinstance(c, Yield)]
    assert [(one.lease, one.hold) for one in yields] == [(first.lease, True), (second.lease, False)]
    world(held(first, 3))
    assert without_timers(world(stored(second, 4, released=True)))[-1] == regroup(1, (0, 1))
    assert [start[:2] for start in starts(world(regrouped(1, (0, 1))))] == [("a", (0, 1))]


def test_ranks_under_notice_to_the_last_are_the_node_under_notice(pair: tuple[World, Start]) -> None:
    world, start = pair
    commands = without_timers(world(rank_notice(0, 1)))
    assert [(c.lease, c.hold) for c in commands if isinstance(c, Yield)] == [(start.lease, False)]
    assert Release(node=NODE, incarnation=1) in world(stored(start, 5, released=True))


def test_a_rank_that_does_not_let_go_in_time_is_lost(pair: tuple[World, Start]) -> None:
    world, start = pair
    world(rank_notice(1, seconds_left=5.0))
    commands = without_timers(world(Timer(id=f"rank/{NODE}#1/1"), at=6.0))
    assert commands == [regroup(2, (0,))]
    assert starts(world(regrouped(2, (0,)))) == [("a", (0,), 2, 2, "a@2")]
    assert world(held(start, 6)) == [], "a late word"


def test_the_lost_rank_of_a_layout_under_way_is_in_no_group() -> None:
    world = world_of(4)
    world(rank_lost(3))
    assert without_timers(world(regrouped(1, (0, 1), (2, 3)))) == [regroup(2, (0, 1), (2,))]
    assert without_timers(world(rank_ready(3))) == []
    assert without_timers(world(regrouped(2, (0, 1), (2,)))) == [regroup(3, (0, 1), (2,), (3,))]
    # Nobody holds weights yet, so nobody waits for any.
    assert without_timers(world(regrouped(3, (0, 1), (2,), (3,)))) == [regroup(4, (0, 1), (2, 3))]


def test_a_group_keeps_its_generation_and_its_work_while_others_change() -> None:
    world = world_of(4)
    world(regrouped(1, (0, 1), (2, 3)))
    world.submit(request("a"), request("b"))
    world(loaded(group(0, 1, generation=1)))
    assert without_timers(world(rank_lost(3))) == [regroup(2, (0, 1), (2,))]
    world(regrouped(2, (0, 1), (2,)))
    assert world.scheduler.snapshot().in_flight == 1, "the other pair denoises on"


def test_words_of_a_former_generation_find_nothing(pair: tuple[World, Start]) -> None:
    world, start = pair
    world(rank_notice(1))
    world(held(start, 6))
    world(regrouped(2, (0,)))
    assert world(loaded(group(0, 1, generation=1))) == []
    assert world(loaded(group(0, generation=0))) == []
    assert world(regrouped(1, (0, 1))) == []


def test_ranks_that_cannot_hold_a_request_wait_for_others() -> None:
    world = world_of(3, degree=2, min_degree=2)
    world.submit(request("a"), request("b"))
    world(regrouped(1, (0, 1)))
    start = the_start(world(loaded(group(0, 1, generation=1))))
    assert without_timers(world(held(start, 4))) == []
    assert without_timers(world(rank_lost(1))) == [regroup(2, (0, 2))]
    # Rank 2 has no weights yet: what is held would wait for them, so the commit is what counts.
    commands = world(regrouped(2, (0, 2)))
    assert [c for c in commands if isinstance(c, Load)] == [
        Load(group=group(0, 2, generation=2), policy=POLICY)
    ]


def test_a_cancelled_request_whose_state_is_held_is_gone(pair: tuple[World, Start]) -> None:
    world, start = pair
    world(rank_notice(1))
    world(held(start, 6))
    world(Cancelled(requests=("a",), reason="passed its deadline"))
    assert starts(world(regrouped(2, (0,)))) == []


def test_what_waits_behind_is_taken_back_before_a_change() -> None:
    world = world_of(2, prefetch=True)
    world(regrouped(1, (0, 1)))
    world.submit(request("a"), request("b"))
    first, second = (c for c in world(loaded(group(0, 1, generation=1))) if isinstance(c, Start))
    commands = without_timers(world(rank_notice(1)))
    assert [type(c) for c in commands] == [Abandon, Yield]
    world(held(first, 3))
    dropped = Failed(lease=second.lease, error="abandoned", fault="nobody")
    assert without_timers(world(dropped)) == [regroup(2, (0,))]
    again = starts(world(regrouped(2, (0,))))
    assert [(name, step) for name, _, _, step, _ in again] == [("a", 3), ("b", 0)]
