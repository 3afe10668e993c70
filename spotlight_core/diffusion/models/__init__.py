"""From the recipe's model section to a model: one adapter per family.

Importing this package imports no torch: sizes are asked for where nothing is loaded.
"""

from typing import TYPE_CHECKING

from spotlight_core.config.model import ModelConfig

if TYPE_CHECKING:
    from spotlight_core.diffusion.model import DiffusionModel
    from spotlight_core.diffusion.models.precision import Role


def build_model(config: ModelConfig, role: "Role", gradient_checkpointing: bool = False) -> "DiffusionModel":
    """The recipe's model with its base weights, in the precision of its ``role``.

    ``gradient_checkpointing`` is for training: activations are computed again in the backward pass.

    Raises:
        BadInputError: the weights are missing, belong to another family, or cannot draw this size.
        ValueError: gradient checkpointing of a rollout.
    """
    # A family's pipeline is imported when it is asked for: one import pulls in its text encoders too.
    if config.type == "tiny":
        from spotlight_core.diffusion.tiny.model import TinyQwenImage

        return TinyQwenImage.from_config(config, role, gradient_checkpointing)
    from spotlight_core.diffusion.models.loading import silence_libraries

    silence_libraries()
    if config.type == "qwen_image":
        from spotlight_core.diffusion.models.qwen_image import QwenImage

        return QwenImage(config, role, gradient_checkpointing)
    if config.type == "flux":
        from spotlight_core.diffusion.models.flux import Flux

        return Flux(config, role, gradient_checkpointing)
    if config.type == "sd3":
        from spotlight_core.diffusion.models.sd3 import SD3

        return SD3(config, role, gradient_checkpointing)
    from spotlight_core.diffusion.models.wan import Wan

    return Wan(config, role, gradient_checkpointing)
