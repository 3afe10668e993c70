"""Coefficients-preserving sampling (Flow-CPS, arXiv 2509.05952): a DDIM-like step that renews noise.

With ``x0 = x - s v`` and ``x1 = x + (1 - s) v`` (the predicted noise)::

    mean = (1 - s') x0 + sqrt(s'² - std²) x1        std = s' sin(a pi / 2)

The total noise at ``s'`` is exactly ``s'``, so none is left over in the image; there is no
``sqrt(-dt)``.  Its log-probability is unnormalised on purpose: ``-mean((x' - mean)²)``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spotlight_core.diffusion.samplers.sde import SdeStep


@dataclass(frozen=True, slots=True)
class CpsRule:
    """``noise_level`` a in 0..1: the share of the noise that is renewed."""

    noise_level: float
    normalised = False

    def step(self, sigmas: Sequence[float], denoise_step: int) -> SdeStep:
        sigma, sigma_next = sigmas[denoise_step], sigmas[denoise_step + 1]
        std = sigma_next * math.sin(self.noise_level * math.pi / 2.0)
        kept = math.sqrt(max(sigma_next**2 - std**2, 0.0))
        return SdeStep(
            on_x=(1.0 - sigma_next) + kept,
            on_v=kept * (1.0 - sigma) - (1.0 - sigma_next) * sigma,
            std=std,
            time=1.0,
        )
