"""What clients ask for and get: submissions, cancellations, attempts, alarms, counts."""

from spotlight_core.config.fleet import FleetConfig
from spotlight_core.events import Abandon, Alarm, BootFailed, Cancelled, Offered, SetTimer, Settle
from spotlight_core.scheduling.records import SchedulingRules
from tests.core.scheduling.world import (
    NEXT_POLICY,
    SPOT,
    World,
    ahead,
    alarm,
    dropped,
    failed,
    finished,
    group,
    ready,
    request,
    starts,
    without_timers,
)


def test_attempts_are_limited_and_a_hopeless_request_is_aborted_at_once() -> None:
    world, _ = ready(request("a"), max_attempts=2)
    assert starts(world(failed("1.1", "out of memory"))) == [("a", "spot-0", 0)]
    assert world(failed("1.2", "out of memory")) == [
        Settle(
            request="a",
            outcome="aborted",
            detail="2 attempts used up, the last one ended with: out of memory",
        )
    ]
    world, _ = ready(request("a"))
    assert world(failed("1.1", "bad shape", fault="request")) == [
        Settle(request="a", outcome="aborted", detail="bad shape")
    ]


def test_cancelling_ends_pending_and_abandons_running_requests() -> None:
    world, _ = ready(request("a"), request("b"), request("c"))
    assert world(Cancelled(requests=("b", "c", "unknown"), reason="deadline")) == [
        Abandon(lease="1.2", group=SPOT),
        Settle(request="b", outcome="cancelled", detail="deadline"),
        Settle(request="c", outcome="cancelled", detail="deadline"),
    ]
    assert world(Cancelled(requests=("b",), reason="again")) == []
    # The group is free again once the executor says how the abandoned lease ended.
    assert starts(world.submit(request("d"))) == []
    assert starts(world(dropped("1.2"))) == [("d", "spot-0", 0)]


def test_a_result_of_a_cancelled_request_is_dropped() -> None:
    world, _ = ready(request("a"))
    world(Cancelled(requests=("a",), reason="deadline"))
    assert world(finished("1.1", "a")) == []
    assert world.scheduler.counters.duplicates_dropped == 1


def test_many_cancelled_requests_leave_the_rest_in_their_order() -> None:
    world, _ = ready(*(request(f"r{number}") for number in range(500)))
    world(Cancelled(requests=tuple(f"r{number}" for number in range(2, 490)), reason="deadline"))
    assert world.scheduler.snapshot().pending["rollout"] == 10
    assert starts(world(finished("1.1", "r0"))) == [("r490", "reserved-0", 0)]


def test_submitting_twice_is_submitting_once() -> None:
    world, _ = ready(request("a"), request("a"))
    assert world.submit(request("a")) == []
    world(finished("1.1", "a"))
    assert world.scheduler.counters.submitted == 1


def test_whoever_asks_again_for_what_is_done_is_told_of_the_result_that_there_is() -> None:
    world, _ = ready(request("a"), request("b"))
    settled = world(finished("1.1", "a"))
    assert settled == [Settle(request="a", outcome="done", ref="ref-a")]
    assert world.submit(request("a"), request("b")) == settled
    assert world.scheduler.snapshot().pending["rollout"] == 0
    assert world.scheduler.counters.submitted == 2


def test_one_name_for_two_policy_versions_is_an_alarm() -> None:
    world, _ = ready(request("a"))
    detail = "a was submitted for old-1, and again for old-2"
    assert alarm(world.submit(request("a", policy=NEXT_POLICY))) == detail
    world(finished("1.1", "a"))
    assert alarm(world.submit(request("a", policy=NEXT_POLICY))) == detail


def test_ten_outages_of_the_store_neither_end_a_request_nor_cost_a_node_its_place() -> None:
    world, _ = ready(request("a"), max_attempts=1, max_node_failures=1)
    for number in range(1, 11):
        commands = without_timers(world(failed(f"1.{number}", "the store is away", fault="nobody")))
        assert starts(commands) == [("a", commands[0].group.node, 0)]  # type: ignore[attr-defined]
        assert len(commands) == 1
    # But a store that stays away does not have it start for ever.
    detail = "11 leases ended through no fault of its own, the last one with: the store is away"
    assert world(failed("1.11", "the store is away", fault="nobody")) == [
        Settle(request="a", outcome="aborted", detail=detail)
    ]


def test_what_was_told_to_be_dropped_may_be_dropped_as_often_as_one_likes() -> None:
    requests = (request("a"), request("b"), request("e", "explore"))
    world, commands = ready(*requests, phase="remainder", prefetch=True, max_attempts=1)
    for number in range(3, 15):
        [(name, node)] = ahead(commands)
        assert name == "e"
        assert world.phase("rollout") == [Abandon(lease=f"1.{number}", group=group(node))]
        assert world(dropped(f"1.{number}")) == []
        commands = world.phase("remainder")


def test_boots_that_fail_end_no_wait_for_nodes() -> None:
    world = World(nodes_seconds=90.0)
    [timer] = world.submit(request("a"))
    assert timer == SetTimer(id="nodes/#1", at=90.0)
    boot = BootFailed(
        node="spot-0", pool="spot", error="x", incarnation=1, gpus=1, started_at=1.0, stopped_at=9.0
    )
    assert world(boot, at=10.0) == []
    assert alarm(world.timer("nodes/#1", at=90.0)) == "no node for 90 s, and 1 requests wait for one"


def test_requests_that_no_node_can_take_raise_an_alarm_in_time() -> None:
    world, _ = ready(request("a"), nodes_seconds=90.0)
    world.lost("spot-0", at=1.0)
    assert world.lost("reserved-0", at=2.0) == [SetTimer(id="nodes/#8", at=92.0)]
    world.join("spot-0", incarnation=2)
    assert without_timers(world.timer("nodes/#8", at=92.0)) == []  # somebody came meanwhile
    assert world.lost("spot-0", incarnation=2, at=100.0) == [SetTimer(id="nodes/#11", at=190.0)]
    assert alarm(world.timer("nodes/#11", at=190.0)) == "no node for 90 s, and 1 requests wait for one"


def test_nodes_that_may_not_run_what_waits_are_no_reason_for_an_alarm() -> None:
    world, _ = ready(phase="train")
    world.lost("spot-0")
    assert world.submit(request("e", "explore")) == []


def test_no_request_waits_so_no_node_is_missed() -> None:
    world, _ = ready(request("a"))
    world.lost("spot-0")
    [timer] = world.lost("reserved-0", at=5.0)
    assert isinstance(timer, SetTimer)
    world(Cancelled(requests=("a",), reason="deadline"))
    assert not [c for c in world.timer(timer.id, at=timer.at) if isinstance(c, Alarm)]


def test_events_of_other_deciders_are_ignored() -> None:
    world, _ = ready()
    assert world(Offered(node="spot-1", pool="spot")) == []
    assert world.timer("fleet/back-off/spot-0", at=1.0) == []


def test_counts_of_the_moment() -> None:
    world, _ = ready(*(request(name) for name in "abcde"), prefetch=True)
    world.join("spot-1", gpus=2)
    world.submit(request("x", "evaluate", policy=NEXT_POLICY))
    world.notice("spot-0")
    snapshot = world.scheduler.snapshot()
    assert snapshot.pending == {"rollout": 1, "audit": 0, "evaluate": 1, "explore": 0}
    assert (snapshot.in_flight, snapshot.queued) == (2, 2)
    assert (snapshot.groups_idle, snapshot.groups_busy) == (0, 2)
    assert (snapshot.groups_loading, snapshot.groups_lost) == (2, 0)
    assert snapshot.nodes_draining == 1
    assert snapshot.counters["submitted"] == 6
    assert world.loaded(group("spot-1", 0)) != []


def test_a_recipes_fleet_sets_the_rules() -> None:
    config = FleetConfig(
        lease_seconds=7, max_attempts=2, max_node_failures=4, nodes_seconds=9, prefetch=False
    )
    assert SchedulingRules.of(config) == SchedulingRules(
        lease_seconds=7, max_attempts=2, max_node_failures=4, nodes_seconds=9, prefetch=False
    )
