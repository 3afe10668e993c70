"""What every diffusion model offers to rollout, training and decoding.

Shape legend: B batch, S image tokens, C channels per token.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn


class DiffusionModel(Protocol):
    """A flow-matching DiT with its text encoding and its decoder: ``x = (1-σ)x₀ + σε``, ``v = ε - x₀``."""

    transformer: nn.Module
    latent_shape_SC: tuple[int, int]

    def encode(self, prompts: Sequence[str]) -> torch.Tensor:
        """Text embeddings of the prompts, fp32, batch first."""
        ...

    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """The predicted velocity ``v_BSC`` at noise level ``sigma_B`` (0..1)."""
        ...

    def decode(self, x_BSC: torch.Tensor) -> np.ndarray:
        """Images, uint8 ``[B, height, width, 3]``."""
        ...
