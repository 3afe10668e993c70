"""Several rewards at once: the weighted sum of their scores, and the scores of each by name."""

from collections.abc import Mapping, Sequence

import numpy as np

from spotlight_core.config import WeightedRewardConfig
from spotlight_core.rewards.base import Reward, build_reward
from spotlight_core.types import PromptRow


class WeightedReward:
    """The rewards of ``reward.parts``, each named by its type (a type comes once in a recipe)."""

    name = "weighted"

    def __init__(self, config: WeightedRewardConfig) -> None:
        """Builds every part.

        Raises:
            BadInputError, ScorerError: as ``build_reward`` for a part.
        """
        self.rewards: dict[str, Reward] = {
            part.reward.type: build_reward(part.reward) for part in config.parts
        }
        self._weights = {part.reward.type: part.weight for part in config.parts}

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """The weighted sum for each image."""
        return self.combined(self.parts(images, prompts))

    def parts(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> dict[str, list[float]]:
        """The scores of each reward, without its weight."""
        return {name: reward.score(images, prompts) for name, reward in self.rewards.items()}

    def combined(self, parts: Mapping[str, Sequence[float]]) -> list[float]:
        """The weighted sum of ``parts`` for each image, added in the recipe's order."""
        rows = zip(*(parts[name] for name in self._weights), strict=True)
        weights = tuple(self._weights.values())
        return [
            float(sum(weight * score for weight, score in zip(weights, row, strict=True))) for row in rows
        ]
