"""Lifetimes of leases, and results that come late or twice."""

import pytest

from spotlight_core.events import Abandon, Cancelled, Load, Release, SetTimer, Settle, Started, Yield
from tests.core.scheduling.world import (
    NEXT_POLICY,
    RESERVED,
    SPOT,
    World,
    alarm,
    committed,
    failed,
    finished,
    group,
    ready,
    request,
    starts,
    without_timers,
)


def expired(**rules: float) -> World:
    """``a`` was silent on reserved-0 under lease 1.1, and runs on spot-0 under lease 1.2."""
    world, _ = ready(request("a"), **rules)
    assert starts(world.timer("lease/6", at=60.0)) == [("a", "spot-0", 0)]
    return world


def test_a_silent_lease_is_lost_but_signs_of_life_renew_it() -> None:
    world, commands = ready(request("a"))
    assert commands[1] == SetTimer(id="lease/6", at=60.0)
    assert world(committed("1.1", "a", 5), at=30.0) == []
    assert world(Started(lease="1.1"), at=50.0) == []
    assert world.timer("lease/6", at=60.0) == [SetTimer(id="lease/9", at=110.0)]
    commands = world.timer("lease/9", at=110.0)
    assert commands[:2] == [Abandon(lease="1.1", group=RESERVED), Release(node="reserved-0", incarnation=1)]
    assert starts(commands) == [("a", "spot-0", 5)]
    assert world.scheduler.counters.expired == 1


def test_one_timer_serves_all_leases() -> None:
    world, commands = ready(request("a"), request("b"))
    assert [c for c in commands if isinstance(c, SetTimer)] == [SetTimer(id="lease/6", at=60.0)]
    world(Started(lease="1.1"), at=10.0)
    world(Started(lease="1.2"), at=20.0)
    assert world.timer("lease/6", at=60.0) == [SetTimer(id="lease/9", at=70.0)]
    commands = world.timer("lease/9", at=70.0)
    assert Abandon(lease="1.1", group=RESERVED) in commands
    assert SetTimer(id="lease/10", at=80.0) in commands


def test_a_timer_is_set_again_when_work_begins_again() -> None:
    world, _ = ready(request("a"))
    world(finished("1.1", "a"), at=1.0)
    assert world.timer("lease/6", at=60.0) == []
    commands = world.submit(request("b"))
    assert SetTimer(id="lease/9", at=60.0) in commands


def test_the_other_groups_of_a_silent_one_may_commit() -> None:
    world = World()
    world.phase("rollout")
    world.join("spot-0", gpus=2)
    world.submit(request("a"), request("b"))
    world.loaded(group("spot-0", 0))
    world.loaded(group("spot-0", 1))
    world(Started(lease="1.2"), at=30.0)
    assert without_timers(world.timer("lease/?", at=60.0)) == [
        Abandon(lease="1.1", group=group("spot-0", 0)),
        Yield(lease="1.2", group=group("spot-0", 1), by=120.0, reason="silence"),
    ]
    assert world(committed("1.2", "b", 4, released=True), at=61.0) == [
        Release(node="spot-0", incarnation=1),
    ]


def test_silence_is_a_failure_of_the_request() -> None:
    world, _ = ready(request("a"), max_attempts=1)
    detail = "1 attempts used up, the last one ended with: silent for 60 s"
    assert Settle(request="a", outcome="aborted", detail=detail) in world.timer("lease/6", at=60.0)


def test_the_first_result_wins_and_a_late_equal_one_is_dropped() -> None:
    world = expired()
    commands = world(finished("1.1", "a"), at=61.0)
    assert commands == [Settle(request="a", outcome="done", ref="ref-a"), Abandon(lease="1.2", group=SPOT)]
    assert world(finished("1.2", "a"), at=62.0) == []
    assert world.scheduler.counters.duplicates_dropped == 1
    # Having said that, the group is free.
    assert starts(world.submit(request("b"))) == [("b", "spot-0", 0)]


def test_a_late_result_of_a_waiting_request_ends_its_wait() -> None:
    world = expired()
    world.lost("spot-0")
    assert world(finished("1.1", "a"), at=61.0) == [Settle(request="a", outcome="done", ref="ref-a")]
    world.join("spot-0", incarnation=2)
    assert world.loaded(group("spot-0", incarnation=2)) == []
    assert world.scheduler.snapshot().pending["rollout"] == 0


def test_a_late_commit_of_a_lost_lease_is_as_good_as_any() -> None:
    world = expired()
    assert world(committed("1.1", "a", 6), at=61.0) == []
    assert world(committed("1.2", "a", 2), at=62.0) == []
    assert starts(world(failed("1.2"))) == [("a", "spot-0", 6)]


def test_an_older_commit_never_moves_the_resume_point_back() -> None:
    world, _ = ready(request("a"))
    world(committed("1.1", "a", 6))
    world(committed("1.1", "a", 3))
    assert starts(world(failed("1.1"))) == [("a", "spot-0", 6)]


def test_two_different_results_of_one_request_are_an_alarm() -> None:
    world, _ = ready(request("a"))
    world(finished("1.1", "a", digest="x"))
    assert alarm(world(finished("1.1", "a", digest="y"))) == "two results of a differ: x and y"
    assert alarm(world(finished("9.9", "a", digest="z"))) == "two results of a differ: x and z"


def test_a_result_that_nobody_asked_for_is_an_alarm() -> None:
    world, _ = ready(request("a"), request("b"))
    assert "under lease 1.2, which is for b" in alarm(world(finished("1.2", "a")))
    world(finished("1.2", "b"))
    assert "never submitted" in alarm(world(finished("1.2", "c")))


@pytest.mark.parametrize("lease", ["0.1", "2.1", "1.99", "nonsense"])
def test_a_result_of_a_former_coordinator_is_refused_while_the_request_has_none(lease: str) -> None:
    world, _ = ready(request("a"))
    assert world(finished(lease, "a")) == []
    assert world(finished(lease, "of a former run")) == []
    assert world.scheduler.counters.refused == 2
    world(committed(lease, "a", 7))
    assert starts(world(failed("1.1"))) == [("a", "spot-0", 0)]


def test_a_cancelled_name_begins_anew_with_nothing_of_its_former_life() -> None:
    world, _ = ready(request("a"), request("b"))
    world(committed("1.2", "b", 5))
    world(Cancelled(requests=("b",), reason="deadline"))
    assert without_timers(world.submit(request("b", policy=NEXT_POLICY))) == []
    assert world(committed("1.2", "b", 6)) == []
    commands = world(finished("1.2", "b", digest="of the former policy"))
    assert without_timers(commands) == [Load(group=SPOT, policy=NEXT_POLICY)]
    assert world.scheduler.counters.refused == 1
    assert starts(world.loaded(SPOT, NEXT_POLICY)) == [("b", "spot-0", 0)]
    world(finished("1.3", "b", digest="of the next"))
    assert world(finished("1.2", "b", digest="of the former policy")) == []
    assert world.scheduler.counters.refused == 2
