"""One request ahead of a busy group, and none where an idle one would do."""

from spotlight_core.events import Abandon, Load, SetTimer, Start, Started, Yield
from tests.core.scheduling.world import (
    NEXT_POLICY,
    RESERVED,
    SPOT,
    World,
    ahead,
    committed,
    dropped,
    failed,
    finished,
    group,
    ready,
    request,
    starts,
    without_timers,
)


def busy(*names: str, **rules: float) -> World:
    """``a`` runs on reserved-0, ``b`` on spot-0, and the names wait behind them."""
    rules = {"prefetch": True} | rules
    world, _ = ready(request("a"), request("b"), *(request(name) for name in names), **rules)
    return world


def test_busy_groups_get_one_request_ahead_and_no_second() -> None:
    world, commands = ready(*(request(name) for name in "abcde"), prefetch=True)
    assert starts(commands) == [("a", "reserved-0", 0), ("b", "spot-0", 0)]
    assert ahead(commands) == [("c", "reserved-0"), ("d", "spot-0")]
    commands = world(finished("1.1", "a"))
    assert (starts(commands), ahead(commands)) == ([], [("e", "reserved-0")])


def test_nothing_is_handed_ahead_when_the_rules_forbid_it() -> None:
    world, commands = ready(*(request(name) for name in "abc"), prefetch=False)
    assert ahead(commands) == []
    assert starts(world(finished("1.1", "a"))) == [("c", "reserved-0", 0)]


def test_a_request_goes_to_an_idle_group_and_not_behind_a_busy_one() -> None:
    world, _ = ready(request("a"), prefetch=True)
    commands = world.submit(request("b"))
    assert (starts(commands), ahead(commands)) == ([("b", "spot-0", 0)], [])


def test_what_a_loading_group_will_take_is_not_handed_ahead() -> None:
    world, _ = ready(request("a"), request("b"), prefetch=True)
    world.submit(request("x", policy=NEXT_POLICY))
    world.join("spot-1")  # loads the next version for x
    world.submit(request("y", policy=NEXT_POLICY))
    commands = world(finished("1.2", "b"))  # spot-0 loads it for y
    assert Load(group=SPOT, policy=NEXT_POLICY) in commands
    commands = world.loaded(group("spot-1"), NEXT_POLICY)
    assert (starts(commands), ahead(commands)) == ([("x", "spot-1", 0)], [])
    assert starts(world.loaded(SPOT, NEXT_POLICY)) == [("y", "spot-0", 0)]


def test_only_the_version_that_a_group_holds_is_handed_ahead() -> None:
    world = busy()
    assert world.submit(request("x", policy=NEXT_POLICY)) == []


def test_a_less_urgent_kind_is_not_handed_ahead_of_a_more_urgent_one() -> None:
    world, _ = ready(request("a"), request("b"), phase="remainder", prefetch=True)
    world.submit(request("x", policy=NEXT_POLICY))
    assert ahead(world.submit(request("e", "explore"))) == []


def test_the_one_ahead_lives_from_the_end_of_the_one_before() -> None:
    world = busy("c")
    world(finished("1.1", "a"), at=50.0)
    world(Started(lease="1.2"), at=59.0)
    assert world.timer("lease/6", at=60.0) == [SetTimer(id="lease/9", at=110.0)]
    assert Abandon(lease="1.3", group=RESERVED) in world.timer("lease/9", at=110.0)


def test_a_notice_takes_back_what_waits_and_then_yields_what_runs() -> None:
    world = busy("c", "d")
    commands = world.notice("spot-0", seconds_left=5.0, at=2.0)
    assert without_timers(commands) == [
        Abandon(lease="1.4", group=SPOT),
        Yield(lease="1.2", group=SPOT, by=7.0, reason="notice"),
    ]
    assert without_timers(world(dropped("1.4"), at=2.5)) == []
    commands = world(committed("1.2", "b", 4, released=True), at=3.0)
    assert [type(command).__name__ for command in commands] == ["Release"]
    assert ahead(world(finished("1.1", "a"), at=4.0)) == [("b", "reserved-0")]
    assert ahead(world(finished("1.3", "c"), at=5.0)) == [("d", "reserved-0")]
    assert world.scheduler.counters.recomputed == 0


def test_what_has_begun_unheard_of_its_predecessors_end_is_yielded_too() -> None:
    world = busy("c", "d")
    world(Started(lease="1.4"), at=1.0)
    commands = without_timers(world.notice("spot-0", seconds_left=5.0, at=2.0))
    assert [(type(c).__name__, c.lease) for c in commands if isinstance(c, Yield | Abandon)] == [
        ("Yield", "1.4"),
        ("Yield", "1.2"),
    ]


def test_taken_back_is_not_failed() -> None:
    world = busy("c", "d", max_attempts=1)
    world.notice("spot-0")
    world(dropped("1.4"))
    assert ahead(world(finished("1.1", "a"))) == [("d", "reserved-0")]


def test_the_failure_of_what_runs_begins_what_waits() -> None:
    world = busy("c", "d")
    commands = world(failed("1.2"), at=1.0)
    assert (starts(commands), ahead(commands)) == ([], [])  # b waits for the other node
    commands = world.notice("spot-0", seconds_left=5.0, at=2.0)
    assert without_timers(commands) == [Yield(lease="1.4", group=SPOT, by=7.0, reason="notice")]


def test_a_kill_sends_both_back_and_only_what_ran_is_recomputed() -> None:
    world = busy("c", "d")
    world.lost("spot-0")
    assert world.scheduler.counters.recomputed == 1
    commands = world(finished("1.1", "a"))
    assert ahead(commands) == [("b", "reserved-0")]
    assert world.scheduler.snapshot().pending["rollout"] == 1


def test_exploration_that_waits_is_taken_back_when_its_phase_ends() -> None:
    world, _ = ready(*(request(name, "explore") for name in "abcd"), phase="remainder", prefetch=True)
    commands = world.phase("rollout")
    assert commands == [Abandon(lease="1.3", group=RESERVED), Abandon(lease="1.4", group=SPOT)]
    assert world(dropped("1.3")) == []
    assert ahead(world.submit(request("r"))) == [("r", "reserved-0")]


def test_training_takes_exploration_off_the_reserved_nodes() -> None:
    world, _ = ready(*(request(name, "explore") for name in "abcd"), phase="remainder", prefetch=True)
    commands = world.phase("train", at=1.0)
    assert commands == [
        Abandon(lease="1.3", group=RESERVED),
        Yield(lease="1.1", group=RESERVED, by=61.0, reason="training"),
    ]
    assert world(dropped("1.3")) == []
    assert world(committed("1.1", "a", 3, released=True)) == []
    [start] = [c for c in world(finished("1.2", "b")) if isinstance(c, Start)]
    assert (start.request.id, start.from_denoise_step, start.queued) == ("a", 3, True)
