"""What the stochastic samplers share: ``x' = mean + std * noise``, with a mean that is linear in x and v.

A sampler is then four numbers for each denoise step.  They are looked up row by row, since the rows
of a training batch may come from different steps of different windows.

Latents, means and log-probabilities are computed in the latents' own precision, fp32 in a run.
Shape legend: B batch, S sequence, C channel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from spotlight_core.diffusion.samplers.ode import euler


@dataclass(frozen=True, slots=True, kw_only=True)
class SdeStep:
    """``mean = on_x * x + on_v * v``; ``time`` is what multiplies the KL of the step to give the KL that
    Flow-GRPO writes down (``-dt``; 1 where the sampler's noise does not scale with it)."""

    on_x: float
    on_v: float
    std: float
    time: float


class StepRule(Protocol):
    """What tells the stochastic samplers apart: the coefficients of each step, and how it is scored."""

    normalised: bool
    """Whether log-probabilities are Gaussian log-densities, or the bare negative squared distance."""

    def step(self, sigmas: Sequence[float], denoise_step: int) -> SdeStep:
        """The coefficients of ``denoise_step``, any but the last."""
        ...


class SdeSampler:
    """``rule`` at every denoise step but the last; the last, and what gets no noise, is an ODE step."""

    def __init__(self, sigmas: np.ndarray, rule: StepRule) -> None:
        self.sigmas = sigmas
        self._normalised = rule.normalised
        steps = [rule.step(sigmas.tolist(), index) for index in range(len(sigmas) - 2)]
        self._table = torch.tensor(
            [[step.on_x, step.on_v, step.std, step.time] for step in steps], dtype=torch.float64
        )

    def step(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, denoise_step: int, noise_BSC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next latents and, with noise, their log-probability ``[B]``.

        Raises:
            ValueError: noise for the last step, which is always an ODE step.
        """
        if noise_BSC is None:
            return euler(x_BSC, v_BSC, self.sigmas, denoise_step), None
        steps_B = torch.full((len(x_BSC),), denoise_step)
        x_next_BSC = self.mean(x_BSC, v_BSC, steps_B) + self.std(steps_B, x_BSC) * noise_BSC
        return x_next_BSC, self.log_prob(x_BSC, v_BSC, x_next_BSC, steps_B)

    def mean(self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, steps_B: torch.Tensor) -> torch.Tensor:
        """Mean of ``x'`` given ``x`` and the velocity at each row's denoise step (int64): ``[B, S, C]``."""
        return self._column(0, steps_B, x_BSC) * x_BSC + self._column(1, steps_B, x_BSC) * v_BSC

    def std(self, steps_B: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Standard deviation of ``x'`` at each row's denoise step: ``[B, 1, 1]``, of ``like``'s type."""
        return self._column(2, steps_B, like)

    def time(self, steps_B: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Each row's ``-dt``, 1 for a sampler whose noise does not scale with it: ``[B, 1, 1]``."""
        return self._column(3, steps_B, like)

    def log_prob(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, x_next_BSC: torch.Tensor, steps_B: torch.Tensor
    ) -> torch.Tensor:
        """Log-probability of ``x'``, **averaged** over non-batch dimensions: ``[B]``.

        Clip ranges are written for this mean; for the sum they would be ``S * C`` times as wide.
        """
        squared_BSC = (x_next_BSC - self.mean(x_BSC, v_BSC, steps_B)) ** 2
        if not self._normalised:
            return -squared_BSC.flatten(1).mean(1)
        std_B11 = self.std(steps_B, x_BSC)
        quadratic_B = (squared_BSC / (2.0 * std_B11**2)).flatten(1).mean(1)
        return -quadratic_B - (std_B11.flatten().log() + 0.5 * math.log(2.0 * math.pi))

    def _column(self, column: int, steps_B: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if int(steps_B.max()) >= len(self._table):
            raise ValueError(f"denoise step {int(steps_B.max())} is the last: an ODE step is never scored")
        return self._table[steps_B.cpu(), column].to(like.device, like.dtype)[:, None, None]
