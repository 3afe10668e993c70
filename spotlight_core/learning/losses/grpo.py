"""Flow-GRPO: clipped policy gradients over the SDE window (arXiv 2505.05470).

``r = exp(logp - logp_old)``, ``L = mean max(-A r, -A clip(r, 1 - low, 1 + high))``, the mean taken
over trajectories and trained steps.  Log-probabilities are means over dimensions, so clip ranges
are small numbers.

Shape legend: B batch, S sequence, C channel, T trained denoise steps.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch

from spotlight_core.config import GrpoConfig
from spotlight_core.diffusion.model import DiffusionModel
from spotlight_core.diffusion.samplers.flow_sde import FlowSdeSampler
from spotlight_core.errors import TrainingError
from spotlight_core.learning.losses.base import LossPart, TrainingChunk, frozen_copy


def clipped_loss(
    ratio_B: torch.Tensor, advantages_B: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """The pessimistic surrogate of PPO (arXiv 1707.06347, eq. 7), negated: a scalar."""
    unclipped_B = -advantages_B * ratio_B
    clipped_B = -advantages_B * ratio_B.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped_B, clipped_B).mean()


def gaussian_kl(mean_BSC: torch.Tensor, reference_BSC: torch.Tensor, diffusion: float) -> torch.Tensor:
    """``mean((mu - mu_ref)^2) / 2 g^2``: the per-step KL times ``-dt``, a mean over dimensions; a scalar."""
    return ((mean_BSC - reference_BSC) ** 2).mean() / (2.0 * diffusion**2)


class GrpoLoss:
    """The rollout policy is the trained one; a frozen base model is kept when the KL has weight."""

    rollout_label: Literal["old", "current"] = "current"
    needs_log_probs = True

    def __init__(self, model: DiffusionModel, config: GrpoConfig, sampler: FlowSdeSampler) -> None:
        self.parts = len(sampler.trained_steps)
        self._config = config
        self._sampler = sampler
        self._tolerance = min(1e-5, 0.1 * min(config.clip_low, config.clip_high))
        self._reference = frozen_copy(model) if config.kl_weight > 0 else None

    def chunk_parts(
        self, model: DiffusionModel, chunk: TrainingChunk, generator: np.random.Generator, *, on_policy: bool
    ) -> Iterator[LossPart]:
        """One part for each trained denoise step, in the order they were taken.

        Raises:
            TrainingError: on policy, a ratio further from 1 than ``min(1e-5, clip / 10)``.
        """
        text = model.encode(chunk.prompts)
        for index, denoise_step in enumerate(self._sampler.trained_steps):
            x_BSC = chunk.arrays["x_BTSC"][:, index]
            x_next_BSC = chunk.arrays["x_BTSC"][:, index + 1]
            sigma_B = torch.full((len(x_BSC),), float(self._sampler.sigmas[denoise_step]))
            v_BSC = model.velocity(x_BSC, sigma_B, text).float()
            log_prob_B = self._sampler.log_prob(x_BSC, v_BSC, x_next_BSC, denoise_step)
            ratio_B = torch.exp(log_prob_B - chunk.arrays["logp_BT"][:, index])
            metrics = self._ratio_metrics(ratio_B.detach(), denoise_step, on_policy=on_policy)
            loss = clipped_loss(ratio_B, chunk.advantages_B, self._config.clip_low, self._config.clip_high)
            if self._reference is not None:
                kl = self._kl(v_BSC, x_BSC, sigma_B, text, denoise_step)
                loss = loss + self._config.kl_weight * kl
                metrics["train/kl"] = kl.item()
            yield LossPart(loss=loss, metrics=metrics)

    def _ratio_metrics(
        self, ratio_B: torch.Tensor, denoise_step: int, *, on_policy: bool
    ) -> dict[str, float]:
        deviation = (ratio_B - 1.0).abs().max().item()
        if on_policy and deviation > self._tolerance:
            raise TrainingError(
                f"the first ratio is off 1 by {deviation:.2e} at denoise step {denoise_step} "
                f"(limit {self._tolerance:.0e})",
                "rollout and training disagree in precision, guidance or weights: check that all nodes run "
                "this version and the same CPU capability",
            )
        low, high = 1.0 - self._config.clip_low, 1.0 + self._config.clip_high
        clipped = ((ratio_B < low) | (ratio_B > high)).float().mean().item()
        return {"train/clip_fraction": clipped} | (
            {"train/ratio_max_deviation": deviation} if on_policy else {}
        )

    def _kl(
        self,
        v_BSC: torch.Tensor,
        x_BSC: torch.Tensor,
        sigma_B: torch.Tensor,
        text: torch.Tensor,
        denoise_step: int,
    ) -> torch.Tensor:
        assert self._reference is not None
        with torch.no_grad():
            v_reference_BSC = self._reference.velocity(x_BSC, sigma_B, text).float()
            reference_BSC = self._sampler.mean(x_BSC, v_reference_BSC, denoise_step)
        mean_BSC = self._sampler.mean(x_BSC, v_BSC, denoise_step)
        return gaussian_kl(mean_BSC, reference_BSC, self._sampler.diffusion(denoise_step))

    def end_iteration(self, weights: Mapping[str, torch.Tensor], optimizer_steps: int) -> None:
        """Nothing is kept beside the trained policy."""

    def kept_weights(self) -> dict[str, torch.Tensor] | None:
        return None

    def load_kept_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Nothing was kept."""
