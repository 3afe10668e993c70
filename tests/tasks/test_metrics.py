import numpy as np
import pytest

from spotlight_core.market.billing import Segment
from spotlight_core.types import (
    Batch,
    Evaluation,
    Fidelity,
    GenerationRequest,
    PlannedPrompt,
    PolicyVersion,
    Prompt,
    SeedScore,
    TrajectoryGroup,
)
from tasks.metrics import (
    diversity_metrics,
    evaluation_metrics,
    exploration_metrics,
    overlap_share,
    remainder_seconds,
    selection_metrics,
)

POLICY = PolicyVersion(label="old", number=1, digest="x")
EXPLORED, PLAIN = Prompt(occurrence="p0", text='A "1"'), Prompt(occurrence="p1", text='A "2"')


def request(kind: str, prompt: Prompt, seeds: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest(
        id=f"3/{kind}/{prompt.occurrence}/{seeds[0]}",
        kind=kind,
        prompts=(prompt,),
        seeds=seeds,
        policy=POLICY,
        fidelity=Fidelity(denoise_steps=4),
    )


def group(prompt: Prompt, rewards: tuple[float, ...], explored: bool) -> TrajectoryGroup:
    return TrajectoryGroup(prompt=prompt, seeds=(0, 3), rewards=rewards, request_id="r", explored=explored)


def test_selected_and_plain_groups_are_compared_and_the_audit_correlated() -> None:
    seen = tuple(SeedScore(seed=seed, reward=reward) for seed, reward in enumerate((0.0, 0.5, 0.25, 1.0)))
    batch = Batch(
        iteration=3,
        prompts=(
            PlannedPrompt(prompt=EXPLORED, seeds=(0, 3), explored=seen),
            PlannedPrompt(prompt=PLAIN, seeds=(0, 3)),
        ),
        audit_occurrence="p0",
    )
    requests = [
        request("rollout", EXPLORED, (0, 3)),
        request("rollout", PLAIN, (0, 3)),
        request("audit", EXPLORED, (1, 2)),
    ]
    # Full rollouts of seeds 0, 3, 1, 2: ranks 1, 4, 2, 3 against explored ranks 1, 4, 3, 2.
    scores = {requests[0].id: [0.0, 1.0], requests[1].id: [0.5, 0.5], requests[2].id: [0.25, 0.5]}
    groups = [group(EXPLORED, (0.0, 1.0), True), group(PLAIN, (0.5, 0.75), False)]

    metrics = exploration_metrics(batch, requests, groups, scores)

    assert metrics == {
        "explore/seeds": 4.0,
        "explore/std_selected": 0.5,
        "explore/std_unexplored": 0.125,
        "explore/rank_correlation": pytest.approx(0.8),  # 1 - 6 * 2 / (4 * 15)
        "explore/audits_skipped": 0.0,
        "explore/reward_selected": 0.5,
        "explore/reward_unselected": 0.375,
        "explore/levels": 4.0,
        "explore/tied_share": 0.0,
    }


def test_without_exploration_there_is_nothing_to_compare() -> None:
    batch = Batch(iteration=0, prompts=(PlannedPrompt(prompt=PLAIN, seeds=(0, 3)),))

    metrics = exploration_metrics(batch, [], [group(PLAIN, (0.0, 1.0), False)], {})

    assert metrics == {"explore/seeds": 0.0, "explore/std_unexplored": 0.5}


def segment(activity: str, start: float, end: float) -> Segment:
    return Segment(
        node="spot-0",
        incarnation=1,
        pool="spot",
        gpus=1,
        activity=activity,
        start=start,
        end=end,
        request=None,
    )


def test_overlap_is_the_share_of_exploration_that_ran_beside_training() -> None:
    segments = [
        segment("explore", 0, 3),
        segment("explore", 10, 14),
        segment("rollout", 10, 20),
        segment("explore", 14, 18),
    ]
    windows = {"explore": (9.0, 18.0), "train": (10.0, 16.0)}

    assert overlap_share(segments, windows) == {"explore/overlap_share": 0.75}
    assert remainder_seconds(windows) == {"seconds/remainder": 2.0}
    assert overlap_share(segments, {"train": (0.0, 1.0)}) == {}
    assert remainder_seconds({"explore": (0.0, 5.0), "train": (1.0, 6.0)}) == {"seconds/remainder": 0.0}


def test_an_evaluation_is_tracked_under_val() -> None:
    evaluation = Evaluation(policy=POLICY, images=96, score=0.9, held_out=0.8, grey_share=0.1)

    assert evaluation_metrics(evaluation) == {
        "val/score": 0.9,
        "val/held_out": 0.8,
        "val/grey_share": 0.1,
        "val/images": 96.0,
    }
    assert evaluation_metrics(None) == {}


def test_what_selection_does_is_told() -> None:
    explored = tuple(SeedScore(seed=n, reward=r) for n, r in enumerate((1.0, 1.0, 0.5, 0.0, 0.0)))
    prompts = (
        PlannedPrompt(prompt=Prompt(occurrence="a", text="a"), seeds=(0, 4), explored=explored),
        PlannedPrompt(prompt=Prompt(occurrence="b", text="b"), seeds=(0, 1)),
    )
    found = selection_metrics(Batch(iteration=1, prompts=prompts))
    assert found == {
        "explore/reward_selected": 0.5,
        "explore/reward_unselected": 0.5,
        "explore/levels": 3.0,
        "explore/tied_share": 1.0,
    }
    assert selection_metrics(Batch(iteration=1, prompts=prompts[1:])) == {}


def test_diversity_is_the_spread_over_seeds() -> None:
    images = np.zeros((2, 4, 4, 3), np.uint8)
    images[1] = 255
    found = diversity_metrics([group(EXPLORED, (0.0, 1.0), True)], {"r": images})
    assert found == {"explore/diversity_selected": 0.5}
