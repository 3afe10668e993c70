"""Samplers: how latents move from one sigma to the next.  One file per sampler.

Which steps are stochastic is the request's to say (``Fidelity.sde_steps``): a sampler makes an SDE
step where it is given noise, an ODE step where it is not.

Shape legend: B batch, S sequence, C channel.
"""

from typing import Protocol

import numpy as np
import torch

from spotlight_core.config import CpsConfig, DanceSdeConfig, OdeConfig, SamplerConfig, SdeConfig
from spotlight_core.diffusion.samplers.cps import CpsRule
from spotlight_core.diffusion.samplers.dance_sde import DanceSdeRule
from spotlight_core.diffusion.samplers.flow_sde import FlowSdeRule
from spotlight_core.diffusion.samplers.ode import OdeSampler
from spotlight_core.diffusion.samplers.sde import SdeSampler, StepRule


class Sampler(Protocol):
    """A walk down the noise schedule ``sigmas``, fp32 ``[denoise_steps + 1]``."""

    sigmas: np.ndarray

    def step(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, denoise_step: int, noise_BSC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Next latents and their log-probability ``[B]``, None for an ODE step."""
        ...


def build_sampler(config: SamplerConfig, sigmas: np.ndarray) -> Sampler:
    """The recipe's sampler over ``sigmas``; a noise level of 0 makes it the ODE."""
    if isinstance(config, OdeConfig) or not config.noise_level:
        return OdeSampler(sigmas)
    return build_sde(config, sigmas)


def build_sde(config: SdeConfig, sigmas: np.ndarray) -> SdeSampler:
    """The recipe's SDE, as the concrete class whose means and log-probabilities losses need.

    Raises:
        ValueError: a noise level of 0, under which nothing can be scored.
    """
    if not config.noise_level:
        raise ValueError("a noise level of 0 leaves only ODE steps, which are never scored")
    rule: StepRule = FlowSdeRule(config.noise_level)
    if isinstance(config, DanceSdeConfig):
        rule = DanceSdeRule(config.noise_level)
    elif isinstance(config, CpsConfig):
        rule = CpsRule(config.noise_level)
    return SdeSampler(sigmas, rule)
