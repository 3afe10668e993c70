"""Flow-GRPO's SDE (arXiv 2505.05470, eq. 9): the marginals of the flow ODE, with noise to score.

With ``s`` this step's sigma, ``dt = s' - s < 0``, ``g = a sqrt(s / (1 - s))``::

    mean = x (1 + g² dt / 2s) + v (1 + g² (1 - s) / 2s) dt        std = g sqrt(-dt)

At ``s = 1`` the denominator of ``g`` alone uses ``1 - sigma_1`` (as in the authors' code), since it
would vanish.  SDE inside the window, ODE outside; the last step is always an ODE step.

Shape legend: B batch, S sequence, C channel.
"""

import math

import numpy as np
import torch

from spotlight_core.diffusion.noise_schedule import NoiseSchedule
from spotlight_core.diffusion.samplers.ode import euler


class FlowSdeSampler:
    """``noise_level`` is the paper's ``a``; ``trained_steps`` the half-open SDE window."""

    def __init__(self, denoise_steps: int, shift: float, noise_level: float, trained_steps: range) -> None:
        self.sigmas: np.ndarray = NoiseSchedule(denoise_steps=denoise_steps, shift=shift).sigmas()
        self.noise_level = noise_level
        self.trained_steps = trained_steps

    def needs_noise(self, denoise_step: int) -> bool:
        return denoise_step in self.trained_steps

    def diffusion(self, denoise_step: int) -> float:
        """``g`` of a denoise step: noise per square root of sigma."""
        sigma = float(self.sigmas[denoise_step])
        below = 1.0 - (float(self.sigmas[1]) if denoise_step == 0 else sigma)
        return self.noise_level * math.sqrt(sigma / below)

    def std(self, denoise_step: int) -> float:
        """Standard deviation of ``x'`` around its mean."""
        return self.diffusion(denoise_step) * math.sqrt(
            float(self.sigmas[denoise_step] - self.sigmas[denoise_step + 1])
        )

    def mean(self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, denoise_step: int) -> torch.Tensor:
        """Mean of ``x'`` given ``x`` and the velocity, fp32 ``[B, S, C]``."""
        sigma = float(self.sigmas[denoise_step])
        dt = float(self.sigmas[denoise_step + 1] - self.sigmas[denoise_step])
        drift = self.diffusion(denoise_step) ** 2 / (2.0 * sigma)
        return x_BSC * (1.0 + drift * dt) + v_BSC * ((1.0 + drift * (1.0 - sigma)) * dt)

    def step(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, denoise_step: int, noise_BSC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next latents and, inside the window, their log-probability ``[B]``.

        Raises:
            ValueError: a step of the window without noise.
        """
        if not self.needs_noise(denoise_step):
            return euler(x_BSC, v_BSC, self.sigmas, denoise_step), None
        if noise_BSC is None:
            raise ValueError(f"denoise step {denoise_step} is an SDE step: it needs noise")
        x_next_BSC = self.mean(x_BSC, v_BSC, denoise_step) + self.std(denoise_step) * noise_BSC
        return x_next_BSC, self.log_prob(x_BSC, v_BSC, x_next_BSC, denoise_step)

    def log_prob(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, x_next_BSC: torch.Tensor, denoise_step: int
    ) -> torch.Tensor:
        """Gaussian log-density of ``x'``, **averaged** over non-batch dimensions: fp32 ``[B]``.

        Clip ranges are written for this mean; for the sum they would be ``S * C`` times as wide.

        Raises:
            ValueError: a step outside the window.
        """
        if not self.needs_noise(denoise_step):
            raise ValueError(f"denoise step {denoise_step} is an ODE step: it has no log-probability")
        std = self.std(denoise_step)
        squared_BSC = (x_next_BSC - self.mean(x_BSC, v_BSC, denoise_step)) ** 2 / (2.0 * std**2)
        return -squared_BSC.flatten(1).mean(1) - (math.log(std) + 0.5 * math.log(2.0 * math.pi))
