from spotlight_core import events as ev
from spotlight_core.events import SPGroup, Word
from spotlight_core.executor.gauges import Gauges
from tests.core.executor.coordinator_rig import request

ONE, TWO = SPGroup(node="spot-0", generation=1), SPGroup(node="spot-0", generation=1, ranks=(1,))
OTHER = SPGroup(node="reserved-0", generation=1)


def told(*words: Word) -> Gauges:
    gauges = Gauges(lambda: {"store_commits": 2})
    for word in words:
        gauges(word)
    return gauges


def start(name: str, lease: str, group: SPGroup, *, queued: bool = False, step: int = 0) -> ev.Start:
    return ev.Start(group=group, lease=lease, request=request(name), queued=queued, from_denoise_step=step)


def committed(name: str, lease: str, step: int, *, released: bool = False) -> ev.Committed:
    return ev.Committed(
        lease=lease, request=name, next_denoise_step=step, ref="r", digest="d", released=released
    )


SUBMITTED = ev.Submitted(requests=(*map(request, "abc"), request("d", kind="explore")))
NODES = tuple(
    ev.NodeJoined(node=group.node, incarnation=1, pool=pool, gpus=2, started_at=0.0)
    for group, pool in ((ONE, "spot"), (OTHER, "reserved"))
)
GOING = (
    SUBMITTED,
    *NODES,
    start("a", "0.1", ONE),
    start("b", "0.2", ONE, queued=True),
    start("c", "0.3", OTHER),
)


def test_requests_are_counted_by_kind_and_state() -> None:
    assert told(*GOING).requests() == {
        "rollout": {"pending": 0, "queued": 1, "in_flight": 2},
        "explore": {"pending": 1, "queued": 0, "in_flight": 0},
    }
    assert told(*GOING, ev.Started(lease="0.2")).requests()["rollout"]["in_flight"] == 3
    assert told(*GOING, ev.Settle(request="a", outcome="done", ref="a")).requests()["rollout"] == {
        "pending": 0,
        "queued": 1,
        "in_flight": 1,
    }


def test_what_ran_on_a_lost_node_or_actor_is_pending_again() -> None:
    notice = ev.Notice(node="spot-0", incarnation=1, seconds_left=3.0)
    lost = ev.Lost(node="spot-0", incarnation=1, cause="killed", stopped_at=1.0)
    assert told(*GOING, notice).nodes() == {
        "spot": {"ready": 0, "draining": 1},
        "reserved": {"ready": 1, "draining": 0},
    }
    gone = told(*GOING, notice, lost)
    assert gone.nodes() == {"reserved": {"ready": 1, "draining": 0}}
    assert gone.requests()["rollout"] == {"pending": 2, "queued": 0, "in_flight": 1}
    released = told(*GOING, ev.Release(node="spot-0", incarnation=1))
    assert released.requests()["rollout"]["pending"] == 2
    actor = told(*GOING, start("d", "0.4", TWO), ev.ActorLost(group=ONE, error="killed"))
    assert actor.requests()["rollout"]["pending"] == 2
    assert actor.requests()["explore"]["in_flight"] == 1


def test_a_request_with_two_leases_is_in_flight_until_both_end() -> None:
    failed = ev.Failed(lease="0.1", error="abandoned", retryable=True)
    twice = told(*GOING, start("a", "0.4", OTHER), failed)

    assert twice.requests()["rollout"]["in_flight"] == 2
    assert told(*GOING, failed).requests()["rollout"]["pending"] == 1


def test_committed_steps_are_counted_once() -> None:
    commits = (committed("a", "0.1", 2), committed("a", "0.1", 2), committed("a", "0.1", 3, released=True))
    lines = told(*GOING, *commits, committed("unknown", "9", 4)).text().splitlines()

    assert "spotlight_denoise_steps_committed_total 3" in lines
    assert 'spotlight_words_total{word="committed",how="kept"} 3' in lines
    assert 'spotlight_words_total{word="committed",how="released"} 1' in lines
    assert "spotlight_leases 2" in lines


def test_the_text_is_prometheus_own_format() -> None:
    phase = ev.PhaseChanged(phase="train", iteration=3)
    assert told(*NODES, phase).text() == (
        "# HELP spotlight_requests Requests that are not settled.\n"
        "# TYPE spotlight_requests gauge\n"
        "# HELP spotlight_nodes Nodes that are there.\n"
        "# TYPE spotlight_nodes gauge\n"
        'spotlight_nodes{pool="reserved",state="ready"} 1\n'
        'spotlight_nodes{pool="reserved",state="draining"} 0\n'
        'spotlight_nodes{pool="spot",state="ready"} 1\n'
        'spotlight_nodes{pool="spot",state="draining"} 0\n'
        "# HELP spotlight_leases Leases that groups hold.\n"
        "# TYPE spotlight_leases gauge\n"
        "spotlight_leases 0\n"
        "# HELP spotlight_denoise_steps_committed_total Denoise steps that a loss cannot take back.\n"
        "# TYPE spotlight_denoise_steps_committed_total counter\n"
        "spotlight_denoise_steps_committed_total 0\n"
        "# HELP spotlight_words_total What happened, by word and how it ended.\n"
        "# TYPE spotlight_words_total counter\n"
        'spotlight_words_total{word="node_joined",how="reserved"} 1\n'
        'spotlight_words_total{word="node_joined",how="spot"} 1\n'
        "# HELP spotlight_iteration The iteration under way.\n"
        "# TYPE spotlight_iteration gauge\n"
        "spotlight_iteration 3\n"
        "# HELP spotlight_store_commits Held now.\n"
        "# TYPE spotlight_store_commits gauge\n"
        "spotlight_store_commits 2\n"
    )
