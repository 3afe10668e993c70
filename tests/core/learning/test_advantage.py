"""Advantages against hand-worked values."""

import math

import numpy as np
import pytest

from spotlight_core.config import AdvantageConfig
from spotlight_core.learning.advantage import combined_advantages, group_advantages, has_variance


def test_population_std_of_the_group() -> None:
    (advantages,) = group_advantages([np.array([1.0, 0.0, 0.0, 1.0])], AdvantageConfig())
    assert advantages.tolist() == pytest.approx(
        [0.5 / 0.5001, -0.5 / 0.5001, -0.5 / 0.5001, 0.5 / 0.5001], rel=1e-12
    )


def test_global_std_over_the_iteration() -> None:
    rewards = [np.array([0.0, 1.0]), np.array([0.5, 0.7])]
    everywhere = math.sqrt(sum((r - 0.55) ** 2 for r in (0.0, 1.0, 0.5, 0.7)) / 4)
    first, second = group_advantages(rewards, AdvantageConfig(std="global"))
    assert first.tolist() == pytest.approx([-0.5 / (everywhere + 1e-4), 0.5 / (everywhere + 1e-4)])
    assert second.tolist() == pytest.approx([-0.1 / (everywhere + 1e-4), 0.1 / (everywhere + 1e-4)])


def test_no_std() -> None:
    (advantages,) = group_advantages([np.array([0.2, 0.6])], AdvantageConfig(std="none"))
    assert advantages.tolist() == pytest.approx([-0.2, 0.2], rel=1e-12)


def test_clipped_on_both_sides() -> None:
    rewards = np.array([1.0] + [0.0] * 99)
    (up,) = group_advantages([rewards], AdvantageConfig(clip=5.0))
    (down,) = group_advantages([-rewards], AdvantageConfig(clip=5.0))
    assert up[0] == 5.0
    assert down[0] == -5.0


@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("value", [0.1, 1.0, 1 / 3])
def test_constant_groups_are_exactly_zero(std: str, value: float) -> None:
    constant = np.full(7, value)  # the mean of seven times 0.1 is not 0.1 in floating point
    other = np.array([0.0, 1.0])
    zeros, _ = group_advantages([constant, other], AdvantageConfig(std=std))
    assert zeros.tolist() == [0.0] * 7
    assert not has_variance(constant)
    assert has_variance(other)


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="group 1"):
        group_advantages([np.array([0.0, 1.0]), np.array([0.0, np.nan])], AdvantageConfig())


def test_sample_std_divides_by_one_less() -> None:
    (advantages,) = group_advantages([np.array([1.0, 0.0, 0.0, 1.0])], AdvantageConfig(std_kind="sample"))
    std = math.sqrt(1 / 3)
    assert advantages.tolist() == pytest.approx([0.5 / (std + 1e-4) * sign for sign in (1, -1, -1, 1)])


def test_each_reward_normalised_alone_then_weighed_and_clipped() -> None:
    parts = [{"ocr": np.array([0.0, 1.0]), "size": np.array([2000.0, 1000.0])}]
    config = AdvantageConfig(std="group", rewards="normalise_each")
    (advantages,) = combined_advantages(parts, {"ocr": 1.0, "size": 0.25}, config)
    first = 0.5 / 0.5001 - 0.25 * 500 / 500.0001
    assert advantages.tolist() == pytest.approx([-first, first], rel=1e-12)
    (clipped,) = combined_advantages(parts, {"ocr": 9.0, "size": 0.25}, config)
    assert clipped.tolist() == [-5.0, 5.0]


def test_a_constant_reward_among_several_says_nothing() -> None:
    parts = [
        {"ocr": np.array([0.1] * 7), "size": np.arange(7.0)},
        {"ocr": np.array([0.1] * 7), "size": np.ones(7)},
    ]
    config = AdvantageConfig(rewards="normalise_each")
    some, nothing = combined_advantages(parts, {"ocr": 1.0, "size": 1.0}, config)
    assert some.tolist() == group_advantages([np.arange(7.0)], config)[0].tolist()
    assert nothing.tolist() == [0.0] * 7


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_reward_that_is_not_finite_is_taken_for_a_score(value: float) -> None:
    parts = [{"ocr": np.array([0.0, value])}]
    with pytest.raises(ValueError, match="rewards of group 0 are not finite"):
        combined_advantages(parts, {"ocr": 1.0}, AdvantageConfig())
