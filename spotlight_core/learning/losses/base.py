"""What a loss sees and gives.

Shape legend: B batch (trajectories of a chunk), S sequence, C channel, T trained denoise steps.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from spotlight_core.diffusion.model import DiffusionModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingChunk:
    """Trajectories of one forward and backward.

    ``arrays`` are batch-first views of the rollout's: ``x0`` ``[B, S, C]``; for losses with
    log-probabilities ``x_BTSC`` ``[B, T + 1, S, C]`` and ``logp_BT`` ``[B, T]``.
    """

    prompts: tuple[str, ...]
    advantages_B: torch.Tensor
    arrays: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPart:
    """One differentiable term, a mean over the chunk, and what to log of it."""

    loss: torch.Tensor
    metrics: Mapping[str, float]


class Loss(Protocol):
    """One RL objective.  Stateful where it keeps another policy beside the trained one."""

    rollout_label: Literal["old", "current"]
    parts: int
    """How many parts ``chunk_parts`` yields: the chunk's loss is their mean."""
    needs_log_probs: bool

    def chunk_parts(
        self, model: DiffusionModel, chunk: TrainingChunk, generator: np.random.Generator, *, on_policy: bool
    ) -> Iterator[LossPart]:
        """The parts in a fixed order, each to be backpropagated before the next is asked for.

        ``on_policy`` says that no optimizer step has been taken since the rollout.
        """
        ...

    def end_iteration(self, weights: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:
        """Move the policies kept beside the trained one; ``optimizer_steps`` counts the whole run's."""
        ...

    def kept_weights(self) -> dict[str, torch.Tensor] | None:
        """The rollout policy where it is not the trained one, else None."""
        ...

    def load_kept_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Restore what ``kept_weights`` gave."""
        ...


def frozen_copy(model: DiffusionModel) -> DiffusionModel:
    """A model with its own transformer, for inference only: an old policy or a reference."""
    twin = copy.copy(model)
    twin.transformer = copy.deepcopy(model.transformer).requires_grad_(False)
    return twin
