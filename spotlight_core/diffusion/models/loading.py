"""Pipelines from a hub id or a local folder, with the errors that a user can act on."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from spotlight_core.config.model import FamilyConfig
from spotlight_core.diffusion.models.families import FAMILIES, INDEX, check_index, check_parts, check_path
from spotlight_core.diffusion.models.files import REMEDY, components
from spotlight_core.errors import BadInputError

PROBES = ("red cat", "big dog")
"""Other words of the same lengths: where all words are unknown, nothing tells these prompts apart."""


def silence_libraries() -> None:
    """No progress bars and no advice in the log files of actors.

    Before a pipeline's module is imported: transformers advises to install torchvision while it is.
    """
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def load_pipeline(config: FamilyConfig, dtypes: Mapping[str, torch.dtype]) -> Any:
    """The family's diffusers pipeline at ``config.path``; safetensors only, on the CPU.

    ``dtypes`` are by component, ``default`` for those not named.

    Raises:
        BadInputError: nothing there, another pipeline's weights, no safetensors, a component or a tensor
            that is missing or does not fit, or a tokenizer that does not tell prompts apart.
    """
    index = check_pipeline(config)
    kind = _class("diffusers", FAMILIES[config.type].pipeline)
    folder = Path(config.path)
    if not folder.is_dir():
        with _loading(config, kind.__name__):
            folder = Path(kind.download(config.path, revision=config.revision, use_safetensors=True))
        check_parts(config, folder, index)
    modules = {
        name: load_component(config, name, (library, class_name), dtypes.get(name, dtypes["default"]), folder)
        for name, (library, class_name) in components(index).items()
        if issubclass(_class(library, class_name), torch.nn.Module)
    }
    with _loading(config, kind.__name__):
        pipeline = kind.from_pretrained(folder, local_files_only=True, **modules)
    _check_tokenizers(config, pipeline)
    return pipeline


def load_component(
    config: FamilyConfig, name: str, kind: tuple[str, str], dtype: torch.dtype, folder: Path | None = None
) -> Any:
    """The module ``name`` of the pipeline, of the class ``kind`` (library, name), on the CPU; every one of
    its tensors comes from the files.

    transformers draws a tensor that is missing at random and tells its log only; diffusers leaves it
    without storage.  Tied weights, and what a class says may be missing, count as there.  Without
    ``folder``, where the pipeline's files are, they are those of ``config.path``.

    Raises:
        BadInputError: a tensor is missing or has another shape, or the files are damaged.
    """
    with _loading(config, f"{name} ({kind[1]})"):
        module, told = _class(*kind).from_pretrained(
            folder or config.path,
            subfolder=name,
            revision=None if folder else config.revision,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
    missing = sorted(told["missing_keys"])
    if missing:
        raise BadInputError(
            f"{name} ({kind[1]}) of model.path {config.path!r} lacks {len(missing)} tensors, the first is "
            f"{missing[0]}",
            REMEDY,
        )
    return module


def check_pipeline(config: FamilyConfig) -> dict[str, Any]:
    """There is a pipeline of the family at ``config.path``; its index, downloaded where it is not here.

    Raises:
        BadInputError: nothing that can be reached, another pipeline, or a folder that is not whole.
    """
    import diffusers

    check_path(config)
    try:
        index = dict(diffusers.DiffusionPipeline.load_config(config.path, revision=config.revision))
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"no model at {config.path!r} ({_first_line(error)})",
            f"give model.path a hub id that can be reached, or a folder that holds {INDEX}",
        ) from error
    check_index(config, index)
    return index


def _class(library: str, name: str) -> Any:
    """The class of diffusers or transformers."""
    import diffusers
    import transformers

    found = getattr({"diffusers": diffusers, "transformers": transformers}[library], name, None)
    if found is None:
        raise BadInputError(
            f"model_index.json names {name!r}, which the {library} installed here does not have",
            "give a pipeline that was saved for this version",
        )
    return found


def _check_tokenizers(config: FamilyConfig, pipeline: Any) -> None:
    """Each tokenizer tells two prompts apart, in tokens that its encoder has and as many as it takes."""
    for name, tokenizer in pipeline.components.items():
        encoder = getattr(pipeline, name.replace("tokenizer", "text_encoder"), None)
        if not name.startswith("tokenizer") or tokenizer is None or encoder is None:
            continue
        with _loading(config, name):
            tokens = [tokenizer(prompt).input_ids for prompt in PROBES]
            rows = int(encoder.get_input_embeddings().num_embeddings)
            most = int(tokenizer.model_max_length)
        fault = None
        if tokens[0] == tokens[1]:
            fault = f"gives {PROBES[0]!r} and {PROBES[1]!r} the same tokens {tokens[0]}"
        elif max(map(max, tokens)) >= rows:
            fault = f"gives token {max(map(max, tokens))} to a text encoder of {rows}"
        elif "CLIP" in type(encoder).__name__ and most > encoder.config.max_position_embeddings:
            # CLIP's prompts are padded to the tokenizer's limit.
            fault = f"allows {most} tokens to a text encoder of {encoder.config.max_position_embeddings}"
        if fault:
            raise BadInputError(f"{name} of model.path {config.path!r} {fault}", REMEDY)


@contextlib.contextmanager
def _loading(config: FamilyConfig, what: str) -> Iterator[None]:
    """Whatever a library says of files it cannot use becomes one line; running out of memory stays that."""
    try:
        yield
    except (BadInputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # tokenizers raises no class of its own
        raise BadInputError(
            f"model.path {config.path!r} cannot be loaded as a {what} ({_first_line(error)})",
            "give a whole pipeline in diffusers' format, with its weights as safetensors",
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
