from spotlight_core import events as ev
from spotlight_core.drive import Together
from spotlight_core.executor.gauges import Gauges, prometheus
from spotlight_core.market.fleet import FleetPlanner, FleetRules
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from tests.core.executor.coordinator_rig import Straight, request


def told(*events: ev.Event) -> Gauges:
    """What the deciders know after ``events``."""
    decider = Together(
        FleetPlanner(FleetRules(spot_nodes=2)),
        RequestScheduler(SchedulingRules(lease_seconds=60, max_attempts=5)),
    )
    for seq, event in enumerate(events, start=1):
        decider.decide(event.stamped(float(seq), seq, 0))
    return Gauges.of(decider)


GOING = (
    ev.Offered(node="spot-0", pool="spot"),
    ev.Offered(node="spot-1", pool="spot"),
    ev.NodeJoined(node="spot-0", incarnation=1, pool="spot", gpus=2, started_at=0.0),
    ev.Submitted(requests=(request("a"), request("b"), request("c", kind="explore"))),
)


def test_what_the_deciders_know_is_counted_by_state() -> None:
    gauges = told(*GOING)

    assert {state: count for state, count in gauges.requests().items() if count} == {
        "pending_rollout": 2,
        "pending_explore": 1,
    }
    assert gauges.groups() == {"idle": 0, "busy": 0, "loading": 2, "lost": 0}
    assert gauges.nodes() == {"booting": 1, "joined": 1, "leaving": 0, "waiting": 0}

    policy = request("a").policy
    groups = [ev.SPGroup(node="spot-0", incarnation=1, ranks=(rank,)) for rank in (0, 1)]
    loaded = [ev.WeightsLoaded(group=group, policy=policy, digest=policy.digest) for group in groups]
    running = told(*GOING, *loaded)
    assert running.groups()["busy"] == 2
    assert running.requests()["in_flight"] == 2
    notice = ev.Notice(node="spot-0", incarnation=1, seconds_left=3.0)
    assert told(*GOING, *loaded, notice).nodes()["leaving"] == 1


def test_the_text_is_prometheus_own_format() -> None:
    lines = prometheus(told(*GOING), 3, {"store_commits": 2}).splitlines()

    assert lines[:2] == [
        "# HELP spotlight_requests Requests that are not settled.",
        "# TYPE spotlight_requests gauge",
    ]
    assert {
        'spotlight_requests{state="pending_rollout"} 2',
        'spotlight_groups{state="loading"} 2',
        'spotlight_nodes{state="booting"} 1',
        "# TYPE spotlight_submitted_total counter",
        "spotlight_submitted_total 3",
        "spotlight_iteration 3",
        "spotlight_store_commits 2",
    } <= set(lines)


def test_another_decider_tells_nothing() -> None:
    assert prometheus(Gauges.of(Straight()), 0, {}).splitlines() == [
        "# HELP spotlight_requests Requests that are not settled.",
        "# TYPE spotlight_requests gauge",
        "# HELP spotlight_groups SPGroups of the nodes that are there.",
        "# TYPE spotlight_groups gauge",
        "# HELP spotlight_nodes Nodes that are there or wanted.",
        "# TYPE spotlight_nodes gauge",
        "# HELP spotlight_iteration The iteration under way.",
        "# TYPE spotlight_iteration gauge",
        "spotlight_iteration 0",
    ]
