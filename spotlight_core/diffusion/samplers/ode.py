"""Euler steps of the probability-flow ODE: ``x' = x + v dt``; never scored.

Shape legend: B batch, S sequence, C channel.
"""

import numpy as np
import torch

from spotlight_core.diffusion.noise_schedule import NoiseSchedule


class OdeSampler:
    """Deterministic; ``dt = sigma' - sigma < 0`` and ``v = eps - x0`` is the predicted velocity."""

    trained_steps = range(0)

    def __init__(self, denoise_steps: int, shift: float) -> None:
        self.sigmas: np.ndarray = NoiseSchedule(denoise_steps=denoise_steps, shift=shift).sigmas()

    def needs_noise(self, denoise_step: int) -> bool:
        return False

    def step(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, denoise_step: int, noise_BSC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next latents; an ODE step has no log-probability."""
        return euler(x_BSC, v_BSC, self.sigmas, denoise_step), None

    def log_prob(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, x_next_BSC: torch.Tensor, denoise_step: int
    ) -> torch.Tensor:
        """Always ValueError: scoring a deterministic step would give NaN or infinity."""
        raise ValueError(f"denoise step {denoise_step} is an ODE step: it has no log-probability")


def euler(x_BSC: torch.Tensor, v_BSC: torch.Tensor, sigmas: np.ndarray, denoise_step: int) -> torch.Tensor:
    """``x + v (sigma' - sigma)`` in fp32."""
    return x_BSC + v_BSC * float(sigmas[denoise_step + 1] - sigmas[denoise_step])
