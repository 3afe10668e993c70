"""DiffusionNFT: forward-process RL from final images alone (arXiv 2509.16117, alg. 1 and its code).

With ``x_t = (1 - t) x0 + t eps``, an implicit positive and a negative policy::

    v+ = beta v + (1 - beta) v_old        v- = (1 + beta) v_old - beta v

each predicts ``x0 = x_t - t v``; rewards say how much to match the sample with the one or the other.

Shape legend: B batch, S sequence, C channel, N noise levels of the chunk.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from torch import nn

from spotlight_core.config import NftConfig
from spotlight_core.diffusion.model import DiffusionModel, TextEmbeddings
from spotlight_core.diffusion.policy import kept_policy, reference_policy
from spotlight_core.learning.losses.base import APPROXIMATE_KL, LossPart, TrainingChunk, stacked

WEIGHT_FLOOR = 1e-5


def nft_loss(
    v_BSC: torch.Tensor,
    v_old_BSC: torch.Tensor,
    x_t_BSC: torch.Tensor,
    x0_BSC: torch.Tensor,
    t_B: torch.Tensor,
    advantages_B: torch.Tensor,
    *,
    beta: float,
    max_advantage: float,
) -> torch.Tensor:
    """``A_max mean[(q l+ + (1 - q) l-) / beta]`` with ``q = clip(A / 2 A_max + 1/2, 0, 1)``; a scalar."""
    q_B = (advantages_B / (2.0 * max_advantage) + 0.5).clamp(0.0, 1.0)
    positive_B = _matching_loss(beta * v_BSC + (1 - beta) * v_old_BSC, x_t_BSC, x0_BSC, t_B)
    negative_B = _matching_loss((1 + beta) * v_old_BSC - beta * v_BSC, x_t_BSC, x0_BSC, t_B)
    return max_advantage * ((q_B * positive_B + (1 - q_B) * negative_B) / beta).mean()


def _matching_loss(
    v_BSC: torch.Tensor, x_t_BSC: torch.Tensor, x0_BSC: torch.Tensor, t_B: torch.Tensor
) -> torch.Tensor:
    """``mean((x0_hat - x0)^2) / stopgrad(mean |x0_hat - x0|)`` of each row.

    The weight is taken in fp64: near 0 its floor would be lost in fp32 rounding.
    """
    error_BD = (x_t_BSC - t_B[:, None, None] * v_BSC - x0_BSC).flatten(1)
    weight_B = error_BD.detach().double().abs().mean(1).clamp(min=WEIGHT_FLOOR)
    return (error_BD**2).mean(1) / weight_B.to(error_BD.dtype)


def old_policy_decay(kind: Literal[0, 1, 2], optimizer_steps: int) -> float:
    """How much of the old policy stays after ``n`` optimizer steps of the run.

    Kind 0: nothing.  Kind 1: ``min(.001 n, .5)``.  Kind 2: 0 up to step 75, then
    ``min(.0075 (n - 75), .999)``.
    """
    if kind == 0:
        return 0.0
    if kind == 1:
        return min(0.001 * optimizer_steps, 0.5)
    return min(0.0075 * max(optimizer_steps - 75, 0), 0.999)


class NftLoss:
    """Keeps the old policy, which rolls out and explores, and knows the base model when it weighs in."""

    rollout_label: Literal["old", "current"] = "old"
    needs_log_probs = False
    ratio_tolerance = math.inf

    def __init__(
        self,
        model: DiffusionModel,
        config: NftConfig,
        sigmas: np.ndarray,
        *,
        max_advantage: float,
        timesteps_per_forward: int,
    ) -> None:
        """``sigmas`` is the rollout's noise schedule: training noise levels are its own timesteps."""
        self._config = config
        self._levels = sigmas[:-1]
        self._max_advantage = max_advantage
        self._per_forward = timesteps_per_forward
        self._old = kept_policy(model)
        self._reference = reference_policy(model) if config.kl_weight > 0 else None

    def parts(
        self, model: DiffusionModel, chunk: TrainingChunk, generator: np.random.Generator
    ) -> Iterator[LossPart]:
        """Training noise levels, permuted per trajectory, ``timesteps_per_forward`` in each part."""
        x0_BSC = chunk.arrays["x0"]
        text, timesteps = model.encode(chunk.prompts), self._config.timesteps_per_sample
        levels_BN = generator.permuted(np.tile(self._levels, (len(x0_BSC), 1)), axis=1)
        for part in stacked(timesteps, self._per_forward):
            levels_R = levels_BN[:, list(part)].T.reshape(-1)
            t_R = torch.from_numpy(np.ascontiguousarray(levels_R)).to(x0_BSC)
            # One level after another: what is drawn does not depend on how many are stacked.
            noise = [generator.standard_normal(tuple(x0_BSC.shape), dtype=np.float32) for _ in part]
            noise_RSC = torch.from_numpy(np.concatenate(noise)).to(x0_BSC)
            rows_R = torch.arange(len(x0_BSC)).repeat(len(part))
            x0_RSC = x0_BSC[rows_R]
            x_t_RSC = (1 - t_R[:, None, None]) * x0_RSC + t_R[:, None, None] * noise_RSC
            text_R = text.rows(rows_R) if len(part) > 1 else text
            loss, metrics = self._loss(model, chunk.advantages_B[rows_R], x0_RSC, x_t_RSC, t_R, text_R)
            yield LossPart(loss=loss, weight=len(part) / timesteps, metrics=metrics)

    def _loss(
        self,
        model: DiffusionModel,
        advantages_B: torch.Tensor,
        x0_BSC: torch.Tensor,
        x_t_BSC: torch.Tensor,
        t_B: torch.Tensor,
        text: TextEmbeddings,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        v_old_BSC = self._old.velocity(x_t_BSC, t_B, text)
        v_BSC = model.velocity(x_t_BSC, t_B, text)
        loss = nft_loss(
            v_BSC,
            v_old_BSC,
            x_t_BSC,
            x0_BSC,
            t_B,
            advantages_B,
            beta=self._config.beta,
            max_advantage=self._max_advantage,
        )
        metrics = {APPROXIMATE_KL: ((v_BSC.detach() - v_old_BSC) ** 2).mean().item()}
        if self._reference is None:
            return loss, metrics
        distance = ((v_BSC - self._reference.velocity(x_t_BSC, t_B, text)) ** 2).mean()
        return loss + self._config.kl_weight * distance, metrics | {"train/kl": distance.item()}

    def anchors(self, model: DiffusionModel, chunk: TrainingChunk) -> dict[str, torch.Tensor]:
        return {}

    @torch.no_grad()
    def end_iteration(self, weights: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:
        """``old <- eta old + (1 - eta) v``, once per iteration."""
        eta = old_policy_decay(self._config.old_decay, optimizer_steps)
        for name, old in self._old.weights().items():
            old.mul_(eta).add_(weights[name].detach(), alpha=1.0 - eta)

    def copies(self) -> list[nn.Module]:
        others = [self._old.copied] + ([] if self._reference is None else [self._reference.copied])
        return [transformer for transformer in others if transformer is not None]

    def kept_weights(self) -> dict[str, torch.Tensor] | None:
        return self._old.weights()
