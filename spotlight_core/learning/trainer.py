"""The policy trainer: one iteration's groups in, updated weights and metrics out.

Bits depend on the recipe, the groups in their order, and the thread count; never on arrival order,
wall time or a global generator.  Every draw comes from a generator named by run seed, iteration,
update and chunk, so an interrupted and resumed run ends bit-identical.

Shape legend: B batch, S sequence, C channel, K trajectories of a group, T trained denoise steps.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from spotlight_core.config import FlowSdeConfig, GrpoConfig, RunConfig
from spotlight_core.diffusion.engine import Arrays
from spotlight_core.diffusion.model import DiffusionModel
from spotlight_core.diffusion.samplers import build_flow_sde, build_sampler
from spotlight_core.errors import BadInputError, TrainingError
from spotlight_core.learning.advantage import group_advantages, has_variance
from spotlight_core.learning.ema import WeightAverage
from spotlight_core.learning.losses.base import Loss, TrainingChunk
from spotlight_core.learning.losses.grpo import GrpoLoss
from spotlight_core.learning.losses.nft import NftLoss
from spotlight_core.philox import named_generator

MAX_NON_FINITE_IN_A_ROW = 3
_WORST = ("train/ratio_max_deviation",)  # metrics whose largest value counts, not the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingGroup:
    """The K trajectories of one prompt occurrence, as rolled out.

    ``rewards`` ``[K]``; ``arrays`` as in ``Generated`` with rows in the same order: ``x0``
    ``[K, S, C]`` and, for losses with log-probabilities, ``x_TBSC`` ``[T + 1, K, S, C]`` and
    ``logp_TB`` ``[T, K]``.
    """

    prompt: str
    rewards: np.ndarray
    arrays: Arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """The groups of one optimizer step; ``samples`` counts the constant groups too."""

    number: int
    groups: tuple[tuple[TrainingGroup, np.ndarray], ...]
    samples: int


def build_loss(model: DiffusionModel, config: RunConfig) -> Loss:
    """The recipe's loss; BadInputError for a pair with the sampler that has no log-probabilities."""
    if not isinstance(config.loss, GrpoConfig):
        sigmas = build_sampler(config.sampler).sigmas
        return NftLoss(model, config.loss, sigmas, config.advantage.clip)
    if not isinstance(config.sampler, FlowSdeConfig):
        raise BadInputError("loss grpo needs log-probabilities", "set sampler.type = 'flow_sde'")
    return GrpoLoss(model, config.loss, build_flow_sde(config.sampler))


class PolicyTrainer:
    """Owns the trained policy (``model.transformer``), its EMA, the loss's own policies and the optimizer."""

    def __init__(self, model: DiffusionModel, config: RunConfig) -> None:
        """``model`` is trained in place and must not be shared with a rollout."""
        self.model = model
        self._config = config
        self._loss = build_loss(model, config)
        self.rollout_label: Literal["old", "current"] = self._loss.rollout_label
        self._ema = WeightAverage(model.transformer.state_dict(), config.ema)
        self._parameters = dict(model.transformer.named_parameters())
        optimizer = config.optimizer
        self._optimizer = torch.optim.AdamW(
            list(self._parameters.values()),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        self.optimizer_steps = 0
        self._non_finite_in_a_row = 0

    # -- training -----------------------------------------------------------------------------------

    def train(self, groups: Sequence[TrainingGroup], iteration: int) -> dict[str, float]:
        """One iteration's updates; returns ``train/*`` metrics.

        Raises:
            TrainingError: three non-finite updates in a row, or a first ratio that is not 1.
        """
        torch.set_num_threads(self._config.services.torch_threads)
        seen: dict[str, list[float]] = defaultdict(list)
        on_policy = True
        for update in self._split(groups, iteration):
            stepped = self._update(update, iteration, seen, on_policy=on_policy)
            on_policy = on_policy and not stepped
        self._loss.end_iteration(self.model.transformer.state_dict(), self.optimizer_steps)
        return _summary(groups, seen)

    def _split(self, groups: Sequence[TrainingGroup], iteration: int) -> list[_Update]:
        """Whole groups, shuffled by name, in ``updates_per_iteration`` nearly equal parts."""
        advantages = group_advantages([group.rewards for group in groups], self._config.advantage)
        order = named_generator("groups", self._config.rng_seed, iteration).permutation(len(groups))
        parts = np.array_split(order, min(self._config.optimizer.updates_per_iteration, len(groups)))
        return [
            _Update(
                number=number,
                groups=tuple((groups[i], advantages[i]) for i in part if has_variance(groups[i].rewards)),
                samples=sum(len(groups[i].rewards) for i in part),
            )
            for number, part in enumerate(parts)
        ]

    def _update(
        self, update: _Update, iteration: int, seen: dict[str, list[float]], *, on_policy: bool
    ) -> bool:
        """One optimizer step; False when it was skipped."""
        if not update.groups:
            # AdamW would still apply momentum and weight decay to a gradient of zero.
            seen["train/skipped_updates"].append(1.0)
            return False
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._backward(update, iteration, seen, on_policy=on_policy)
        limit = self._config.optimizer.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip_non_finite(iteration, loss, norm)
            seen["train/non_finite_updates"].append(1.0)
            return False
        self._non_finite_in_a_row = 0
        self._optimizer.step()
        self._ema.update(self.model.transformer.state_dict(), self.optimizer_steps)
        self.optimizer_steps += 1
        count = sum(parameter.numel() for parameter in self._parameters.values())
        seen["train/loss"].append(loss)
        seen["train/grad_norm"].append(norm)
        seen["train/grad_rms"].append(norm / math.sqrt(count))
        return True

    def _backward(
        self, update: _Update, iteration: int, seen: dict[str, list[float]], *, on_policy: bool
    ) -> float:
        """Accumulate the gradients of the update's mean loss; returns that loss."""
        total = 0.0
        for number, chunk in enumerate(
            _chunks(update, self._config.optimizer.samples_per_forward, self._loss)
        ):
            generator = named_generator("train", self._config.rng_seed, iteration, update.number, number)
            # Constant groups count in the mean: leaving them out would raise the step size of the rest.
            share = len(chunk.prompts) / update.samples / self._loss.parts
            for part in self._loss.chunk_parts(self.model, chunk, generator, on_policy=on_policy):
                weighted = part.loss * share
                weighted.backward()
                total += weighted.item()
                for name, value in part.metrics.items():
                    seen[name].append(value)
        return total

    def _skip_non_finite(self, iteration: int, loss: float, norm: float) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._non_finite_in_a_row += 1
        if self._non_finite_in_a_row >= MAX_NON_FINITE_IN_A_ROW:
            raise TrainingError(
                f"{MAX_NON_FINITE_IN_A_ROW} updates in a row were not finite "
                f"(iteration {iteration}, loss {loss}, gradient norm {norm})",
                "lower optimizer.lr, or resume from an earlier checkpoint",
            )

    # -- weights and state --------------------------------------------------------------------------

    def rollout_weights(self) -> dict[str, torch.Tensor]:
        """What rolls out and explores next: the old policy (nft) or the trained one (grpo); copies."""
        return _copies(self._loss.kept_weights() or self.model.transformer.state_dict())

    def ema_weights(self) -> dict[str, torch.Tensor]:
        """What is evaluated and exported; copies."""
        return _copies(self._ema.weights)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything a resumed trainer needs, as copies under flat names for one safetensors file."""
        kept = self._loss.kept_weights() or {}
        tensors = {f"raw.{name}": tensor for name, tensor in self.model.transformer.state_dict().items()}
        tensors |= {f"ema.{name}": tensor for name, tensor in self._ema.weights.items()}
        tensors |= {f"old.{name}": tensor for name, tensor in kept.items()}
        for name, parameter in self._parameters.items():
            for moment, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"adam.{moment}.{name}"] = value
        counters = [self.optimizer_steps, self._non_finite_in_a_row]
        tensors["counters"] = torch.tensor(counters, dtype=torch.int64)
        return _copies(tensors)

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore ``state_tensors``.

        Raises:
            TrainingError: the state was written under another loss or model.
        """
        expected = {name for name in self.state_tensors() if not name.startswith("adam.")}
        found = {name for name in tensors if not name.startswith("adam.")}
        if expected != found:
            differing = sorted(expected ^ found)[0]
            raise TrainingError(
                f"the checkpoint does not fit this recipe (tensor {differing!r})",
                "resume with the recipe the run was started with",
            )
        self.model.transformer.load_state_dict(_under("raw.", tensors), strict=True)
        self._ema.load(_under("ema.", tensors))
        self._loss.load_kept_weights(_under("old.", tensors))
        self.optimizer_steps, self._non_finite_in_a_row = (int(count) for count in tensors["counters"])
        self._optimizer.state.clear()
        for moment in ("step", "exp_avg", "exp_avg_sq"):
            for name, value in _under(f"adam.{moment}.", tensors).items():
                self._optimizer.state[self._parameters[name]][moment] = value.clone()


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _chunks(update: _Update, size: int, loss: Loss) -> list[TrainingChunk]:
    """The update's trajectories in group order, cut every ``size`` rows."""
    prompts = [group.prompt for group, _ in update.groups for _ in group.rewards]
    advantages = np.concatenate([advantages for _, advantages in update.groups]).astype(np.float32)
    arrays = {"x0": np.concatenate([group.arrays["x0"] for group, _ in update.groups])}
    if loss.needs_log_probs:
        for name, batch_first in (("x_TBSC", "x_BTSC"), ("logp_TB", "logp_BT")):
            stacked = np.concatenate([group.arrays[name] for group, _ in update.groups], axis=1)
            arrays[batch_first] = np.ascontiguousarray(stacked.swapaxes(0, 1))
    return [
        TrainingChunk(
            prompts=tuple(prompts[start : start + size]),
            advantages_B=torch.from_numpy(advantages[start : start + size].copy()),
            arrays={
                name: torch.from_numpy(array[start : start + size].copy()) for name, array in arrays.items()
            },
        )
        for start in range(0, len(prompts), size)
    ]


def _summary(groups: Sequence[TrainingGroup], seen: Mapping[str, list[float]]) -> dict[str, float]:
    rewards = np.concatenate([group.rewards for group in groups])
    metrics = {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(np.mean([np.std(group.rewards) for group in groups])),
        "train/zero_variance_groups": float(sum(not has_variance(group.rewards) for group in groups)),
        "train/skipped_updates": float(len(seen.get("train/skipped_updates", ()))),
        "train/non_finite_updates": float(len(seen.get("train/non_finite_updates", ()))),
    }
    for name in ("train/loss", "train/grad_norm", "train/grad_rms"):
        metrics[name] = 0.0
    for name, values in seen.items():
        if name not in ("train/skipped_updates", "train/non_finite_updates"):
            metrics[name] = float(max(values) if name in _WORST else np.mean(values))
    return metrics
