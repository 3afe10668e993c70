"""CLIPScore: how near image and prompt are (arXiv 2104.08718, without its factor of 2.5)."""

from collections.abc import Sequence

import numpy as np

from spotlight_core.config import ClipScoreRewardConfig
from spotlight_core.rewards.clip import ClipTowers
from spotlight_core.types import PromptRow


class ClipScoreReward:
    """``max(cosine, 0)`` of image and prompt."""

    name = "clip_score"

    def __init__(self, config: ClipScoreRewardConfig) -> None:
        """Load the model.

        Raises:
            BadInputError: it cannot be loaded; no such device.
        """
        self._clip = ClipTowers(config.path, config.path, config.device)

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """One score in 0..1 for each image (uint8 ``[B, height, width, 3]``) and its prompt's text."""
        # Rounding can bring two equal unit vectors a little above 1.
        return [min(max(cosine, 0.0), 1.0) for cosine in self.probes(images, prompts)["CLIP"]]

    def probes(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> dict[str, list[float]]:
        """What different images must differ in, by model: the cosines, negative ones too."""
        return {"CLIP": self._clip.cosines(images, [prompt.text for prompt in prompts])}
