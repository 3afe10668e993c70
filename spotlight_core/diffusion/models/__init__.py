"""From the recipe's model section to a model: one branch per family."""

from spotlight_core.config import ModelConfig
from spotlight_core.diffusion.model import DiffusionModel
from spotlight_core.diffusion.tiny.model import WEIGHTS, TinyQwenImage


def build_model(config: ModelConfig) -> DiffusionModel:
    """The recipe's model with its base weights.

    Raises:
        BadInputError: the weights file is missing.
    """
    return TinyQwenImage.from_pretrained(config.weights or WEIGHTS)
