"""What several tests of the families do with a model: noise, a policy that has moved, an ODE rollout.

Shape legend: B batch, S latent tokens, C channels per token.
"""

import itertools
from collections.abc import Sequence

import torch

from spotlight_core.diffusion.model import DiffusionModel
from spotlight_core.diffusion.models.diffusers_model import DiffusersModel
from spotlight_core.diffusion.noise import INITIAL_NOISE, batch_noise
from spotlight_core.diffusion.policy import policy_parameters


def noise(model: DiffusionModel, rows: int = 2) -> torch.Tensor:
    """Initial noise of ``rows`` seeds: ``[B, S, C]``."""
    return batch_noise(5, ["p"] * rows, range(rows), INITIAL_NOISE, model.latent_shape_SC)


@torch.no_grad()
def perturb(model: DiffusionModel, rng_seed: int = 0, scale: float = 0.3) -> None:
    """Move the trained weights by more than rounding."""
    generator = torch.Generator().manual_seed(rng_seed)
    for parameter in policy_parameters(model.transformer).values():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)


@torch.inference_mode()
def drawn(model: DiffusersModel, prompts: Sequence[str], steps: int) -> torch.Tensor:
    """The model's own pixels after ``steps`` ODE steps from ``noise``, a row for each prompt."""
    x_BSC, text, sigmas = noise(model, len(prompts)), model.encode(prompts), model.sigmas(steps, None)
    for sigma, following in itertools.pairwise(sigmas):
        v_BSC = model.velocity(x_BSC, torch.full((len(prompts),), float(sigma)), text)
        x_BSC = x_BSC + v_BSC * float(following - sigma)
    return model.pixels(x_BSC)
