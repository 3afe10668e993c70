"""PickScore: human preference, learned from what people picked (arXiv 2305.01569)."""

from collections.abc import Sequence

import numpy as np

from spotlight_core.config import PickScoreRewardConfig
from spotlight_core.rewards.clip import ClipTowers
from spotlight_core.types import PromptRow

SCALE = 26.0  # the public trainers divide by it, which brings scores near 1


class PickScoreReward:
    """``exp(logit_scale) * cosine / 26`` under the PickScore CLIP, about .75 to .9 on real images."""

    name = "pickscore"

    def __init__(self, config: PickScoreRewardConfig) -> None:
        """Load the model.

        Raises:
            BadInputError: it cannot be loaded; no such device.
        """
        self._clip = ClipTowers(config.path, config.processor, config.device)

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """One score for each image (uint8 ``[B, height, width, 3]``) and its prompt's text."""
        cosines = self._clip.cosines(images, [prompt.text for prompt in prompts])
        return [cosine * self._clip.logit_scale / SCALE for cosine in cosines]

    def probes(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> dict[str, list[float]]:
        """What different images must differ in, by model: the cosines."""
        return {"CLIP": self._clip.cosines(images, [prompt.text for prompt in prompts])}
