"""How large a model is: counted in its files where they are here, else as published; without torch."""

import json
from pathlib import Path

from flows.layers import Settings, published_settings
from flows.model_files import cached
from spotlight_core.config import DiffusersModelConfig
from spotlight_core.diffusion.models.sizes import ModelSize, model_size
from spotlight_core.errors import BadInputError

_SETTINGS = "transformer/config.json"


def size_of(model: DiffusersModelConfig) -> tuple[ModelSize, Settings]:
    """Parameters of the recipe's model, and the settings of its transformer.

    Raises:
        BadInputError: a local folder whose files cannot be read.
    """
    folder = Path(model.path) if Path(model.path).is_dir() else cached(model.path, model.revision, _SETTINGS)
    if folder is None or not (folder / _SETTINGS).is_file():
        family = str(model.type)  # type: ignore[attr-defined]  # every family's section has one
        return model_size(model), published_settings(family, model.path)
    whole = any((folder / "transformer").glob("*.safetensors"))
    counted = model.model_copy(update={"path": str(folder)}) if whole else model
    try:
        settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        return model_size(counted), settings
    except ValueError as error:
        raise BadInputError(
            f"{folder / _SETTINGS} is not JSON ({error})", "download the model again"
        ) from error
