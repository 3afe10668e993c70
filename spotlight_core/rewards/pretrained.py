"""Scoring models through transformers: where they run and how they are loaded."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from spotlight_core.errors import BadInputError

T = TypeVar("T")


def scoring_device(device: str) -> torch.device:
    """``device``, where "auto" is the first GPU, else the CPU.

    Raises:
        BadInputError: torch knows or has no such device.
    """
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise BadInputError(
            f"reward.device = {device!r} cannot be used ({str(error).splitlines()[0]})",
            'set it to "auto", "cpu" or a GPU of this machine such as "cuda:0"',
        ) from error
    return chosen


def load_model(auto_class: Any, path: str, device: torch.device) -> Any:
    """The model at ``path`` in fp32, from safetensors, for inference.

    Raises:
        BadInputError: no such model, no safetensors, or weights that lack a parameter: transformers
            would draw it at random, and such a model scores nothing.
    """
    logging.disable_progress_bar()  # of reading weights; downloads still show theirs
    logging.set_verbosity_error()
    model, loading = opened(
        path,
        lambda: auto_class.from_pretrained(
            path, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        ),
    )
    missing = sorted(set(loading["missing_keys"]) & {name for name, _ in model.named_parameters()})
    if missing:
        raise BadInputError(
            f"the weights at {path} lack {len(missing)} parameters of {type(model).__name__}, the first is "
            f"{missing[0]}",
            "name a model of that kind",
        )
    return model.to(device).eval().requires_grad_(False)


def opened(path: str, load: Callable[[], T]) -> T:
    """``load()``; whatever transformers says is missing becomes a line that names ``path``.

    Raises:
        BadInputError: it could not be loaded.
    """
    try:
        return load()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInputError(
            f"cannot load the scoring model {path} ({type(error).__name__}: {first})",
            "give a hub id or a folder in Hugging Face's layout with safetensors; a hub id needs the network "
            "or a filled cache",
        ) from error
