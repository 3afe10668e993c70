"""Pipelines from a Hub id or a local folder, with the errors that a user can act on."""

import re
from pathlib import Path
from typing import Any

import torch

from spotlight_core.config.model import DiffusersModelConfig
from spotlight_core.errors import BadInputError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
FAMILIES = {
    "QwenImagePipeline": "qwen_image",
    "FluxPipeline": "flux",
    "StableDiffusion3Pipeline": "sd3",
    "WanPipeline": "wan",
}


def load_pipeline(pipeline: Any, config: DiffusersModelConfig, dtypes: dict[str, torch.dtype]) -> Any:
    """``config.path`` as an instance of the diffusers class ``pipeline``; safetensors only, on the CPU.

    ``dtypes`` are by component, ``default`` for those not named.

    Raises:
        BadInputError: nothing there, another pipeline's weights, or no safetensors.
    """
    _check_class(pipeline, config)
    _silence()
    try:
        return pipeline.from_pretrained(
            config.path, revision=config.revision, dtype=dtypes, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"model.path {config.path!r} cannot be loaded as a {pipeline.__name__} ({_first_line(error)})",
            "give a whole pipeline in diffusers' format, with its weights as safetensors",
        ) from error


def _silence() -> None:
    """No progress bars: they are drawn into the log files of actors."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def _check_class(pipeline: Any, config: DiffusersModelConfig) -> None:
    name = read_index(pipeline, config).get("_class_name")
    if name == pipeline.__name__:
        return
    family = FAMILIES.get(str(name))
    raise BadInputError(
        f"model.path {config.path!r} holds a {name}, and model.type is not its family",
        f'set model.type = "{family}"' if family else f"give a {pipeline.__name__} in diffusers' format",
    )


def read_index(pipeline: Any, config: DiffusersModelConfig) -> dict[str, Any]:
    """``model_index.json`` of the pipeline at ``config.path``; BadInputError where there is none."""
    remedy = "give model.path a Hub id that can be reached, or a folder that holds model_index.json"
    folder = Path(config.path)
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise BadInputError(f"no model_index.json in {config.path!r}", remedy)
    elif not HUB_ID.fullmatch(config.path):
        raise BadInputError(f"no folder {config.path!r}, and it is no Hub id", remedy)
    try:
        return dict(pipeline.load_config(config.path, revision=config.revision))
    except (OSError, ValueError) as error:
        raise BadInputError(f"no model at {config.path!r} ({_first_line(error)})", remedy) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
