"""The SDE window: where it lies, that it moves, and that everyone draws the same."""

from collections import Counter

import pytest

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import (
    CpsConfig,
    FixedWindowConfig,
    FlowSdeConfig,
    OdeConfig,
    ProgressiveWindowConfig,
    RandomWindowConfig,
    WindowConfig,
)
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.recipes import load_recipe
from spotlight_core.types import PolicyVersion, PromptRow
from spotlight_core.windows import Window, sde_window


def _window(window: WindowConfig | None, iteration: int, occurrence: str = "p0", seed: int = 0) -> Window:
    sampler = FlowSdeConfig(type="flow_sde", denoise_steps=10, window=window)
    found = sde_window(sampler, seed, iteration, occurrence)
    assert found is not None
    return found


def _progressive(**settings: int | float) -> list[int]:
    """Where the window begins in the first 60 iterations."""
    window = ProgressiveWindowConfig.model_validate({"type": "progressive", **settings})
    found = [_window(window, iteration) for iteration in range(60)]
    assert all(end - first == window.size and end <= 9 for first, end in found)
    return [first for first, _ in found]


def test_all_but_the_last_step_without_a_window() -> None:
    assert _window(None, 3) == (0, 9)


def test_a_fixed_window_is_as_written_and_half_open() -> None:
    window = FixedWindowConfig(type="fixed", first=2, end=5)
    assert {_window(window, iteration, f"p{iteration}") for iteration in range(20)} == {(2, 5)}


def test_no_window_where_no_step_is_stochastic() -> None:
    assert sde_window(OdeConfig(), 0, 0, "p0") is None
    assert sde_window(FlowSdeConfig(type="flow_sde", noise_level=0.0), 0, 0, "p0") is None
    assert sde_window(CpsConfig(type="cps", noise_level=0.0), 0, 0, "p0") is None
    assert sde_window(CpsConfig(type="cps", noise_level=1e-6), 0, 0, "p0") == (0, 9)


@pytest.mark.parametrize(
    ("size", "first", "end"), [(1, 0, None), (2, 0, 5), (3, 2, 8), (9, 0, None), (4, 3, 7)]
)
def test_random_windows_reach_every_place_alike(size: int, first: int, end: int | None) -> None:
    """All denoise steps of the range are trained, whatever the seed: none is left out by a bad draw."""
    window, last = RandomWindowConfig(type="random", size=size, first=first, end=end), end or 9
    draws = Counter(_window(window, i, f"p{p}") for i in range(60) for p in range(50))
    places = [(place, place + size) for place in range(first, last - size + 1)]
    assert set(draws) == set(places)
    expected = 3000 / len(places)
    # 99.99 % of chi-square with at most 8 degrees of freedom lies below 31.8.
    assert sum((count - expected) ** 2 / expected for count in draws.values()) < 31.8
    assert {step for window in draws for step in range(*window)} == set(range(first, last))


def test_a_random_window_is_a_function_of_seed_iteration_and_occurrence() -> None:
    window = RandomWindowConfig(type="random", size=1)
    draws = {seed: [_window(window, i, "p3", seed) for i in range(40)] for seed in (0, 1)}
    assert draws[0] == [_window(window, i, "p3", 0) for i in range(40)]
    assert draws[0] != draws[1]
    assert draws[0] != [_window(window, i, "p4", 0) for i in range(40)]


def test_exploration_rollout_and_audit_of_a_prompt_share_its_window() -> None:
    """Seeds picked by a preview on another window would have been picked for other images."""
    overrides = ["loss.type=grpo", "sampler.type=flow_sde", "sampler.window={type='random', size=2}"]
    config = load_recipe("quickstart", overrides)
    prompts = [PromptRow(text=f'A "{number}"') for number in range(3)]  # fewer than a batch: texts repeat
    planner = BatchPlanner(config=config, sampler=GroupSampler(prompts=prompts, rng_seed=0))
    batch, policy = planner.plain(3, 24), PolicyVersion(label="current", number=0, digest="")
    rollout = {r.prompt.occurrence: r.fidelity.sde_steps for r in planner.rollout(batch, policy)}
    explored = planner.explore(batch, policy)
    assert len(explored) > len(rollout) > len({prompt.prompt.text for prompt in batch.prompts})
    assert all(request.fidelity.sde_steps == rollout[request.prompt.occurrence] for request in explored)
    assert len(set(rollout.values())) > 1
    other = planner.rollout(planner.plain(4, 24), policy)
    assert {r.prompt.occurrence: r.fidelity.sde_steps for r in other} != rollout


def test_a_progressive_window_moves_every_few_iterations_and_wraps() -> None:
    places = _progressive(size=4, iterations_per_move=5)
    assert places == [place for place in (0, 1, 2, 3, 4, 5) for _ in range(5)] * 2


def test_a_progressive_window_strides() -> None:
    assert _progressive(size=3, stride=2, iterations_per_move=3)[:13] == [
        0,
        0,
        0,
        2,
        2,
        2,
        4,
        4,
        4,
        6,
        6,
        6,
        0,
    ]


def test_a_progressive_window_leaves_later_places_sooner() -> None:
    # round(8 exp(-.5 max(first - 1, 0))): 8, 8, 4.85, 2.94, 1.79, 1.08 iterations.
    places = _progressive(size=4, iterations_per_move=8, decay=0.5, threshold=1)
    assert places[:28] == [0] * 8 + [1] * 8 + [2] * 5 + [3] * 3 + [4] * 2 + [5] + [0]


def test_a_progressive_window_stays_an_iteration_at_least() -> None:
    assert _progressive(size=4, iterations_per_move=2, decay=9.0)[:8] == [0, 0, 1, 2, 3, 4, 5, 0]


def test_a_progressive_window_is_the_same_for_all_groups() -> None:
    window = ProgressiveWindowConfig(type="progressive", iterations_per_move=2)
    assert {_window(window, 4, f"p{number}", seed) for number in range(9) for seed in (0, 1)} == {(2, 6)}
