"""DanceGRPO's SDE (arXiv 2505.07818): Flow-GRPO's with a constant diffusion ``g = eta``."""

from collections.abc import Sequence
from dataclasses import dataclass

from spotlight_core.diffusion.samplers.flow_sde import diffusion_step
from spotlight_core.diffusion.samplers.sde import SdeStep


@dataclass(frozen=True, slots=True)
class DanceSdeRule:
    """``noise_level`` is the paper's ``eta``."""

    noise_level: float
    normalised = True

    def step(self, sigmas: Sequence[float], denoise_step: int) -> SdeStep:
        return diffusion_step(sigmas[denoise_step], sigmas[denoise_step + 1], self.noise_level)
