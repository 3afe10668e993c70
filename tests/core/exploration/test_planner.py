"""How much is explored: what fits, what is learnt from it, and when nothing is."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_core.config import RunConfig
from spotlight_core.errors import BadInputError
from spotlight_core.exploration.arms import Arm
from spotlight_core.exploration.planner import BanditPlanner, ExplorationPlanner, Supply, build_planner
from spotlight_core.types import Batch, PlannedPrompt, Prompt, SeedScore, TrajectoryGroup

PLENTY = Supply(spot_gpus=1e6, seconds_per_step=0.001)


def config(**exploration: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "r",
            "iterations": 100,
            "decisions": "live",
            "data": {"prompts": ".", "prompts_per_iteration": 3, "seeds_per_prompt": 4},
            "exploration": exploration,
        }
    )


def planner(**exploration: Any) -> ExplorationPlanner:
    return build_planner(config(**exploration))


def bandit(**exploration: Any) -> BanditPlanner:
    built = planner(**{"type": "ucb", "audit_every": 0} | exploration)
    assert isinstance(built, BanditPlanner)
    built.trained(10.0)
    return built


def arm(d: int, s: int) -> Arm:
    return Arm(seeds_per_prompt=d, effective_steps=s)


def rolled(
    iteration: int, seeds: int, selected: float, plain: float, *, missing: int = 0
) -> tuple[Batch, list[TrajectoryGroup]]:
    """A batch whose explored groups have the reward std ``selected``, and its unexplored one ``plain``."""
    prompts, groups = [], []
    for number, std in enumerate((selected, selected, plain)):
        prompt = Prompt(occurrence=str(number), text="t")
        explored = number < 2
        scores = tuple(SeedScore(seed=seed, reward=0.0) for seed in range(seeds - missing if explored else 0))
        prompts.append(PlannedPrompt(prompt=prompt, seeds=(0, 1, 2, 3), explored=scores))
        rewards = (0.5 - std, 0.5 + std) * 2
        groups.append(
            TrajectoryGroup(
                prompt=prompt, seeds=(0, 1, 2, 3), rewards=rewards, request_id="r", explored=explored
            )
        )
    return Batch(iteration=iteration, prompts=tuple(prompts)), groups


def test_a_fixed_arm_is_decided_whatever_there_is() -> None:
    fixed = planner(type="fixed_arm", seeds_per_prompt=8, effective_steps=4)
    assert [fixed.decide(n, 2, None) for n in (0, 7)] == [arm(8, 4)] * 2
    assert fixed.arm(7) == arm(8, 4)
    assert planner(type="none").decide(3, 2, PLENTY) is None


def test_the_arms_of_a_recipe_that_names_none() -> None:
    assert bandit()._arms == tuple(arm(d, s) for d in (6, 8, 16) for s in (8, 10))
    paper = bandit(type="ucb_paper")._arms
    assert len(paper) == 25
    assert (paper[0], paper[-1]) == (arm(4, 6), arm(16, 10))


def test_without_a_training_or_a_spot_gpu_seeds_are_plain() -> None:
    fresh = planner(type="ucb")
    assert fresh.decide(1, 2, PLENTY) is None
    known = bandit()
    assert known.decide(1, 2, None) is None
    assert known.decide(2, 2, Supply(spot_gpus=0.0, seconds_per_step=0.001)) is None
    batch, groups = rolled(2, 6, 0.4, 0.2)
    assert known.rolled_out(batch, groups) == "nothing was explored"


@given(
    st.floats(0.0, 100.0),
    st.floats(1e-4, 10.0),
    st.floats(0.0, 1.0),
    st.integers(1, 64),
    st.sampled_from(["ucb", "ucb_paper", "thompson"]),
    st.lists(st.tuples(st.floats(0.1, 5.0), st.booleans()), max_size=12),
)
def test_no_arm_is_over_the_budget_and_something_that_fits_is_always_chosen(
    gpus: float, step: float, image: float, prompts: int, kind: str, history: list[tuple[float, bool]]
) -> None:
    known = bandit(type=kind)
    supply = Supply(spot_gpus=gpus, seconds_per_step=step, seconds_per_image=image)
    for iteration, (gain, learnt) in enumerate([*history, (1.0, False)], start=1):
        chosen = known.decide(iteration, prompts, supply)
        costs = {a: a.seeds_per_prompt * prompts * (a.effective_steps * step + image) for a in known._arms}
        fitting = {a for a, cost in costs.items() if cost <= 10.0 * gpus}
        assert (chosen in fitting) if fitting else chosen is None
        if chosen is not None and learnt:
            batch, groups = rolled(iteration, chosen.seeds_per_prompt, 0.2 * min(gain, 2.0), 0.2)
            assert known.rolled_out(batch, groups) == ""


def test_the_papers_bandit_against_a_trace_worked_by_hand() -> None:
    # Three arms of one fidelity; 0.5 sqrt(ln(N + 1) / n) is what is not known.
    known = bandit(type="ucb_paper", seeds_per_prompt=[4, 8, 16], effective_steps=[10], window=2)
    gains = {4: [1.0, 1.0], 8: [1.5, 0.9, 0.9], 16: [1.2, 1.3, 1.3, 1.3]}
    chosen = []
    for iteration in range(1, 8):
        decided = known.decide(iteration, 2, PLENTY)
        assert decided is not None
        chosen.append(decided.seeds_per_prompt)
        gain = gains[decided.seeds_per_prompt].pop(0)
        # All three groups over the plain one: (2 * selected + plain) / 3 / plain.
        batch, groups = rolled(iteration, decided.seeds_per_prompt, 0.2 * (3 * gain - 1) / 2, 0.2)
        assert known.rolled_out(batch, groups) == ""
    # 1 to 3: each unseen arm, the cheapest first.
    # 4: 1.0 | 1.5 | 1.2, each + .5 sqrt(ln 4): arm 8, which then has 1.5 and 0.9.
    # 5: 1.0 + .634 | 1.2 + .449 | 1.2 + .634: arm 16, which then has 1.2 and 1.3.
    # 6: 1.0 + .669 | 1.2 + .473 | 1.25 + .473: arm 16, whose window then holds 1.3 and 1.3.
    # 7: 1.0 + .697 | 1.2 + .493 | 1.3 + .493: arm 16.
    assert chosen == [4, 8, 16, 8, 16, 16, 16]


def test_a_window_forgets_what_was_before_it() -> None:
    known = bandit(type="ucb_paper", seeds_per_prompt=[4, 8], effective_steps=[10], window=1, bonus=0.0)
    for iteration, gain in enumerate([1.2, 2.0, 1.0, 1.1], start=1):
        decided = known.decide(iteration, 2, PLENTY)
        assert decided is not None
        batch, groups = rolled(iteration, decided.seeds_per_prompt, 0.2 * (3 * gain - 1) / 2, 0.2)
        known.rolled_out(batch, groups)
    # 4: 1.2; 8: 2.0, then 1.0, so that 4 is better, then 4: 1.1.
    assert known.decide(5, 2, PLENTY) == arm(4, 10)
    assert known._bandit.score(arm(8, 10)) == pytest.approx(1.0)  # type: ignore[attr-defined]


def test_ties_go_to_less_work_then_fewer_steps_then_fewer_seeds() -> None:
    known = bandit(type="ucb_paper", seeds_per_prompt=[4, 8], effective_steps=[5, 10])
    order = []
    for iteration in range(1, 5):
        decided = known.decide(iteration, 2, PLENTY)
        assert decided is not None
        order.append(decided)
        batch, groups = rolled(iteration, decided.seeds_per_prompt, 0.2, 0.2)
        known.rolled_out(batch, groups)
    assert order == [arm(4, 5), arm(8, 5), arm(4, 10), arm(8, 10)]


def test_unseen_arms_start_from_those_near_them() -> None:
    known = bandit(seeds_per_prompt=[4, 5, 16], effective_steps=[10], bonus=0.0)
    known._bandit.observe(arm(4, 10), 2.0)
    near, far = (known._bandit.score(arm(d, 10)) for d in (5, 16))  # type: ignore[attr-defined]
    assert 1.8 < near < 2.0
    assert 1.0 < far < near


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"missing": 1}, "exploration did not come to its end"),
        ({"plain": 0.0}, "rewards of plain seeds are all equal"),
    ],
)
def test_what_says_nothing_teaches_nothing(changes: dict[str, Any], why: str) -> None:
    known = bandit()
    decided = known.decide(1, 2, PLENTY)
    assert decided is not None
    before = known.state_dict()
    batch, groups = rolled(1, decided.seeds_per_prompt, **{"selected": 0.3, "plain": 0.2, **changes})
    assert known.rolled_out(batch, groups) == why
    assert known.state_dict() == before


def test_the_reward_is_of_all_groups_over_the_unexplored_ones() -> None:
    known = bandit()
    decided = known.decide(1, 2, PLENTY)
    assert decided is not None
    known.rolled_out(*rolled(1, decided.seeds_per_prompt, 0.4, 0.2))
    assert known._bandit.state_dict()["arms"][0][3] == [pytest.approx((0.4 + 0.4 + 0.2) / 3 / 0.2)]


def test_later_trainings_count_for_more() -> None:
    known = planner(type="ucb")
    assert isinstance(known, BanditPlanner)
    for seconds in (100.0, 1.0, 2.0, 4.0):
        known.trained(seconds)
    assert known.train_seconds == pytest.approx((4 * 4 + 2 * 2 + 1) / 7)


@pytest.mark.parametrize("kind", ["ucb", "ucb_paper", "thompson", "fixed_arm"])
def test_a_restored_planner_goes_on_as_the_other_would(kind: str) -> None:
    def life(known: ExplorationPlanner, first: int, last: int) -> list[Arm | None]:
        found = []
        for iteration in range(first, last):
            decided = known.decide(iteration, 2, PLENTY)
            assert decided is not None
            found.append(decided)
            gain = 0.2 + 0.01 * ((iteration * 7) % 11)
            known.rolled_out(*rolled(iteration, decided.seeds_per_prompt, gain, 0.2))
            known.audited(iteration, 0.9)
            known.trained(1.0 + iteration % 3)
        return found

    whole = planner(type=kind, audit_every=1)
    whole.trained(10.0)
    life(whole, 1, 15)
    restored = planner(type=kind, audit_every=1)
    restored.load_state_dict(whole.state_dict())
    assert restored.arm(14) == whole.arm(14) != None  # noqa: E711
    assert life(restored, 15, 40) == life(whole, 15, 40)


@pytest.mark.parametrize("kind", ["none", "fixed_arm", "ucb"])
@pytest.mark.parametrize("state", [{"pulls": [1]}, {"decided": 3, "backoff": {}, "bandit": {}}])
def test_anothers_state_is_refused(kind: str, state: Mapping[str, Any]) -> None:
    with pytest.raises(BadInputError, match="of another exploration planner"):
        planner(type=kind).load_state_dict(state)


def test_previews_that_do_not_predict_cost_steps_and_then_are_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = bandit(correlation_floor=0.6)
    seen = []
    for iteration in range(1, 12):
        decided = known.decide(iteration, 2, PLENTY)
        seen.append(decided and decided.effective_steps)
        if decided is not None:
            known.audited(iteration, 0.5)
    assert seen == [8, 8, 8, 10, 10, 10] + [None] * 5
    assert known.metrics(11)["explore/off"] == 1.0
    assert "previews compute 10 steps from now on" in caplog.text
    assert "nothing is explored any more" in caplog.text


def test_one_bad_audit_is_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    known = bandit(correlation_floor=0.6)
    for iteration, correlation in enumerate([0.1, 0.9, 0.9, 0.1, 0.9, 0.9], start=1):
        known.decide(iteration, 2, PLENTY)
        known.audited(iteration, correlation)
    assert known.metrics(6)["explore/least_steps"] == 8
    assert math.isclose(known.metrics(6)["explore/budget_gpu_seconds"], 1e7)


def test_planned_decisions_need_a_supply_that_does_not_depend_on_time() -> None:
    tree = config(type="ucb").model_dump(mode="json") | {"decisions": "planned"}
    with pytest.raises(ValueError, match=r"set decisions = 'live', or exploration\.supply"):
        RunConfig.model_validate(tree)
    supply = {"train_seconds": 5.0, "spot_gpus": 2, "seconds_per_step": 0.01}
    tree["exploration"]["supply"] = supply
    known = build_planner(RunConfig.model_validate(tree))
    # 10 GPU-seconds; 6 seeds of 2 prompts at 8 steps take .96 of them, all arms fit.
    assert known.decide(1, 2, None) == arm(6, 8)
    known.trained(0.001)
    assert known.decide(2, 2, None) is not None
