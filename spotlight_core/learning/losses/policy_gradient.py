"""What the losses on log-probabilities share: replay of recorded steps, ratios, clipping, KL to the base.

The timesteps of a part are stacked along the batch: rows of the forward are ``[R = timesteps * B]``.

Shape legend: B batch, R stacked rows, S sequence, C channel, T trained denoise steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from spotlight_core.config.learning import PolicyGradientSection
from spotlight_core.diffusion.model import DiffusionModel, TextEmbeddings
from spotlight_core.diffusion.policy import reference_policy
from spotlight_core.diffusion.samplers.sde import SdeSampler
from spotlight_core.learning.losses.base import (
    APPROXIMATE_KL,
    RATIO_DEVIATION,
    LossPart,
    TrainingChunk,
    stacked,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Recorded steps of some timesteps, stacked, and the model's view of them."""

    x_RSC: torch.Tensor
    x_next_RSC: torch.Tensor
    sigma_R: torch.Tensor
    steps_R: torch.Tensor
    text: TextEmbeddings
    v_RSC: torch.Tensor


def clipped_loss(
    ratio_B: torch.Tensor, advantages_B: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """The pessimistic surrogate of PPO (arXiv 1707.06347, eq. 7), negated, of each row: ``[B]``."""
    unclipped_B = -advantages_B * ratio_B
    clipped_B = -advantages_B * ratio_B.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped_B, clipped_B)


class PolicyGradientLoss(ABC):
    """Clipped policy gradients over the SDE window; the rollout policy is the trained one."""

    rollout_label: Literal["old", "current"] = "current"
    needs_log_probs = True

    def __init__(
        self,
        model: DiffusionModel,
        config: PolicyGradientSection,
        sampler: SdeSampler,
        timesteps_per_forward: int,
    ) -> None:
        self.ratio_tolerance = min(1e-5, 0.1 * min(config.clip_low, config.clip_high))
        self._config = config
        self._sampler = sampler
        self._per_forward = timesteps_per_forward
        self._reference = reference_policy(model) if config.kl_weight > 0 else None

    @abstractmethod
    def ratio(self, replay: Replay, chunk: TrainingChunk, part: range) -> torch.Tensor:
        """The ratio of each stacked row, differentiable: ``[R]``."""

    def scale(self, replay: Replay) -> torch.Tensor | float:
        """What multiplies each row's loss."""
        return 1.0

    def anchor_arrays(self, replay: Replay) -> dict[str, torch.Tensor]:
        """What ``ratio`` compares with, of stacked rows, by array name."""
        return {"logp_BT": self.log_prob(replay)}

    # -- Loss -----------------------------------------------------------------------------------------

    def parts(
        self, model: DiffusionModel, chunk: TrainingChunk, generator: np.random.Generator
    ) -> Iterator[LossPart]:
        """One part for every ``timesteps_per_forward`` trained steps, in the order they were taken."""
        text = model.encode(chunk.prompts)
        timesteps = chunk.arrays["steps_BT"].shape[1]
        for part in stacked(timesteps, self._per_forward):
            replay = self._replay(model, chunk, text, part)
            ratio_R = self.ratio(replay, chunk, part)
            advantages_R = chunk.advantages_B.repeat(len(part))
            loss_R = clipped_loss(ratio_R, advantages_R, self._config.clip_low, self._config.clip_high)
            loss_R = loss_R * self.scale(replay) * self._importance(chunk, part)
            metrics = self._ratio_metrics(ratio_R.detach())
            loss = loss_R.mean()
            if self._reference is not None:
                kl = self._kl(replay)
                loss = loss + self._config.kl_weight * kl
                metrics["train/kl"] = kl.item()
            yield LossPart(loss=loss, weight=len(part) / timesteps, metrics=metrics)

    @torch.no_grad()
    def anchors(self, model: DiffusionModel, chunk: TrainingChunk) -> dict[str, torch.Tensor]:
        text, rows = model.encode(chunk.prompts), len(chunk.prompts)
        found: dict[str, list[torch.Tensor]] = {}
        for part in stacked(chunk.arrays["steps_BT"].shape[1], self._per_forward):
            for name, array in self.anchor_arrays(self._replay(model, chunk, text, part)).items():
                found.setdefault(name, []).append(
                    array.reshape(len(part), rows, *array.shape[1:]).transpose(0, 1)
                )
        return {name: torch.cat(parts, dim=1).contiguous() for name, parts in found.items()}

    def end_iteration(self, weights: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:  # noqa: B027 (a hook)
        """Nothing is kept beside the trained policy."""

    def copies(self) -> list[nn.Module]:
        copied = None if self._reference is None else self._reference.copied
        return [] if copied is None else [copied]

    def kept_weights(self) -> dict[str, torch.Tensor] | None:
        return None

    # -- the terms ------------------------------------------------------------------------------------

    def log_prob(self, replay: Replay) -> torch.Tensor:
        return self._sampler.log_prob(replay.x_RSC, replay.v_RSC, replay.x_next_RSC, replay.steps_R)

    def _replay(
        self, model: DiffusionModel, chunk: TrainingChunk, text: TextEmbeddings, part: range
    ) -> Replay:
        columns = list(part)
        rows_R = torch.arange(len(chunk.prompts)).repeat(len(part))
        x_RSC = stack(chunk.arrays["x_BTSC"], columns)
        steps_R = stack(chunk.arrays["steps_BT"], columns)
        sigma_R = torch.from_numpy(self._sampler.sigmas)[steps_R.cpu()].to(x_RSC.device)
        text_R = text.rows(rows_R) if len(part) > 1 else text
        return Replay(
            x_RSC=x_RSC,
            x_next_RSC=stack(chunk.arrays["x_BTSC"], [column + 1 for column in columns]),
            sigma_R=sigma_R,
            steps_R=steps_R,
            text=text_R,
            v_RSC=model.velocity(x_RSC, sigma_R, text_R),
        )

    def _importance(self, chunk: TrainingChunk, part: range) -> torch.Tensor | float:
        """``min(exp(logp_old - logp_rollout), cap)`` (truncated importance sampling) where the trainer
        computed the old log-probabilities again and the recipe asks for the correction."""
        rollout_BT = chunk.arrays.get("rollout_logp_BT")
        if self._config.importance_correction == "none" or rollout_BT is None:
            return 1.0
        difference_BT = chunk.arrays["logp_BT"] - rollout_BT
        return stack(difference_BT, list(part)).exp().clamp(max=self._config.importance_cap)

    def _ratio_metrics(self, ratio_R: torch.Tensor) -> dict[str, float]:
        low, high = 1.0 - self._config.clip_low, 1.0 + self._config.clip_high
        return {
            "train/clip_fraction": ((ratio_R < low) | (ratio_R > high)).float().mean().item(),
            RATIO_DEVIATION: (ratio_R - 1.0).abs().max().item(),
            APPROXIMATE_KL: (0.5 * ratio_R.log() ** 2).mean().item(),
        }

    def _kl(self, replay: Replay) -> torch.Tensor:
        """``mean((mu - mu_ref)²) / 2 std²``, a mean over dimensions; ``per_time`` multiplies by ``-dt``."""
        assert self._reference is not None
        v_reference_RSC = self._reference.velocity(replay.x_RSC, replay.sigma_R, replay.text)
        reference_RSC = self._sampler.mean(replay.x_RSC, v_reference_RSC, replay.steps_R)
        mean_RSC = self._sampler.mean(replay.x_RSC, replay.v_RSC, replay.steps_R)
        variance_R11 = self._sampler.std(replay.steps_R, mean_RSC) ** 2
        if self._config.kl_form == "per_time":
            variance_R11 = variance_R11 / self._sampler.time(replay.steps_R, mean_RSC)
        return ((mean_RSC - reference_RSC) ** 2 / (2.0 * variance_R11)).mean()


def stack(array_BT: torch.Tensor, columns: list[int]) -> torch.Tensor:
    """Columns one under another: ``[B, T, ...]`` to ``[len(columns) * B, ...]``."""
    return array_BT[:, columns].transpose(0, 1).flatten(0, 1)
