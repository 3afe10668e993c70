"""What every reward offers, and how a recipe's reward is built."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spotlight_core.config import (
    ClipScoreRewardConfig,
    FunctionRewardConfig,
    GenEvalRewardConfig,
    JpegSizeRewardConfig,
    OcrRewardConfig,
    PickScoreRewardConfig,
    RewardConfig,
    TemplateRewardConfig,
    VlmJudgeRewardConfig,
)
from spotlight_core.errors import ScorerError
from spotlight_core.types import PromptRow

GREY = (-0.8, 0.2)  # between ink and paper, on the [-1, 1] scale


class Reward(Protocol):
    """Scores images, higher is better.  A failure raises; it is never a score."""

    name: str

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """One score for each of ``images`` (uint8 ``[B, height, width, 3]``) and its prompt."""
        ...


class ScorerGaveUp(ScorerError):
    """Raised by a reward that has used up its own attempts: whoever asked does not ask again."""


def build_reward(config: RewardConfig) -> Reward:
    """The recipe's reward; imports only what it needs (an OCR engine weighs 100 MB).

    Raises:
        BadInputError: the reward's file, package, model or device is missing.
        ScorerError: an endpoint does not answer.
    """
    match config:
        case OcrRewardConfig():
            from spotlight_core.rewards.ocr import open_ocr

            return open_ocr(config)
        case TemplateRewardConfig():
            from spotlight_core.rewards.template import TemplateReward

            return TemplateReward()
        case JpegSizeRewardConfig():
            from spotlight_core.rewards.jpeg_size import JpegSizeReward

            return JpegSizeReward()
        case FunctionRewardConfig():
            from spotlight_core.rewards.function import FunctionReward

            return FunctionReward(config.file, config.name)
        case GenEvalRewardConfig():
            from spotlight_core.rewards.geneval_models import GenEvalReward

            return GenEvalReward(config)
        case PickScoreRewardConfig():
            from spotlight_core.rewards.pickscore import PickScoreReward

            return PickScoreReward(config)
        case ClipScoreRewardConfig():
            from spotlight_core.rewards.clip_score import ClipScoreReward

            return ClipScoreReward(config)
        case VlmJudgeRewardConfig():
            from spotlight_core.rewards.vlm_judge import VlmJudgeReward

            return VlmJudgeReward(config)
        case _:
            from spotlight_core.rewards.weighted import WeightedReward

            return WeightedReward(config)


def grey_share(images: np.ndarray) -> float:
    """Share of pixels strictly between -0.8 and 0.2 on the [-1, 1] scale: speckle shows here.

    ``images`` is uint8 ``[B, height, width, 3]``, or any other shape.
    """
    # Compared as pixel values: 153 / 127.5 - 1 rounds to just below .2.
    low, high = ((bound + 1.0) * 127.5 for bound in GREY)
    return float(np.mean((images > low) & (images < high)))
