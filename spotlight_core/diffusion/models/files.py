"""Is a pipeline's folder whole?  Asked before anything is loaded, without torch.

A download that broke off leaves files that libraries fill up in silence: a tokenizer without its vocabulary
is an empty one, and weights that lack a tensor get a random one.
"""

import json
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from spotlight_core.errors import BadInputError

REMEDY = "download or copy the model again, whole"
MAX_HEADER_BYTES = 100_000_000  # as the safetensors format allows
WEIGHTS = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}
"""A component's file by its library; shards are listed in the same name with .index.json."""

_VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",), ("tokenizer.model",))


def components(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Library and class of each component that ``index``, of ``model_index.json``, does not leave out.

    Raises:
        BadInputError: a component of a library other than diffusers and transformers: that would be code
            from the model's folder.
    """
    named = {
        name: (value[0], value[1])
        for name, value in index.items()
        if isinstance(value, list | tuple) and len(value) == 2 and any(value)
    }
    for name, (library, class_name) in named.items():
        if library not in WEIGHTS:
            raise BadInputError(
                f"model_index.json names {class_name!r} of {library!r} as {name}",
                "give a pipeline whose components are classes of diffusers and transformers",
            )
    return named


def check_components(folder: Path, index: Mapping[str, Any], required: Collection[str]) -> None:
    """Each component that ``index`` names has its files in ``folder``; none of ``required`` is left out.

    Of weights, the headers and lengths are read; whether they fit the component's class shows at loading.

    Raises:
        BadInputError: the first file that is absent, cut off or not readable.
    """
    named = components(index)
    for name in required:
        if name not in named:
            raise BadInputError(f"{folder / 'model_index.json'} names no {name}", REMEDY)
    for name, (library, class_name) in named.items():
        part = folder / name
        if not part.is_dir():
            raise BadInputError(f"{str(folder)!r} has no folder {name} ({class_name})", REMEDY)
        if "Scheduler" in class_name:
            _json(part / "scheduler_config.json")
        elif "Tokenizer" in class_name:
            _check_tokenizer(part)
        elif class_name.endswith(("Processor", "Extractor")):
            _json(_first(part, ("preprocessor_config.json", "processor_config.json")))
        else:
            _json(part / "config.json")
            _check_weights(part, WEIGHTS[library])


def _check_tokenizer(folder: Path) -> None:
    _json(folder / "tokenizer_config.json")  # without it, no limit on the length of a prompt
    for files in _VOCABULARIES:
        if all((folder / file).is_file() for file in files):
            break
    else:
        names = ", ".join(" with ".join(files) for files in _VOCABULARIES)
        raise BadInputError(f"{str(folder)!r} has no vocabulary, none of {names}", REMEDY)
    for file in files:
        if file.endswith(".json"):
            _json(folder / file)
        elif not (folder / file).stat().st_size:
            raise BadInputError(f"{str(folder / file)!r} is empty", REMEDY)


def _check_weights(folder: Path, file: str) -> None:
    index = folder / f"{file}.index.json"
    if index.is_file():
        shards = _json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise BadInputError(f"{str(index)!r} lists no weights", REMEDY)
        held = {shard: safetensors_shapes(folder / shard) for shard in sorted(set(shards.values()))}
        for tensor, shard in shards.items():
            if tensor not in held[shard]:
                raise BadInputError(f"{str(folder / shard)!r} lacks {tensor}, against {index.name}", REMEDY)
    elif (folder / file).is_file():
        safetensors_shapes(folder / file)
    else:
        raise BadInputError(
            f"{str(folder)!r} has no {file} and no {index.name}", f"{REMEDY}, with its weights as safetensors"
        )


def safetensors_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The tensors' shapes by name, from the header alone.

    The format is a length (8 bytes, little-endian), then JSON of names to dtype, shape and place, then
    the tensors' bytes and nothing after them.

    Raises:
        BadInputError: absent, no safetensors, or shorter or longer than its header says.
    """
    try:
        with file.open("rb") as data:
            (length,) = struct.unpack("<Q", data.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            entries = json.loads(data.read(length))
        entries.pop("__metadata__", None)
        whole = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if (size := file.stat().st_size) != whole:
            raise ValueError(f"{size} bytes, its header tells of {whole}")
        return {name: tuple(entry["shape"]) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, struct.error) as error:
        raise BadInputError(f"{str(file)!r} is no whole safetensors file ({error})", REMEDY) from error


def _first(folder: Path, names: tuple[str, ...]) -> Path:
    """The first of ``names`` that is in ``folder``, else the first name."""
    return next((folder / name for name in names if (folder / name).is_file()), folder / names[0])


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise BadInputError(f"{str(file.parent)!r} has no {file.name}", REMEDY) from error
    except (OSError, ValueError, TypeError) as error:
        raise BadInputError(f"{str(file)!r} is no JSON object ({error})", REMEDY) from error
