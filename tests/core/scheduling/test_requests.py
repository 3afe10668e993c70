"""The request scheduler as a state machine: exact commands for each event."""

import pytest

from spotlight_core.events import (
    Abandon,
    Alarm,
    Cancelled,
    Command,
    Committed,
    Event,
    Failed,
    Finished,
    Load,
    Lost,
    NodeJoined,
    Notice,
    PhaseChanged,
    Release,
    SetTimer,
    Settle,
    SPGroup,
    Start,
    Started,
    Submitted,
    Timer,
    WeightsLoaded,
    Yield,
)
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.types import Fidelity, GenerationRequest, Kind, PolicyVersion, Prompt

POLICY = PolicyVersion(label="old", number=1, digest="d1")
RESERVED, SPOT = SPGroup(node="reserved-0", generation=1), SPGroup(node="spot-0", generation=1)


def request(name: str, kind: Kind = "rollout", policy: PolicyVersion = POLICY) -> GenerationRequest:
    prompt = Prompt(occurrence=name, text='A sign "12"')
    fidelity = Fidelity(denoise_steps=10)
    return GenerationRequest(
        id=name, kind=kind, prompts=(prompt,), seeds=(0, 1), policy=policy, fidelity=fidelity
    )


class Harness:
    """Feeds stamped events to a scheduler."""

    def __init__(self, **rules: float) -> None:
        limits = {"lease_seconds": 60, "max_attempts": 3} | rules
        self.scheduler = RequestScheduler(SchedulingRules(**limits))  # type: ignore[arg-type]
        self.seq = 0

    def __call__(self, event: Event, at: float = 0.0) -> list[Command]:
        self.seq += 1
        return self.scheduler.decide(event.stamped(at, self.seq, 1))

    def join(self, node: str, pool: str, incarnation: int = 1) -> list[Command]:
        return self(NodeJoined(node=node, incarnation=incarnation, pool=pool, gpus=1, started_at=0.0))

    def loaded(self, node: str, incarnation: int = 1, policy: PolicyVersion = POLICY) -> list[Command]:
        return self(
            WeightsLoaded(
                group=SPGroup(node=node, generation=incarnation), policy=policy, digest=policy.digest
            )
        )


def ready(
    *requests: GenerationRequest, phase: str = "rollout", **rules: float
) -> tuple[Harness, list[Command]]:
    """A reserved and a spot node that hold POLICY, and the commands that loading caused."""
    harness = Harness(**rules)
    harness(PhaseChanged(phase=phase, iteration=0))  # type: ignore[arg-type]
    harness.join("reserved-0", "reserved")
    harness.join("spot-0", "spot")
    harness(Submitted(requests=requests))
    return harness, [*harness.loaded("reserved-0"), *harness.loaded("spot-0")]


def starts(commands: list[Command]) -> list[tuple[str, str, int]]:
    return [(c.request.id, c.group.node, c.from_denoise_step) for c in commands if isinstance(c, Start)]


def finished(lease: str, name: str, digest: str = "x") -> Finished:
    return Finished(lease=lease, request=name, ref=f"ref-{name}", digest=digest)


def test_an_idle_node_loads_the_version_before_it_pulls() -> None:
    harness = Harness()
    harness(PhaseChanged(phase="rollout", iteration=0))
    assert harness.join("spot-0", "spot") == []
    assert harness(Submitted(requests=(request("a"),))) == [
        Load(group=SPGroup(node="spot-0", generation=1), policy=POLICY),
        SetTimer(id="load/spot-0#1", at=60.0),
    ]
    assert harness.loaded("spot-0") == [
        Start(group=SPOT, lease="1.1", request=request("a")),
        SetTimer(id="lease/1.1", at=60.0),
    ]


def test_groups_pull_in_order_of_arrival_and_settle_once() -> None:
    harness, commands = ready(request("a"), request("b"), request("c"))
    assert starts(commands) == [("a", "reserved-0", 0), ("b", "spot-0", 0)]
    commands = harness(finished("1.2", "b"), at=1.0)
    assert commands[0] == Settle(request="b", outcome="done", ref="ref-b")
    assert starts(commands) == [("c", "spot-0", 0)]


def test_other_weights_than_published_are_an_alarm() -> None:
    harness = Harness()
    harness.join("spot-0", "spot")
    harness(Submitted(requests=(request("a"),)))
    [alarm] = harness(
        WeightsLoaded(group=SPGroup(node="spot-0", generation=1), policy=POLICY, digest="other")
    )
    assert isinstance(alarm, Alarm)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("rollout", []),
        ("publish", []),
        ("train", [("e", "spot-0", 0)]),
        ("remainder", [("e", "reserved-0", 0)]),
    ],
)
def test_exploration_runs_on_spot_while_training_and_on_all_for_a_remainder(
    phase: str, expected: list[tuple[str, str, int]]
) -> None:
    harness = Harness()
    harness.join("reserved-0", "reserved")
    harness.join("spot-0", "spot")
    warm = request("warm")
    harness(PhaseChanged(phase="rollout", iteration=0))
    harness(Submitted(requests=(warm, request("warm-2"))))
    harness.loaded("reserved-0")
    harness.loaded("spot-0")
    harness(finished("1.1", "warm"))
    harness(finished("1.2", "warm-2"))
    harness(Submitted(requests=(request("e", "explore"),)))
    assert starts(harness(PhaseChanged(phase=phase, iteration=0))) == expected  # type: ignore[arg-type]


def test_rollout_goes_before_exploration_that_came_first() -> None:
    harness = Harness()
    harness.join("spot-0", "spot")
    harness(PhaseChanged(phase="remainder", iteration=0))
    harness(Submitted(requests=(request("e", "explore"), request("r"))))
    assert starts(harness.loaded("spot-0")) == [("r", "spot-0", 0)]


def test_a_notice_yields_commits_and_resumes_elsewhere_at_the_committed_step() -> None:
    harness, _ = ready(request("a"), request("b"))
    assert harness(Notice(node="spot-0", incarnation=1, seconds_left=5), at=2.0) == [
        Yield(lease="1.2", group=SPOT, by=7.0, reason="notice"),
        SetTimer(id="drain/spot-0#1", at=7.0),
    ]
    committed = Committed(lease="1.2", request="b", next_denoise_step=4, ref="b@4", digest="y", released=True)
    assert harness(committed, at=3.0) == [Release(node="spot-0", incarnation=1)]
    resumed = harness(finished("1.1", "a"), at=4.0)
    assert resumed[1] == Start(
        group=RESERVED, lease="1.3", request=request("b"), from_denoise_step=4, state_ref="b@4"
    )
    assert harness.scheduler.counters.resumed == 1


def test_a_kill_recomputes_from_the_start_and_with_a_commit_from_there() -> None:
    harness, _ = ready(request("a"), request("b"), request("c"))
    harness(Committed(lease="1.1", request="a", next_denoise_step=5, ref="a@5", digest="y", released=False))
    harness(Lost(node="spot-0", incarnation=1, cause="killed", stopped_at=1.0))
    assert harness.scheduler.counters.recomputed == 1
    harness.join("spot-0", "spot", incarnation=2)
    assert starts(harness.loaded("spot-0", incarnation=2)) == [("b", "spot-0", 0)]
    harness(Lost(node="reserved-0", incarnation=1, cause="killed", stopped_at=1.0))
    commands = harness(finished("1.3", "b"))
    assert starts(commands) == [("a", "spot-0", 5)]


def test_a_damaged_commit_is_recomputed() -> None:
    harness, _ = ready(request("a"))
    harness(Committed(lease="1.1", request="a", next_denoise_step=5, ref="a@5", digest="y", released=False))
    harness(Lost(node="reserved-0", incarnation=1, cause="killed", stopped_at=1.0))
    failed = Failed(lease="1.2", error="hash differs", retryable=True, commit_lost=True)
    assert starts(harness(failed)) == [("a", "spot-0", 0)]


def test_an_idle_node_with_a_notice_is_let_go_at_once_and_gets_nothing() -> None:
    harness = Harness()
    harness.join("spot-0", "spot")
    assert harness(Notice(node="spot-0", incarnation=1, seconds_left=9)) == [
        Release(node="spot-0", incarnation=1)
    ]
    harness(PhaseChanged(phase="rollout", iteration=0))
    [waiting] = harness(Submitted(requests=(request("a"),)), at=1.0)
    assert waiting == SetTimer(id="nodes/#4", at=61.0)


def test_a_missed_deadline_abandons_the_lease_and_requeues_it() -> None:
    harness, _ = ready(request("a"), request("b"))
    harness(Notice(node="spot-0", incarnation=1, seconds_left=5), at=2.0)
    commands = harness(Timer(id="drain/spot-0#1"), at=7.0)
    assert commands == [Abandon(lease="1.2", group=SPOT), Release(node="spot-0", incarnation=1)]
    assert starts(harness(finished("1.1", "a"), at=8.0)) == [("b", "reserved-0", 0)]


def test_a_silent_lease_is_lost_but_signs_of_life_renew_it() -> None:
    harness, _ = ready(request("a"))
    commit = Committed(lease="1.1", request="a", next_denoise_step=5, ref="a@5", digest="y", released=False)
    assert harness(commit, at=30.0) == []
    assert harness(Started(lease="1.1"), at=50.0) == []
    assert harness(Timer(id="lease/1.1"), at=60.0) == [SetTimer(id="lease/1.1", at=110.0)]
    commands = harness(Timer(id="lease/1.1"), at=110.0)
    assert commands[:2] == [Abandon(lease="1.1", group=RESERVED), Release(node="reserved-0", incarnation=1)]
    assert starts(commands) == [("a", "spot-0", 5)]


def test_a_load_that_never_ends_costs_the_node_its_place() -> None:
    harness = Harness()
    harness.join("spot-0", "spot")
    harness(PhaseChanged(phase="rollout", iteration=0))
    harness(Submitted(requests=(request("a"),)))
    assert Release(node="spot-0", incarnation=1) in harness(Timer(id="load/spot-0#1"), at=60.0)


def test_a_node_that_fails_fast_neither_eats_a_requests_attempts_nor_stays() -> None:
    harness, _ = ready(request("a"), request("b"), max_attempts=8)  # a on reserved-0, b on spot-0
    # b is not given to the node it failed on while another could take it.
    assert starts(harness(Failed(lease="1.2", error="cuda", retryable=True))) == []
    harness(Submitted(requests=(request("c"), request("d"), request("e"))))
    assert starts(harness(Failed(lease="1.3", error="cuda", retryable=True))) == [("d", "spot-0", 0)]
    commands = harness(Failed(lease="1.4", error="cuda", retryable=True))
    assert commands[0] == Release(node="spot-0", incarnation=1)
    assert starts(harness(finished("1.1", "a"))) == [("b", "reserved-0", 0)]


def test_requests_that_no_node_can_take_raise_an_alarm_in_time() -> None:
    harness, _ = ready(request("a"))
    harness(Lost(node="spot-0", incarnation=1, cause="killed", stopped_at=1.0), at=1.0)
    lost = harness(Lost(node="reserved-0", incarnation=1, cause="killed", stopped_at=2.0), at=2.0)
    [timer] = lost
    assert isinstance(timer, SetTimer)
    assert timer.at == 62.0
    harness.join("spot-0", "spot", incarnation=2)
    assert harness(Timer(id=timer.id), at=62.0) == []  # somebody came meanwhile
    [again] = harness(Lost(node="spot-0", incarnation=2, cause="killed", stopped_at=3.0), at=70.0)
    assert isinstance(again, SetTimer)
    [alarm] = harness(Timer(id=again.id), at=130.0)
    assert isinstance(alarm, Alarm)
    assert "no node for 60 s" in alarm.detail


def test_the_first_result_wins_and_a_late_equal_one_is_dropped() -> None:
    harness, _ = ready(request("a"))
    harness(Timer(id="lease/1.1"), at=60.0)  # given to spot-0 as lease 1.2
    commands = harness(finished("1.1", "a"), at=61.0)
    assert commands == [Settle(request="a", outcome="done", ref="ref-a"), Abandon(lease="1.2", group=SPOT)]
    assert harness(finished("1.2", "a"), at=62.0) == []
    assert harness.scheduler.counters.duplicates_dropped == 1


def test_two_different_results_of_one_request_are_an_alarm() -> None:
    harness, _ = ready(request("a"))
    harness(finished("1.1", "a", digest="x"))
    [alarm] = harness(finished("9.9", "a", digest="y"))
    assert isinstance(alarm, Alarm)
    [alarm] = harness(finished("9.9", "never-submitted"))
    assert isinstance(alarm, Alarm)


def test_attempts_are_limited_and_a_hopeless_request_is_aborted_at_once() -> None:
    harness, _ = ready(request("a"), max_attempts=2)
    failed = Failed(lease="1.1", error="out of memory", retryable=True)
    assert starts(harness(failed)) == [("a", "spot-0", 0)]
    assert harness(Failed(lease="1.2", error="out of memory", retryable=True)) == [
        Settle(
            request="a",
            outcome="aborted",
            detail="2 attempts used up, the last one ended with: out of memory",
        )
    ]
    harness, _ = ready(request("a"))
    assert harness(Failed(lease="1.1", error="bad shape", retryable=False)) == [
        Settle(request="a", outcome="aborted", detail="bad shape")
    ]


def test_cancelling_aborts_pending_and_abandons_in_flight_requests() -> None:
    harness, _ = ready(request("a"), request("b"), request("c"))
    assert harness(Cancelled(requests=("b", "c", "unknown"), reason="deadline")) == [
        Abandon(lease="1.2", group=SPOT),
        Settle(request="b", outcome="cancelled", detail="deadline"),
        Settle(request="c", outcome="cancelled", detail="deadline"),
    ]
    # The group is free again once the executor says how the abandoned lease ended.
    harness(Submitted(requests=(request("d"),)))
    assert starts(harness(Failed(lease="1.2", error="abandoned", retryable=True))) == [("d", "spot-0", 0)]


def test_submitting_twice_is_submitting_once() -> None:
    harness, _ = ready(request("a"))
    harness(finished("1.1", "a"))
    assert harness(Submitted(requests=(request("a"),))) == []
