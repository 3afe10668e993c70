"""Pipelines from a hub id or a local folder, with the errors that a user can act on."""

from typing import Any

import torch

from spotlight_core.config.model import FamilyConfig
from spotlight_core.diffusion.models.families import FAMILIES, INDEX, check_index, check_path
from spotlight_core.errors import BadInputError


def load_pipeline(config: FamilyConfig, dtypes: dict[str, torch.dtype]) -> Any:
    """The family's diffusers pipeline at ``config.path``; safetensors only, on the CPU.

    ``dtypes`` are by component, ``default`` for those not named.

    Raises:
        BadInputError: nothing there, another pipeline's weights, or no safetensors.
    """
    import diffusers
    import transformers

    check_pipeline(config)
    # Progress bars would be drawn into the log files of actors.
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    name = FAMILIES[config.type].pipeline
    try:
        return getattr(diffusers, name).from_pretrained(
            config.path, revision=config.revision, dtype=dtypes, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"model.path {config.path!r} cannot be loaded as a {name} ({_first_line(error)})",
            "give a whole pipeline in diffusers' format, with its weights as safetensors",
        ) from error


def check_pipeline(config: FamilyConfig) -> None:
    """There is a pipeline of the family at ``config.path``; downloads its index where it is not here.

    Raises:
        BadInputError: nothing that can be reached, or another pipeline.
    """
    import diffusers

    check_path(config)
    try:
        index = diffusers.DiffusionPipeline.load_config(config.path, revision=config.revision)
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"no model at {config.path!r} ({_first_line(error)})",
            f"give model.path a hub id that can be reached, or a folder that holds {INDEX}",
        ) from error
    check_index(config, dict(index))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
