"""Losses: what an update minimises.  One file per loss, chosen by the recipe's ``type``."""

import numpy as np

from spotlight_core.config import GrpoGuardConfig, NftConfig, OdeConfig, RunConfig
from spotlight_core.diffusion.model import DiffusionModel
from spotlight_core.diffusion.samplers import build_sde
from spotlight_core.learning.losses.base import Loss
from spotlight_core.learning.losses.grpo import GrpoLoss
from spotlight_core.learning.losses.grpo_guard import GrpoGuardLoss
from spotlight_core.learning.losses.nft import NftLoss


def build_loss(model: DiffusionModel, config: RunConfig, sigmas: np.ndarray) -> Loss:
    """The recipe's loss over the rollout's noise schedule."""
    per_forward = config.optimizer.timesteps_per_forward
    if isinstance(config.loss, NftConfig):
        return NftLoss(
            model,
            config.loss,
            sigmas,
            max_advantage=config.advantage.clip,
            timesteps_per_forward=per_forward,
        )
    assert not isinstance(config.sampler, OdeConfig)  # the recipe's own check: it has no log-probabilities
    kind = GrpoGuardLoss if isinstance(config.loss, GrpoGuardConfig) else GrpoLoss
    return kind(model, config.loss, build_sde(config.sampler, sigmas), per_forward)
