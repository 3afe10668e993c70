"""From an iteration's groups to the chunks that the optimizer's steps see.

Which group is in which update, and which trajectory in which chunk, is a function of the run's seed and
the groups' order alone.

Shape legend: B batch, S sequence, C channel, K trajectories of a group, T trained denoise steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from spotlight_core.arrays import Arrays
from spotlight_core.config import RunConfig, WeightedRewardConfig
from spotlight_core.learning.advantage import combined_advantages, group_advantages
from spotlight_core.learning.losses.base import TrainingChunk
from spotlight_core.philox import named_generator

_TIME_FIRST = {"x_TBSC": "x_BTSC", "logp_TB": "logp_BT", "mean_TBSC": "mean_BTSC"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """The K trajectories of one prompt occurrence, as rolled out.

    ``rewards`` ``[K]``, and with several rewards the scores of each in ``parts``; ``arrays`` as in
    ``Generated`` with rows in the same order; ``sde_steps`` is the half-open range of the denoise steps
    that they hold.
    """

    prompt: str
    rewards: np.ndarray
    arrays: Arrays
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    sde_steps: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The groups of one optimizer step that teach something; ``samples`` counts the others too.

    A constant group contributes no gradient and still counts in the mean: leaving it out would raise the
    step size of the rest.
    """

    number: int
    groups: tuple[tuple[TrainingGroup, np.ndarray], ...]
    samples: int


def advantages_of(groups: Sequence[TrainingGroup], config: RunConfig) -> list[np.ndarray]:
    """The advantages of each group, ``[K]``; exact zeros where rewards do not differ."""
    if isinstance(config.reward, WeightedRewardConfig) and config.advantage.rewards == "normalise_each":
        weights: dict[str, float] = {part.reward.type: part.weight for part in config.reward.parts}
        return combined_advantages([group.parts for group in groups], weights, config.advantage)
    return group_advantages([group.rewards for group in groups], config.advantage)


def split(groups: Sequence[TrainingGroup], config: RunConfig, iteration: int) -> list[Update]:
    """Whole groups, shuffled by name, in ``updates_per_iteration`` nearly equal parts."""
    advantages = advantages_of(groups, config)
    order = named_generator("groups", config.rng_seed, iteration).permutation(len(groups))
    parts = np.array_split(order, min(config.optimizer.updates_per_iteration, len(groups)))
    return [
        Update(
            number=number,
            groups=tuple((groups[i], advantages[i]) for i in part if advantages[i].any()),
            samples=sum(len(groups[i].rewards) for i in part),
        )
        for number, part in enumerate(parts)
    ]


def chunks(update: Update, size: int, device: torch.device) -> list[TrainingChunk]:
    """The update's trajectories in group order, cut every ``size`` rows."""
    prompts = [group.prompt for group, _ in update.groups for _ in group.rewards]
    advantages = np.concatenate([advantages for _, advantages in update.groups]).astype(np.float32)
    arrays = _batch_first(update)
    return [
        TrainingChunk(
            prompts=tuple(prompts[start : start + size]),
            advantages_B=torch.from_numpy(advantages[start : start + size].copy()).to(device),
            arrays={
                name: torch.from_numpy(array[start : start + size].copy()).to(device)
                for name, array in arrays.items()
            },
        )
        for start in range(0, len(prompts), size)
    ]


def _batch_first(update: Update) -> Arrays:
    """The groups' arrays one under another, batch first, and ``steps_BT``."""
    groups = [group for group, _ in update.groups]
    arrays = {"x0": np.concatenate([group.arrays["x0"] for group in groups])}
    for name, batch_first in _TIME_FIRST.items():
        if name in groups[0].arrays:
            stacked = np.concatenate([group.arrays[name] for group in groups], axis=1)
            arrays[batch_first] = np.ascontiguousarray(stacked.swapaxes(0, 1))
    if groups[0].sde_steps is not None:
        steps = [np.tile(np.arange(*(group.sde_steps or ())), (len(group.rewards), 1)) for group in groups]
        arrays["steps_BT"] = np.concatenate(steps)
    return arrays
