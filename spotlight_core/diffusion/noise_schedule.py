"""The noise schedule: which sigmas a denoise trajectory visits."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSchedule:
    """Flow-matching sigmas from 1 (noise) to 0, shifted as in SD3 (arXiv 2403.03206, eq. 23)."""

    denoise_steps: int
    shift: float = 1.0

    def sigmas(self) -> np.ndarray:
        """fp32 ``[denoise_steps + 1]``, strictly decreasing, first 1, last 0."""
        linear = np.linspace(1.0, 0.0, self.denoise_steps + 1)
        shifted = self.shift * linear / (1.0 + (self.shift - 1.0) * linear)
        return shifted.astype(np.float32)
