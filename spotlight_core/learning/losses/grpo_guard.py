"""GRPO-Guard: ratios that mean the same at every denoise step (arXiv 2510.22319).

``r = exp((logp - logp_old + b) S)`` with ``b = mean((mu - mu_old)²) / 2 S²``.  Written out with
``x' = mu_old + S xi`` that is ``exp(mean((mu - mu_old) xi))``: this form is computed, since the
difference of two log-probabilities loses the signal in fp32 at a clip range of 2e-6.  The loss is
divided by ``-dt``.
"""

import torch

from spotlight_core.learning.losses.base import TrainingChunk
from spotlight_core.learning.losses.policy_gradient import PolicyGradientLoss, Replay, stack


class GrpoGuardLoss(PolicyGradientLoss):
    """Needs the rollout's means (``mean_BTSC``) beside its log-probabilities."""

    def ratio(self, replay: Replay, chunk: TrainingChunk, part: range) -> torch.Tensor:
        old_RSC = stack(chunk.arrays["mean_BTSC"], list(part))
        mean_RSC = self._sampler.mean(replay.x_RSC, replay.v_RSC, replay.steps_R)
        noise_RSC = (replay.x_next_RSC - old_RSC) / self._sampler.std(replay.steps_R, mean_RSC)
        exponent_R = ((mean_RSC - old_RSC) * noise_RSC).flatten(1).mean(1)
        return exponent_R.double().exp()  # near 1, fp32 has only some twenty numbers within the clip range

    def scale(self, replay: Replay) -> torch.Tensor:
        return 1.0 / self._sampler.time(replay.steps_R, replay.x_RSC).flatten()

    def anchor_arrays(self, replay: Replay) -> dict[str, torch.Tensor]:
        mean_RSC = self._sampler.mean(replay.x_RSC, replay.v_RSC, replay.steps_R)
        return {"logp_BT": self.log_prob(replay), "mean_BTSC": mean_RSC}
