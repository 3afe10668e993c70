"""The policy trainer: one iteration's groups in, updated weights and metrics out.

Bits depend on the recipe, the groups in their order, the thread count and the number of ranks; never on
arrival order, wall time or a global generator.  Every draw comes from a generator named by run seed,
iteration, update and chunk, so an interrupted and resumed run ends bit-identical.

With several ranks each has a trainer of its own over its shards of the weights, all are given the same
groups, and every method is called on all of them.  Chunk i of an update is rank i's, modulo their
number; all that is decided from losses is decided from the losses of all chunks in order.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from spotlight_core.config import RunConfig
from spotlight_core.diffusion.model import DiffusionModel
from spotlight_core.diffusion.policy import policy_parameters, policy_weights
from spotlight_core.errors import BadInputError, TrainingError
from spotlight_core.learning.advantage import has_variance
from spotlight_core.learning.ema import WeightAverage
from spotlight_core.learning.losses import build_loss
from spotlight_core.learning.losses.base import APPROXIMATE_KL, RATIO_DEVIATION, TrainingChunk
from spotlight_core.learning.sharding import Ranks, local
from spotlight_core.learning.trainer_state import load_tensors, save_tensors, stored_tensors
from spotlight_core.learning.updates import TrainingGroup, Update, chunks, split
from spotlight_core.philox import named_generator

LOG = logging.getLogger(__name__)
MAX_NON_FINITE_IN_A_ROW = 3
LOSS = "train/loss"
RECOMPUTED = "train/old_log_probs_recomputed"
STATE = ("exp_avg", "exp_avg_sq")  # AdamW's moments of a parameter
Seen = dict[str, list[float]]


@dataclass(slots=True, kw_only=True)
class _Pass:
    """A chunk of this rank; ``share`` is its part of the update's mean.

    A rank without a chunk left repeats one with a share of 0, since the others' collectives need it.
    """

    number: int
    chunk: TrainingChunk
    share: float


@dataclass(slots=True, kw_only=True)
class _Iteration:
    """The updates of an iteration as this rank sees them, and what all of them measured so far."""

    number: int
    updates: list[Update]
    passes: list[list[_Pass]]
    chunks: list[int]
    seen: Seen = field(default_factory=lambda: defaultdict(list))
    on_policy: bool = True
    recomputed: bool = False


class PolicyTrainer:
    """Owns the trained policy, its EMA, the loss's own policies and the optimizer."""

    def __init__(self, model: DiffusionModel, config: RunConfig, ranks: Ranks | None = None) -> None:
        """``model`` is trained in place and must not be shared with a rollout.

        Raises:
            BadInputError: the model is not on the recipe's device.
        """
        self.model = model
        self.ranks = ranks or Ranks()
        self._config = config
        self._device = _device(model, config.trainer.device)
        sigmas = model.sigmas(config.sampler.denoise_steps, config.sampler.shift)
        self._loss = build_loss(model, config, sigmas)
        self.ranks.shard([model.transformer, *self._loss.copies()])
        self.rollout_label: Literal["old", "current"] = self._loss.rollout_label
        self._parameters = policy_parameters(model.transformer)
        self._count = sum(parameter.numel() for parameter in self._parameters.values())
        self._ema = WeightAverage(self._weights(), config.ema)
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
        """One iteration's updates; returns ``train/*`` metrics, the same on every rank.

        Raises:
            TrainingError: three non-finite updates in a row.
        """
        torch.set_num_threads(self._config.services.torch_threads)
        work = self._shared_out(split(groups, self._config, iteration), iteration)
        for update in work.updates:
            if not work.passes[update.number]:
                # AdamW would still apply momentum and weight decay to a gradient of zero.
                work.seen["train/skipped_updates"].append(1.0)
                continue
            self._update(update, work)
            if self._past_ceiling(work):
                break
        self._loss.end_iteration(self._weights(), self.optimizer_steps)
        return _summary(groups, work.seen)

    def _shared_out(self, updates: list[Update], iteration: int) -> _Iteration:
        """This rank's passes of each update: as many as every other rank's."""
        size, ranks = self._config.optimizer.samples_per_forward, self.ranks
        passes, counts = [], []
        for update in updates:
            cut = chunks(update, size, self._device) if update.groups else []
            mine = [
                _Pass(number=number, chunk=chunk, share=len(chunk.prompts) / update.samples)
                for number, chunk in enumerate(cut)
                if number % ranks.size == ranks.rank
            ]
            if len(mine) < math.ceil(len(cut) / ranks.size):
                mine.append(_Pass(number=0, chunk=cut[0], share=0.0))
            passes.append(mine)
            counts.append(len(cut))
        return _Iteration(number=iteration, updates=updates, passes=passes, chunks=counts)

    def _update(self, update: Update, work: _Iteration) -> None:
        """One optimizer step, or a non-finite one skipped."""
        check = work.on_policy and self._loss.needs_log_probs and not work.recomputed
        if check and self._config.model.rollout_dtype != self._config.model.training_dtype:
            self._recompute_anchors(work)
        found = self._backward(update, work)
        if check and not work.recomputed:
            deviation = max(found[RATIO_DEVIATION])
            work.seen[RATIO_DEVIATION].append(deviation)
            if not deviation <= self._loss.ratio_tolerance:
                self._recompute_anchors(work)
                found = self._backward(update, work)
        found.pop(RATIO_DEVIATION, None)
        loss, norm = sum(found[LOSS]), self._clipped_norm()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._skip_non_finite(work, loss, norm)
            return
        work.on_policy = False
        measured = {name: float(np.mean(values)) for name, values in found.items()}
        measured |= {LOSS: loss, "train/grad_norm": norm, "train/grad_rms": norm / math.sqrt(self._count)}
        measured["train/lr"] = self._step()
        for name, value in measured.items():
            work.seen[name].append(value)

    def _backward(self, update: Update, work: _Iteration) -> Seen:
        """Accumulate the gradients of the update's mean loss; returns what each part of each chunk
        measured, in the order of chunks, with its share of the loss among it."""
        self._optimizer.zero_grad(set_to_none=True)
        rows: list[list[dict[str, float]]] = []
        for turn in work.passes[update.number]:
            names = (self._config.rng_seed, work.number, update.number, turn.number)
            rows.append([])
            for part in self._loss.parts(self.model, turn.chunk, named_generator("train", *names)):
                weighted = part.loss * (turn.share * part.weight)
                weighted.backward()
                rows[-1].append({LOSS: weighted.item(), **part.metrics})
        names_of = sorted(rows[0][0])
        mine = torch.tensor(
            [[[part[name] for name in names_of] for part in parts] for parts in rows], dtype=torch.float64
        )
        # [ranks, passes, parts, names]: pass p of rank r was chunk p * ranks + r.
        table = self.ranks.gather(mine).transpose(0, 1).flatten(0, 1)[: work.chunks[update.number]]
        columns = table.flatten(0, 1).T.tolist()
        return dict(zip(names_of, columns, strict=True))

    def _clipped_norm(self) -> float:
        """The gradients' norm before they were clipped to ``max_grad_norm``."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = self.ranks.norm(gradients)
        # As torch's own clip_grad_norm_, which would take a collective for every gradient.
        scale = torch.clamp(self._config.optimizer.max_grad_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            local(gradient).mul_(scale.to(gradient.device))
        return norm.item()

    def _step(self) -> float:
        """Move the weights and their average; the learning rate, which rises linearly over the warm-up."""
        optimizer = self._config.optimizer
        lr = optimizer.lr * min((self.optimizer_steps + 1) / max(optimizer.warmup_steps, 1), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._non_finite_in_a_row = 0
        self._ema.update(self._weights(), self.optimizer_steps)
        self.optimizer_steps += 1
        return lr

    def _recompute_anchors(self, work: _Iteration) -> None:
        """Put the trainer's own old log-probabilities in the place of the rollout's, in all updates.

        Rollout and training disagree in precision, batch shape or hardware; ratios that do not begin at
        1 would train on that difference.
        """
        largest = 0.0
        for turn in (turn for passes in work.passes for turn in passes):
            arrays, anchors = turn.chunk.arrays, self._loss.anchors(self.model, turn.chunk)
            difference_BT = anchors["logp_BT"] - arrays["logp_BT"]
            largest = max(largest, (difference_BT.exp() - 1.0).abs().max().item())
            rollout = {"rollout_logp_BT": arrays["logp_BT"]}
            turn.chunk = replace(turn.chunk, arrays={**arrays, **rollout, **anchors})
        largest = self.ranks.gather(torch.tensor(largest, dtype=torch.float64)).max().item()
        work.recomputed = True
        work.seen[RECOMPUTED].append(1.0)
        if not work.seen[RATIO_DEVIATION]:
            work.seen[RATIO_DEVIATION].append(largest)
        if self.ranks.rank == 0:
            LOG.warning(
                "iteration %d: the first ratio is off 1 by %.2e (limit %.0e): old log-probabilities are "
                "computed again in the trainer",
                work.number,
                work.seen[RATIO_DEVIATION][0],
                self._loss.ratio_tolerance,
            )

    def _past_ceiling(self, work: _Iteration) -> bool:
        """Whether the last update's mean KL forbids further ones."""
        ceiling, measured = self._config.optimizer.kl_ceiling, work.seen[APPROXIMATE_KL]
        if ceiling is None or not measured or measured[-1] <= ceiling:
            return False
        if self.ranks.rank == 0:
            LOG.warning("iteration %d: KL %.2e is above the ceiling", work.number, measured[-1])
        work.seen["train/stopped_early"].append(1.0)
        return True

    def _skip_non_finite(self, work: _Iteration, loss: float, norm: float) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        work.seen["train/non_finite_updates"].append(1.0)
        self._non_finite_in_a_row += 1
        if self._non_finite_in_a_row >= MAX_NON_FINITE_IN_A_ROW:
            raise TrainingError(
                f"{MAX_NON_FINITE_IN_A_ROW} updates in a row were not finite "
                f"(iteration {work.number}, loss {loss}, gradient norm {norm})",
                "lower optimizer.lr, or resume from an earlier checkpoint",
            )

    # -- weights and state --------------------------------------------------------------------------

    def _weights(self) -> dict[str, torch.Tensor]:
        return policy_weights(self.model.transformer)

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """The weights under training; whole copies, on the first rank (as of all weights)."""
        return self.ranks.full(self._weights())

    def rollout_weights(self) -> dict[str, torch.Tensor]:
        """What rolls out and explores next: the old policy (nft) or the trained one (grpo); copies."""
        return self.ranks.full(self._loss.kept_weights() or self._weights())

    def ema_weights(self) -> dict[str, torch.Tensor]:
        """What is evaluated and exported; copies."""
        return self.ranks.full(self._ema.weights)

    def save(self, folder: Path) -> None:
        """Write everything that a resumed trainer needs into ``folder``, which must be empty or new."""
        save_tensors(self._state(), folder, self.ranks)

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, also under another number of ranks.

        Raises:
            TrainingError: the state was written under another loss or model; do not train on after it.
        """
        stored = stored_tensors(folder)
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            if f"adam.{STATE[0]}.{name}" in stored:
                moments = {moment: torch.zeros_like(parameter.detach()) for moment in STATE}
                self._optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}
        tensors = self._state()
        load_tensors(tensors, folder)
        self.optimizer_steps, self._non_finite_in_a_row = (int(count) for count in tensors["counters"])
        steps = dict(zip(sorted(self._parameters), tensors["adam.steps"].tolist(), strict=True))
        for name, parameter in self._parameters.items():
            if parameter in self._optimizer.state:
                self._optimizer.state[parameter]["step"].fill_(float(steps[name]))

    def close(self) -> None:
        """End the process group of several ranks."""
        self.ranks.leave()

    def _state(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint by flat name, not copied, and the counters among them."""
        kept = self._loss.kept_weights() or {}
        tensors = {f"raw.{name}": tensor for name, tensor in self._weights().items()}
        tensors |= {f"ema.{name}": tensor for name, tensor in self._ema.weights.items()}
        tensors |= {f"old.{name}": tensor for name, tensor in kept.items()}
        steps = dict.fromkeys(sorted(self._parameters), 0)
        for name, parameter in self._parameters.items():
            state = self._optimizer.state.get(parameter, {})
            tensors |= {f"adam.{moment}.{name}": state[moment] for moment in STATE if state}
            steps[name] = int(state["step"]) if state else 0
        tensors["adam.steps"] = torch.tensor(list(steps.values()), dtype=torch.int64)
        counters = [self.optimizer_steps, self._non_finite_in_a_row]
        tensors["counters"] = torch.tensor(counters, dtype=torch.int64)
        return tensors


def _device(model: DiffusionModel, wanted: str) -> torch.device:
    """Where the model has placed itself."""
    device = next(model.transformer.parameters()).device
    if wanted not in ("auto", device.type):
        raise BadInputError(
            f"trainer.device = {wanted!r} and the model is on {device.type!r}",
            "hide the GPUs with CUDA_VISIBLE_DEVICES='' or set trainer.device = 'auto'",
        )
    return device


_COUNTED = ("train/skipped_updates", "train/non_finite_updates", RECOMPUTED, "train/stopped_early")


def _summary(groups: Sequence[TrainingGroup], seen: Mapping[str, list[float]]) -> dict[str, float]:
    rewards = np.concatenate([group.rewards for group in groups])
    metrics = {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(np.mean([np.std(group.rewards) for group in groups])),
        "train/zero_variance_groups": float(sum(not has_variance(group.rewards) for group in groups)),
    }
    metrics |= {name: float(len(seen.get(name, ()))) for name in _COUNTED}
    for name in (LOSS, "train/grad_norm", "train/grad_rms"):
        metrics[name] = 0.0
    for name, values in seen.items():
        if name not in _COUNTED and values:
            metrics[name] = float(max(values) if name == RATIO_DEVIATION else np.mean(values))
    return metrics
