"""Samplers: how latents move from one sigma to the next.  One file per sampler.

Latents, means and log-probabilities are fp32.
Shape legend: B batch, S sequence, C channel.
"""

from typing import Protocol

import numpy as np
import torch

from spotlight_core.config import FlowSdeConfig, OdeConfig, SamplerConfig
from spotlight_core.diffusion.samplers.flow_sde import FlowSdeSampler
from spotlight_core.diffusion.samplers.ode import OdeSampler


class Sampler(Protocol):
    """A walk down the noise schedule.

    ``sigmas`` is fp32 ``[denoise_steps + 1]``; ``trained_steps`` are the SDE steps that are
    recorded and trained, empty for an ODE.
    """

    sigmas: np.ndarray
    trained_steps: range

    def needs_noise(self, denoise_step: int) -> bool:
        """Whether ``step`` consumes noise at this denoise step."""
        ...

    def step(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, denoise_step: int, noise_BSC: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Next latents and their log-probability ``[B]``, None for an ODE step."""
        ...

    def log_prob(
        self, x_BSC: torch.Tensor, v_BSC: torch.Tensor, x_next_BSC: torch.Tensor, denoise_step: int
    ) -> torch.Tensor:
        """Log-probability ``[B]`` of a recorded step under ``v``, differentiable in ``v``."""
        ...


def build_sampler(config: SamplerConfig) -> Sampler:
    """The recipe's sampler."""
    if isinstance(config, OdeConfig):
        return OdeSampler(config.denoise_steps, config.shift)
    return build_flow_sde(config)


def build_flow_sde(config: FlowSdeConfig) -> FlowSdeSampler:
    """The recipe's SDE, as the concrete class whose mean and diffusion the KL term needs."""
    return FlowSdeSampler(config.denoise_steps, config.shift, config.noise_level, config.trained_steps)


def ode_like(config: SamplerConfig, denoise_steps: int) -> Sampler:
    """An ODE over the recipe's (shifted) schedule, for evaluation and other unstochastic fidelities."""
    return OdeSampler(denoise_steps, config.shift)
