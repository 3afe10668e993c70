"""The moving average against a scalar recurrence."""

import pytest
import torch

from spotlight_core.config import EmaConfig
from spotlight_core.learning.ema import WeightAverage


def test_recurrence_with_warm_up() -> None:
    average = WeightAverage({"w": torch.tensor([0.0])}, EmaConfig(decay=0.5))
    expected = 0.0
    for t in range(12):
        average.update({"w": torch.tensor([float(t + 1)])}, t)
        decay = min((1 + t) / (10 + t), 0.5)
        expected = decay * expected + (1 - decay) * (t + 1)
        assert average.weights["w"].item() == pytest.approx(expected, rel=1e-6)


def test_interval() -> None:
    average = WeightAverage({"w": torch.tensor([0.0])}, EmaConfig(decay=0.9, interval=3))
    for t in (0, 1):
        average.update({"w": torch.tensor([10.0])}, t)
        assert average.weights["w"].item() == 0.0
    average.update({"w": torch.tensor([10.0])}, 2)
    assert average.weights["w"].item() == pytest.approx(10 * (1 - 3 / 12))


def test_owns_its_tensors() -> None:
    weights = {"w": torch.tensor([1.0])}
    average = WeightAverage(weights, EmaConfig())
    weights["w"].fill_(5.0)
    assert average.weights["w"].item() == 1.0
