"""What every diffusion model offers to rollout, training and decoding.

One small adapter per family implements it; samplers, losses, trainer and engine know only this.
Latents are fp32 tokens whatever the family's own layout (images, packed patches, videos).

Shape legend: B batch, S latent tokens, C channels per token, L text tokens, D text channels,
F frames, H height, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEmbeddings:
    """What the text encoders say of B prompts; ``negative`` where guidance leads away from something.

    ``mask_BL`` is True at real tokens, None when all are.
    """

    tokens_BLD: torch.Tensor
    mask_BL: torch.Tensor | None = None
    pooled_BD: torch.Tensor | None = None
    negative: "TextEmbeddings | None" = None

    def rows(self, rows: torch.Tensor) -> "TextEmbeddings":
        """The embeddings of these rows (int64), which may repeat: for stacked timesteps."""
        return TextEmbeddings(
            tokens_BLD=self.tokens_BLD[rows],
            mask_BL=None if self.mask_BL is None else self.mask_BL[rows],
            pooled_BD=None if self.pooled_BD is None else self.pooled_BD[rows],
            negative=None if self.negative is None else self.negative.rows(rows),
        )


class DiffusionModel(Protocol):
    """A flow-matching DiT with its text encoding and its decoder: ``x = (1-σ)x₀ + σε``, ``v = ε - x₀``."""

    transformer: nn.Module
    """The policy: parameters that require gradients are trained and published, the others are frozen."""
    latent_shape_SC: tuple[int, int]

    def modules(self) -> Sequence[nn.Module]:
        """All that has weights, the transformer among it."""
        ...

    def encode(self, prompts: Sequence[str]) -> TextEmbeddings:
        """Text embeddings of the prompts; each prompt goes through the text encoders once in a run."""
        ...

    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        """The predicted velocity, fp32 ``[B, S, C]``, at noise level ``sigma_B`` (0..1), guidance included.

        Rollout and training both call this, so they cannot disagree on guidance.
        """
        ...

    def decode(self, x_BSC: torch.Tensor) -> np.ndarray:
        """Images, uint8 ``[B, H, W, 3]``, or videos ``[B, F, H, W, 3]``."""
        ...

    def sigmas(self, denoise_steps: int, shift: float | None) -> np.ndarray:
        """fp32 ``[denoise_steps + 1]`` from 1 to 0: with ``shift``, or as the model's own pipeline has it."""
        ...
