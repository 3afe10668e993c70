"""What a loss sees and gives.

Shape legend: B batch (trajectories of a chunk), S sequence, C channel, T trained denoise steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import nn

from spotlight_core.diffusion.model import DiffusionModel

RATIO_DEVIATION = "train/ratio_max_deviation"
APPROXIMATE_KL = "train/approx_kl"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingChunk:
    """Trajectories of one forward and backward.

    ``arrays`` are batch-first views of the rollout's: ``x0`` ``[B, S, C]``; for losses with
    log-probabilities also ``x_BTSC`` ``[B, T + 1, S, C]``, ``steps_BT`` int64 (each row's trained denoise
    steps), what the loss calls its ``anchors``, and ``rollout_logp_BT`` where the trainer computed those
    again.
    """

    prompts: tuple[str, ...]
    advantages_B: torch.Tensor
    arrays: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPart:
    """One differentiable term, a mean over the chunk's rows and some of their timesteps.

    ``weight`` is the share of those timesteps: the chunk's loss is the weighted sum of its parts.
    """

    loss: torch.Tensor
    weight: float
    metrics: Mapping[str, float]


class Loss(Protocol):
    """One RL objective.  Stateful where it keeps another policy beside the trained one."""

    rollout_label: Literal["old", "current"]
    needs_log_probs: bool
    ratio_tolerance: float
    """How far from 1 a ratio may be before the first update; infinite for a loss without ratios."""

    def parts(
        self, model: DiffusionModel, chunk: TrainingChunk, generator: np.random.Generator
    ) -> Iterator[LossPart]:
        """The parts in a fixed order, each to be backpropagated before the next is asked for.

        ``timesteps_per_forward`` timesteps are stacked in each; how many does not change the sum.
        """
        ...

    def anchors(self, model: DiffusionModel, chunk: TrainingChunk) -> dict[str, torch.Tensor]:
        """What ratios compare with, under the model's present weights, in the shapes of training:
        ``logp_BT``, and ``mean_BTSC`` for a loss that regulates by it.  Empty without log-probabilities."""
        ...

    def end_iteration(self, weights: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:
        """Move the policies kept beside the trained one; ``optimizer_steps`` counts the whole run's."""
        ...

    def copies(self) -> list[nn.Module]:
        """The whole transformers kept beside the trained one, to be sharded as that one is."""
        ...

    def kept_weights(self) -> dict[str, torch.Tensor] | None:
        """The rollout policy where it is not the trained one, else None; not copied."""
        ...


def stacked(steps: int, per_forward: int) -> Iterator[range]:
    """``range(steps)`` cut into consecutive ranges of at most ``per_forward``."""
    for first in range(0, steps, per_forward):
        yield range(first, min(first + per_forward, steps))
