"""Flow-GRPO: clipped policy gradients over the SDE window (arXiv 2505.05470).

``r = exp(logp - logp_old)``, ``L = mean max(-A r, -A clip(r, 1 - low, 1 + high))``, the mean taken
over trajectories and trained steps.  Log-probabilities are means over dimensions, so clip ranges
are small numbers.
"""

import torch

from spotlight_core.learning.losses.base import TrainingChunk
from spotlight_core.learning.losses.policy_gradient import PolicyGradientLoss, Replay, stack


class GrpoLoss(PolicyGradientLoss):
    """The plain ratio."""

    def ratio(self, replay: Replay, chunk: TrainingChunk, part: range) -> torch.Tensor:
        return torch.exp(self.log_prob(replay) - stack(chunk.arrays["logp_BT"], list(part)))
