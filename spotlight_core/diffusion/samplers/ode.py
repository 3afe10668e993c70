"""Euler steps of the probability-flow ODE: ``x' = x + v dt``; never scored.

Shape legend: B batch, S sequence, C channel.
"""

import numpy as np
import torch


class OdeSampler:
    """Deterministic; ``dt = sigma' - sigma < 0`` and ``v = eps - x0`` is the predicted velocity."""

    def __init__(self, sigmas: np.ndarray) -> None:
        self.sigmas = sigmas

    def step(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, denoise_step: int, noise_BSC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The next latents; an ODE step has no log-probability.

        Raises:
            ValueError: noise, which an ODE has no use for.
        """
        if noise_BSC is not None:
            raise ValueError(f"denoise step {denoise_step} is an ODE step: it takes no noise")
        return euler(x_BSC, v_BSC, self.sigmas, denoise_step), None


def euler(x_BSC: torch.Tensor, v_BSC: torch.Tensor, sigmas: np.ndarray, denoise_step: int) -> torch.Tensor:
    """``x + v (sigma' - sigma)``."""
    return x_BSC + v_BSC * (float(sigmas[denoise_step + 1]) - float(sigmas[denoise_step]))
