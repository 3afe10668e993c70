"""How groups and nodes leave: notices, deadlines, kills, flaky nodes, processes that die."""

from spotlight_core.events import (
    Abandon,
    Load,
    LoadFailed,
    Notice,
    Release,
    SetTimer,
    Settle,
    Start,
    WeightsLoaded,
    Yield,
)
from tests.core.scheduling.world import (
    NEXT_POLICY,
    POLICY,
    RESERVED,
    SPOT,
    World,
    ahead,
    alarm,
    committed,
    failed,
    finished,
    group,
    rank_lost,
    rank_ready,
    ready,
    request,
    starts,
    without_timers,
)

SPOT_IS_LET_GO = Release(node="spot-0", incarnation=1)

# -- notices ------------------------------------------------------------------------------------------


def test_a_notice_yields_commits_and_resumes_elsewhere_at_the_committed_step() -> None:
    world, _ = ready(request("a"), request("b"))
    assert world.notice("spot-0", seconds_left=5, at=2.0) == [
        Yield(lease="1.2", group=SPOT, by=7.0, reason="notice"),
        SetTimer(id="drain/spot-0#1", at=7.0),
    ]
    assert world(committed("1.2", "b", 4, released=True), at=3.0) == [SPOT_IS_LET_GO]
    resumed = world(finished("1.1", "a"), at=4.0)
    assert resumed[1] == Start(
        group=RESERVED,
        lease="1.3",
        request=request("b"),
        from_denoise_step=4,
        state_ref="b@4",
        state_digest="digest-b@4",
    )
    assert world.scheduler.counters.resumed == 1


def test_a_result_instead_of_the_commit_counts_and_lets_the_node_go() -> None:
    world, _ = ready(request("a"), request("b"))
    world.notice("spot-0")
    assert world(finished("1.2", "b")) == [Settle(request="b", outcome="done", ref="ref-b"), SPOT_IS_LET_GO]


def test_an_idle_node_with_a_notice_is_let_go_at_once_and_gets_nothing() -> None:
    world = World()
    world.join("spot-0")
    assert world.notice("spot-0") == [SPOT_IS_LET_GO]
    world.phase("rollout")
    assert without_timers(world.submit(request("a"))) == []


def test_a_notice_repeated_is_ignored_unless_its_deadline_is_earlier() -> None:
    world, _ = ready(request("a"), request("b"))
    world(Notice(node="spot-0", incarnation=1, seconds_left=60.0, source="fleet"), at=1.0)
    assert world.notice("spot-0", seconds_left=5.0, at=2.0) == [SetTimer(id="drain/spot-0#1", at=7.0)]
    assert world.notice("spot-0", seconds_left=4.0, at=3.0) == []
    assert world.notice("spot-0", seconds_left=1.0, at=3.0) == [SetTimer(id="drain/spot-0#1", at=4.0)]
    assert world.notice("spot-0", seconds_left=9.0, at=3.5) == []
    assert SPOT_IS_LET_GO in world.timer("drain/spot-0#1", at=4.0)


def test_a_missed_deadline_abandons_the_lease_and_requeues_it() -> None:
    world, _ = ready(request("a"), request("b"), max_attempts=1)
    world.notice("spot-0", seconds_left=5, at=2.0)
    assert world.timer("drain/spot-0#1", at=6.0) == []  # some other deadline's
    commands = world.timer("drain/spot-0#1", at=7.0)
    assert commands == [Abandon(lease="1.2", group=SPOT), SPOT_IS_LET_GO]
    assert starts(world(finished("1.1", "a"), at=8.0)) == [("b", "reserved-0", 0)]
    assert world.timer("drain/spot-0#1", at=9.0) == []


def test_a_loading_node_with_a_notice_is_let_go_once_loaded_or_at_the_deadline() -> None:
    world = World()
    world.phase("rollout")
    world.join("spot-0")
    world.submit(request("a"))
    assert world.notice("spot-0", at=1.0) == [
        SetTimer(id="drain/spot-0#1", at=6.0),
        SetTimer(id="nodes/#4", at=601.0),
    ]
    assert world.loaded(SPOT, at=2.0) == [SPOT_IS_LET_GO]

    world = World()
    world.phase("rollout")
    world.join("spot-0")
    world.submit(request("a"))
    world.notice("spot-0", at=1.0)
    assert world.timer("drain/spot-0#1", at=6.0) == [SPOT_IS_LET_GO]
    assert world.timer("load/spot-0#1/0", at=60.0) == []
    # Nobody loads it now: the next node does.
    assert Load(group=group("spot-1"), policy=POLICY) in world.join("spot-1")


def test_a_node_is_let_go_when_its_last_group_has_let_go() -> None:
    world = World()
    world.phase("rollout")
    world.join("spot-0", gpus=2)
    world.submit(request("a"), request("b"))
    world.loaded(group("spot-0", 0))
    world.loaded(group("spot-0", 1))
    commands = world.notice("spot-0")
    assert [c.lease for c in commands if isinstance(c, Yield)] == ["1.1", "1.2"]
    assert SPOT_IS_LET_GO not in world(committed("1.1", "a", 4, released=True))
    assert SPOT_IS_LET_GO in world(finished("1.2", "b"))


# -- losses -------------------------------------------------------------------------------------------


def test_a_kill_recomputes_from_the_start_and_with_a_commit_from_there() -> None:
    world, _ = ready(request("a"), request("b"), request("c"))
    world(committed("1.1", "a", 5))
    world.lost("spot-0")
    assert world.scheduler.counters.recomputed == 1
    world.join("spot-0", incarnation=2)
    assert starts(world.loaded(group("spot-0", incarnation=2))) == [("b", "spot-0", 0)]
    world.lost("reserved-0")
    assert starts(world(finished("1.3", "b"))) == [("a", "spot-0", 5)]
    assert world.scheduler.counters.recomputed == 1


def test_what_a_provider_takes_is_no_failure_of_the_request() -> None:
    world, _ = ready(request("a"), max_attempts=1)
    for incarnation in range(1, 5):
        assert not [c for c in world.lost("reserved-0", incarnation=incarnation) if isinstance(c, Settle)]
        world.lost("spot-0", incarnation=incarnation)
        world.join("spot-0", incarnation=incarnation + 1)
        assert starts(world.loaded(group("spot-0", incarnation=incarnation + 1)))
    assert world.scheduler.counters.leases == 6


def test_words_of_a_former_life_of_a_node_change_nothing() -> None:
    world, _ = ready(request("a"), request("b"))
    world.lost("spot-0")
    world.join("spot-0", incarnation=2)
    assert world.notice("spot-0") == []
    assert world.loaded(SPOT) == []
    assert world.lost("spot-0") == []
    assert world(rank_lost(SPOT, "killed")) == []
    assert starts(world.loaded(group("spot-0", incarnation=2))) == [("b", "spot-0", 0)]


# -- flaky nodes --------------------------------------------------------------------------------------


def test_a_node_that_fails_fast_neither_eats_a_requests_attempts_nor_stays() -> None:
    world, _ = ready(request("a"), request("b"), max_attempts=8)  # a on reserved-0, b on spot-0
    assert starts(world(failed("1.2"))) == []
    world.submit(request("c"), request("d"), request("e"))
    assert starts(world(failed("1.3"))) == [("d", "spot-0", 0)]
    assert world(failed("1.4"))[0] == SPOT_IS_LET_GO
    assert starts(world(finished("1.1", "a"))) == [("b", "reserved-0", 0)]


def test_a_success_between_failures_keeps_a_node() -> None:
    world, _ = ready(request("a"), request("b"), request("c"), request("d"), max_node_failures=2)
    world(failed("1.2"))
    world(finished("1.3", "c"))
    assert SPOT_IS_LET_GO not in world(failed("1.4"))


def test_a_quarantined_node_lets_its_other_groups_commit() -> None:
    world = World(max_node_failures=1)
    world.phase("rollout")
    world.join("spot-0", gpus=2)
    world.submit(request("a"), request("b"))
    world.loaded(group("spot-0", 0))
    world.loaded(group("spot-0", 1))
    assert without_timers(world(failed("1.1"), at=1.0)) == [
        Yield(lease="1.2", group=group("spot-0", 1), by=61.0, reason="quarantine")
    ]
    assert SPOT_IS_LET_GO in world(committed("1.2", "b", 4, released=True))


def test_a_damaged_commit_is_recomputed_and_no_fault_of_the_node() -> None:
    world, _ = ready(request("a"), max_node_failures=1)
    world(committed("1.1", "a", 5))
    assert starts(world.lost("reserved-0")) == [("a", "spot-0", 5)]
    assert starts(world(failed("1.2", "hash differs", commit_lost=True))) == [("a", "spot-0", 0)]


def test_a_damaged_commit_takes_nothing_from_a_later_one() -> None:
    world, _ = ready(request("a"), max_attempts=9)
    world(committed("1.1", "a", 5))
    assert starts(world.timer("lease/6", at=60.0)) == [("a", "spot-0", 5)]
    world(committed("1.1", "a", 8), at=61.0)  # late, of the lease that was taken for lost
    assert starts(world(failed("1.2", "hash differs", commit_lost=True), at=62.0)) == [("a", "spot-0", 8)]
    assert starts(world(failed("1.3", "hash differs", commit_lost=True), at=63.0)) == [("a", "spot-0", 0)]


# -- loads --------------------------------------------------------------------------------------------


def test_other_weights_than_published_are_an_alarm() -> None:
    world = World()
    world.join("spot-0")
    world.submit(request("a"))
    detail = alarm(world(WeightsLoaded(group=SPOT, policy=POLICY, digest="other")))
    assert detail == "spot-0 holds other weights than old-1: other instead of d1"


def test_a_load_that_never_ends_costs_the_node_its_place() -> None:
    world = World()
    world.join("spot-0")
    world.phase("rollout")
    world.submit(request("a"))
    assert without_timers(world.timer("load/spot-0#1/0", at=59.0)) == []
    assert SPOT_IS_LET_GO in world.timer("load/spot-0#1/0", at=60.0)


def test_a_version_that_a_node_cannot_load_is_loaded_elsewhere() -> None:
    world = World()
    world.phase("rollout")
    world.join("spot-0")
    world.join("spot-1")
    assert Load(group=SPOT, policy=POLICY) in world.submit(request("a"))
    commands = world(LoadFailed(group=SPOT, policy=POLICY, error="no space left"))
    assert without_timers(commands) == [Load(group=group("spot-1"), policy=POLICY)]
    commands = world(LoadFailed(group=group("spot-1"), policy=POLICY, error="no space left"))
    # All have failed: all may try again.
    assert without_timers(commands) == [Load(group=SPOT, policy=POLICY)]
    assert starts(world.loaded(SPOT)) == [("a", "spot-0", 0)]


def test_a_version_that_nobody_can_load_is_an_alarm_with_the_error() -> None:
    world = World(max_attempts=2)
    world.phase("rollout")
    world.join("spot-0")
    world.join("spot-1")
    world.submit(request("a"))
    world(LoadFailed(group=SPOT, policy=POLICY, error="no space left"))
    commands = world(LoadFailed(group=group("spot-1"), policy=POLICY, error="file is torn"))
    assert alarm(commands) == "2 loads of old-1 failed in a row, the last one on spot-1#1 with: file is torn"


def test_a_node_that_cannot_load_is_let_go() -> None:
    world = World(max_node_failures=1)
    world.phase("rollout")
    world.join("spot-0")
    world.submit(request("a"))
    assert SPOT_IS_LET_GO in world(LoadFailed(group=SPOT, policy=POLICY, error="no space left"))


def test_a_late_word_of_another_load_is_no_answer_to_this_one() -> None:
    world, _ = ready()
    world.submit(request("x", policy=NEXT_POLICY))
    assert world.loaded(RESERVED, POLICY) == []
    assert world(LoadFailed(group=RESERVED, policy=POLICY, error="late")) == []
    assert starts(world.loaded(RESERVED, NEXT_POLICY)) == [("x", "reserved-0", 0)]


# -- processes ----------------------------------------------------------------------------------------


def test_a_process_that_dies_costs_its_request_an_attempt_and_another_one_goes_on() -> None:
    world, _ = ready(request("a"), request("b"), max_attempts=2)
    assert without_timers(world(rank_lost(SPOT, "killed by signal 9"))) == []
    assert starts(world(finished("1.1", "a"))) == [("b", "reserved-0", 0)]
    assert world(rank_lost(RESERVED, "killed by signal 9")) == [
        Settle(
            request="b",
            outcome="aborted",
            detail="2 attempts used up, the last one ended with: killed by signal 9",
        )
    ]


def test_a_group_with_a_new_process_loads_before_it_pulls() -> None:
    world, _ = ready(request("a"), request("b"))
    world(rank_lost(SPOT, "killed"))
    assert world(rank_lost(SPOT, "killed, said again")) == []
    world.submit(request("c"))
    assert without_timers(world(rank_ready(SPOT))) == [Load(group=SPOT, policy=POLICY)]
    assert starts(world.loaded(SPOT)) == [("c", "spot-0", 0)]  # b has failed here, and reserved-0 is there


def test_a_process_that_dies_takes_what_waits_for_it_off_too() -> None:
    world, commands = ready(*(request(name) for name in "abcd"), prefetch=True, max_attempts=1)
    assert ahead(commands) == [("c", "reserved-0"), ("d", "spot-0")]
    [settle] = without_timers(world(rank_lost(SPOT, "killed")))
    assert isinstance(settle, Settle)
    assert settle.request == "b"
    assert ahead(world(finished("1.1", "a"))) == [("d", "reserved-0")]


def test_a_process_that_dies_on_a_leaving_node_lets_it_go() -> None:
    world, _ = ready(request("a"), request("b"), max_attempts=1)
    world.notice("spot-0")
    assert world(rank_lost(SPOT, "killed")) == [SPOT_IS_LET_GO]
    assert starts(world(finished("1.1", "a"))) == [("b", "reserved-0", 0)]
    assert world(rank_ready(SPOT)) == []
