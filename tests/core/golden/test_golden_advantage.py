"""Advantages and weight averages against the reference's loops."""

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spotlight_core.config import AdvantageConfig, EmaConfig
from spotlight_core.learning.advantage import combined_advantages, group_advantages
from spotlight_core.learning.ema import WeightAverage
from tests.core.golden import reference

Over = Literal["group", "global", "none"]
Kind = Literal["population", "sample"]
RNG = np.random.default_rng(11)
GROUPS = [RNG.normal(size=8), RNG.normal(0.5, 0.01, size=8), np.full(7, 0.1), np.array([0.0] * 7 + [1.0])]


@pytest.mark.parametrize("over", ["group", "global", "none"])
@pytest.mark.parametrize("kind", ["population", "sample"])
@pytest.mark.parametrize("clip", [5.0, 1.0, 0.25])
def test_every_option(over: Over, kind: Kind, clip: float) -> None:
    config = AdvantageConfig(std=over, std_kind=kind, clip=clip)
    expected = reference.advantages([group.tolist() for group in GROUPS], over, kind, clip)
    for got, row in zip(group_advantages(GROUPS, config), expected, strict=True):
        np.testing.assert_allclose(got, row, rtol=1e-10, atol=1e-13)
    assert group_advantages(GROUPS, config)[2].tolist() == [0.0] * 7


@given(
    st.lists(
        st.lists(st.floats(-10, 10).map(lambda reward: round(reward, 3)), min_size=2, max_size=6),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["group", "global", "none"]),
    st.sampled_from(["population", "sample"]),
)
def test_any_rewards(rewards: list[list[float]], over: Over, kind: Kind) -> None:
    config = AdvantageConfig(std=over, std_kind=kind)
    found = group_advantages([np.array(group) for group in rewards], config)
    for got, row in zip(found, reference.advantages(rewards, over, kind, 5.0), strict=True):
        np.testing.assert_allclose(got, row, rtol=1e-9, atol=1e-9)


def test_sample_std_gives_smaller_advantages_by_six_percent_at_eight() -> None:
    population, sample = (
        group_advantages(GROUPS[:1], AdvantageConfig(std_kind=kind))[0] for kind in ("population", "sample")
    )
    ratio = (population / sample)[0]
    assert ratio == pytest.approx((8 / 7) ** 0.5, rel=1e-4)
    assert 1.06 < ratio < 1.08


@pytest.mark.parametrize("over", ["group", "global", "none"])
@pytest.mark.parametrize("kind", ["population", "sample"])
def test_each_reward_normalised_alone(over: Over, kind: Kind) -> None:
    scales = {"ocr": 1.0, "pickscore": 26.0, "jpeg_size": 1e-3}
    weights = {"ocr": 1.0, "pickscore": 0.5, "jpeg_size": -0.25}
    parts = [{name: scale * RNG.normal(size=5) for name, scale in scales.items()} for _ in range(3)]
    parts[1]["ocr"] = np.full(5, 0.3)  # one reward without variance says nothing, the others go on
    config = AdvantageConfig(std=over, std_kind=kind, rewards="normalise_each", clip=1.5)
    expected = reference.combined(parts, weights, over, kind, 1.5)  # type: ignore[arg-type]
    found = combined_advantages(parts, weights, config)
    for got, row in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, row, rtol=1e-10, atol=1e-13)


def test_rewards_of_any_scale_weigh_alike_when_each_is_normalised() -> None:
    small, large = RNG.normal(size=6), RNG.normal(size=6)
    config = AdvantageConfig(rewards="normalise_each")
    found = [
        combined_advantages([{"a": small * 10, "b": large * scale}], {"a": 1.0, "b": 1.0}, config)[0]
        for scale in (10.0, 10_000.0)
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    summed = [group_advantages([small * 10 + large * scale], config)[0] for scale in (10.0, 10_000.0)]
    assert np.abs(summed[0] - summed[1]).max() > 0.1


@pytest.mark.parametrize(("decay", "interval"), [(0.9, 1), (0.9, 8), (0.3, 3), (0.0, 1)])
def test_weight_average(decay: float, interval: int) -> None:
    values = RNG.normal(size=40).tolist()
    average = WeightAverage(
        {"w": torch.tensor([0.25], dtype=torch.float64)}, EmaConfig(decay=decay, interval=interval)
    )
    for t, value in enumerate(values):
        average.update({"w": torch.tensor([value], dtype=torch.float64)}, t)
        expected = reference.averaged(0.25, values[: t + 1], decay, interval)
        assert average.weights["w"].item() == pytest.approx(expected, rel=1e-12)
