"""What every reward offers, and how a recipe's reward is built."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spotlight_core.config import (
    FunctionRewardConfig,
    JpegSizeRewardConfig,
    OcrRewardConfig,
    RewardConfig,
)

GREY = (-0.8, 0.2)  # between ink and paper, on the [-1, 1] scale


class Reward(Protocol):
    """Scores images, higher is better.  A failure raises; it is never a score."""

    name: str

    def score(self, images: np.ndarray, prompts: Sequence[str]) -> list[float]:
        """One score for each of ``images`` (uint8 ``[B, height, width, 3]``) and its prompt."""
        ...


def build_reward(config: RewardConfig) -> Reward:
    """The recipe's reward; imports only what it needs (an OCR engine weighs 100 MB).

    Raises:
        BadInputError: the reward's file or package is missing.
    """
    if isinstance(config, OcrRewardConfig):
        from spotlight_core.rewards.ocr import OcrReward

        return OcrReward(config.characters)
    if isinstance(config, JpegSizeRewardConfig):
        from spotlight_core.rewards.jpeg_size import JpegSizeReward

        return JpegSizeReward()
    if isinstance(config, FunctionRewardConfig):
        from spotlight_core.rewards.function import FunctionReward

        return FunctionReward(config.file, config.name)
    from spotlight_core.rewards.template import TemplateReward

    return TemplateReward()


def grey_share(images: np.ndarray) -> float:
    """Share of pixels strictly between -0.8 and 0.2 on the [-1, 1] scale: speckle shows here.

    ``images`` is uint8 ``[B, height, width, 3]``.
    """
    # Compared as pixel values: 153 / 127.5 - 1 rounds to just below .2.
    low, high = ((bound + 1.0) * 127.5 for bound in GREY)
    return float(np.mean((images > low) & (images < high)))
