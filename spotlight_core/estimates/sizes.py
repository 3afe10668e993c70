"""How large a model is, told before anything is loaded: counted in its files where they are here, in a
folder or in the hub's cache, else as published.  Without torch.
"""

import dataclasses
import json
import re
from math import prod
from pathlib import Path
from typing import Any

from spotlight_core.config import FamilyConfig, WanConfig
from spotlight_core.diffusion.models.files import safetensors_shapes
from spotlight_core.errors import BadInputError
from spotlight_core.estimates.published import PUBLISHED, ModelSize
from spotlight_core.hub import local_folder

_SETTINGS = "config.json"  # of a part of the pipeline
_VARIANT = re.compile(r"\.(fp16|bf16|fp32)[.-]")  # a second copy of the same weights, never loaded here
_PATCH = 2  # latent pixels of a token of the transformer's attention, each side, in every family
_FRAMES_PER_LATENT = 4


def model_size(config: FamilyConfig) -> ModelSize:
    """Parameters of the recipe's model; where neither its files are here nor its name is known, those of
    the family's first published model (``source`` tells).

    Raises:
        BadInputError: a local folder without safetensors, or with damaged files.
    """
    published = published_size(config.type, config.path)
    folder = local_folder(config.path, config.revision, f"transformer/{_SETTINGS}")
    if folder is None:
        return published
    settings = _read(folder / "transformer" / _SETTINGS) or published.settings
    vae = _read(folder / "vae" / _SETTINGS)
    pixels = vae.get("scale_factor_spatial", 8) if vae else published.pixels_per_latent
    parts = {part.name: _folder_parameters(part) for part in folder.iterdir() if part.is_dir()}
    if parts.get("transformer"):
        return ModelSize(
            settings=settings,
            transformer=parts["transformer"],
            text_encoders=sum(count for name, count in parts.items() if name.startswith("text_encoder")),
            vae=parts.get("vae", 0),
            source=f"files in {config.path}",
            pixels_per_latent=pixels,
        )
    if Path(config.path).is_dir():
        raise BadInputError(
            f"no safetensors in {str(folder / 'transformer')!r}", "give a whole pipeline in diffusers' format"
        )
    return dataclasses.replace(published, settings=settings, pixels_per_latent=pixels)


def published_size(family: str, hub_id: str) -> ModelSize:
    """Of the published model of that name, or of the family's first one."""
    models = PUBLISHED[family]
    name = hub_id if hub_id in models else next(iter(models))
    source = f"published {name}" if name == hub_id else f"{hub_id} taken for {name}"
    return dataclasses.replace(models[name], source=source)


def image_multiple(size: ModelSize) -> int:
    """Pixels of a token, each side: what height and width must be multiples of."""
    return size.pixels_per_latent * _PATCH


def image_tokens(config: FamilyConfig, size: ModelSize) -> int:
    """Tokens of an image, or of all frames of a video, in the transformer's attention."""
    pixels = image_multiple(size)
    frames = (config.frames - 1) // _FRAMES_PER_LATENT + 1 if isinstance(config, WanConfig) else 1
    return frames * (config.height // pixels) * (config.width // pixels)


def _read(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; empty where there is no such file."""
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise BadInputError(f"{file} is no JSON object ({error})", "download the model again") from error


def _folder_parameters(folder: Path) -> int:
    """Parameters in a component's safetensors; buffers that are saved beside them count too."""
    files = [file for file in sorted(folder.glob("*.safetensors")) if not _VARIANT.search(file.name)]
    return sum(prod(shape) for file in files for shape in safetensors_shapes(file).values())
