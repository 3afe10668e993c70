"""A point strikes at its place of the run, once."""

from spotlight_core.market.progress import ProgressPoint
from spotlight_core.market.replay import ReplayWatcher, Strike, points_of
from spotlight_core.types import Fidelity, GenerationRequest, Kind, PolicyVersion, Prompt

NOTICE = ProgressPoint(
    iteration=2,
    phase="rollout",
    node="spot-0",
    event="notice",
    nth_request=2,
    denoise_step=4,
    seconds_left=20.0,
)
KILL = ProgressPoint(iteration=3, phase="explore", node="spot-0", event="kill", nth_request=1, denoise_step=0)
RETURN = ProgressPoint(iteration=4, phase="rollout", node="spot-0", event="return")
LATER = ProgressPoint(
    iteration=4, phase="rollout", node="spot-0", event="notice", nth_request=1, denoise_step=1
)
OTHER = ProgressPoint(
    iteration=9, phase="rollout", node="spot-1", event="kill", nth_request=1, denoise_step=1
)


def request(name: str, kind: Kind) -> GenerationRequest:
    return GenerationRequest(
        id=name,
        kind=kind,
        prompts=(Prompt(occurrence="o", text='"1"'),),
        seeds=(0,),
        policy=PolicyVersion(label="base", number=0, digest="d"),
        fidelity=Fidelity(denoise_steps=10),
    )


def strikes(watcher: ReplayWatcher, name: str, kind: Kind = "rollout") -> dict[int, Strike]:
    watcher.begin(request(name, kind))
    return {step: strike for step in range(10) if (strike := watcher.at(step)) is not None}


def test_requests_are_counted_by_iteration_and_phase() -> None:
    watcher = ReplayWatcher([NOTICE, KILL, RETURN], grace_seconds=30.0)
    assert strikes(watcher, "2/rollout/a/0") == {}
    assert strikes(watcher, "3/rollout/a/0") == {}
    assert strikes(watcher, "2/explore/a/0", "explore") == {}
    assert strikes(watcher, "2/audit/a/0", "audit") == {}
    assert strikes(watcher, "2/rollout/b/0") == {4: Strike(event="notice", seconds_left=20.0)}
    assert strikes(watcher, "3/explore/a/0", "explore") == {0: Strike(event="kill", seconds_left=0.0)}
    assert strikes(watcher, "4/rollout/a/0") == {}


def test_a_point_strikes_once_and_a_missing_grace_is_the_recipes() -> None:
    watcher = ReplayWatcher([LATER], grace_seconds=30.0)
    watcher.begin(request("4/rollout/a/0", "rollout"))
    assert watcher.at(1) == Strike(event="notice", seconds_left=30.0)
    assert watcher.at(1) is None


def test_an_id_without_an_iteration_meets_nothing() -> None:
    watcher = ReplayWatcher([LATER], grace_seconds=30.0)
    assert watcher.at(1) is None
    assert strikes(watcher, "anything", "rollout") == {}


def test_a_new_life_keeps_only_the_points_after_its_return() -> None:
    points = [NOTICE, KILL, RETURN, LATER, OTHER]
    assert points_of(points, "spot-0", None) == [NOTICE, KILL, RETURN, LATER]
    assert points_of(points, "spot-0", (4, "rollout")) == [RETURN, LATER]
    assert points_of(points, "spot-0", (4, "explore")) == []
    assert points_of(points, "spot-1", (4, "explore")) == [OTHER]
