"""Flow-GRPO's SDE (arXiv 2505.05470, eq. 9): the marginals of the flow ODE, with noise to score.

With ``s`` this step's sigma, ``s'`` the next, ``dt = s' - s < 0``, ``g = a sqrt(s / (1 - s))``::

    mean = x (1 + g² dt / 2s) + v (1 + g² (1 - s) / 2s) dt        std = g sqrt(-dt)

At ``s = 1`` the denominator of ``g`` alone uses ``1 - sigma_1`` (as in the authors' code), since it
would vanish.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spotlight_core.diffusion.samplers.sde import SdeStep


@dataclass(frozen=True, slots=True)
class FlowSdeRule:
    """``noise_level`` is the paper's ``a``."""

    noise_level: float
    normalised = True

    def step(self, sigmas: Sequence[float], denoise_step: int) -> SdeStep:
        sigma = sigmas[denoise_step]
        below = 1.0 - (sigmas[1] if denoise_step == 0 else sigma)
        return diffusion_step(sigma, sigmas[denoise_step + 1], self.noise_level * math.sqrt(sigma / below))


def diffusion_step(sigma: float, sigma_next: float, diffusion: float) -> SdeStep:
    """One Euler-Maruyama step of the SDE with diffusion ``g`` that keeps the flow's marginals."""
    dt = sigma_next - sigma
    drift = diffusion**2 / (2.0 * sigma)
    return SdeStep(
        on_x=1.0 + drift * dt,
        on_v=(1.0 + drift * (1.0 - sigma)) * dt,
        std=diffusion * math.sqrt(-dt),
        time=-dt,
    )
