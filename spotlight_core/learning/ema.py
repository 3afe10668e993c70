"""Exponential moving average of weights: what is evaluated and exported."""

from collections.abc import Mapping

import torch

from spotlight_core.config import EmaConfig


class WeightAverage:
    """Averages named tensors; ``t`` counts optimizer steps from 0."""

    def __init__(self, weights: Mapping[str, torch.Tensor], config: EmaConfig) -> None:
        self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self._config = config

    def decay(self, t: int) -> float:
        """``min((1 + t) / (10 + t), decay)``: short memory at first, so that the start is forgotten."""
        return min((1 + t) / (10 + t), self._config.decay)

    @torch.no_grad()
    def update(self, weights: Mapping[str, torch.Tensor], t: int) -> None:
        """Move towards ``weights`` after optimizer step ``t``, if ``t + 1`` is a multiple of the interval."""
        if (t + 1) % self._config.interval:
            return
        decay = self.decay(t)
        for name, average in self.weights.items():
            average.mul_(decay).add_(weights[name].detach(), alpha=1.0 - decay)
