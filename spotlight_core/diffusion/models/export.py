"""Trained weights as files that stock diffusers loads.

Equal weights give equal bytes: tensors are sorted, and the header holds nothing of where or when.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from spotlight_core.config.model import FamilyConfig, LoraConfig, ModelSection
from spotlight_core.errors import BadInputError, SpotlightError

ADAPTER_FILE = "pytorch_lora_weights.safetensors"  # the name that load_lora_weights looks for
PREFIX = "transformer"
_ADAPTER_PARTS = (".lora_A.weight", ".lora_B.weight")


def export_adapter(config: ModelSection, weights: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Write a LoRA's published weights for ``pipeline.load_lora_weights(folder)``; returns the file.

    Rank and alpha are in the file's metadata, in PEFT's words, as diffusers' own
    ``save_lora_weights`` writes them.  The base model is not needed.

    Raises:
        BadInputError: a recipe without LoRA.
        SpotlightError: weights that are not an adapter of the recipe's rank.
    """
    if config.lora is None:
        raise BadInputError("model.lora is absent: there is no adapter", "export the whole transformer")
    modules = _adapted_modules(config.lora, weights)
    described = {
        f"{PREFIX}.r": config.lora.rank,
        f"{PREFIX}.lora_alpha": config.lora.alpha,
        f"{PREFIX}.target_modules": modules,
        f"{PREFIX}.lora_dropout": 0.0,
        f"{PREFIX}.bias": "none",
    }
    tensors = {f"{PREFIX}.{name}": weights[name].detach().cpu().contiguous() for name in sorted(weights)}
    # One metadata key only: safetensors keeps them in a hash map and writes them in any order.
    metadata = {"lora_adapter_metadata": json.dumps(described, sort_keys=True)}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ADAPTER_FILE
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("wb") as written:
        written.write(safetensors.torch.save(tensors, metadata))
        written.flush()
        os.fsync(written.fileno())
    temporary.replace(file)
    return file


def export_transformer(config: FamilyConfig, weights: Mapping[str, torch.Tensor], folder: Path) -> Path:
    """Write the fully trained transformer as diffusers' ``from_pretrained`` takes it; returns ``folder``.

    Loads the base transformer on the CPU: its configuration, and its buffers, which are not trained
    but are part of the file (SD3's position embedding).  In the weights' own dtype.

    Raises:
        BadInputError: the base model cannot be loaded.
        SpotlightError: weights that are not this transformer's.
    """
    from spotlight_core.diffusion.policy import load_policy_weights

    transformer = _base_transformer(config, next(iter(weights.values())).dtype)
    load_policy_weights(transformer, weights)
    transformer.save_pretrained(folder, safe_serialization=True)
    return folder


def _adapted_modules(lora: LoraConfig, weights: Mapping[str, torch.Tensor]) -> list[str]:
    modules: set[str] = set()
    for name, tensor in weights.items():
        part = next((part for part in _ADAPTER_PARTS if name.endswith(part)), None)
        rank = None if part is None else tensor.shape[0 if part == _ADAPTER_PARTS[0] else 1]
        if part is None or rank != lora.rank:
            raise SpotlightError(
                f"weight {name!r} {list(tensor.shape)} is no part of an adapter of rank {lora.rank}",
                "export weights that were published under the same lora section",
            )
        modules.add(name.removesuffix(part))
    for module in modules:
        if missing := [part for part in _ADAPTER_PARTS if module + part not in weights]:
            raise SpotlightError(
                f"the adapter of {module!r} has no {missing[0]!r}", "export a whole published policy"
            )
    return sorted(modules)


def _base_transformer(config: FamilyConfig, dtype: torch.dtype) -> Any:
    from spotlight_core.diffusion.models.families import FAMILIES
    from spotlight_core.diffusion.models.loading import check_pipeline, load_component

    check_pipeline(config)
    kind = ("diffusers", FAMILIES[config.type].transformer)
    return load_component(config, "transformer", kind, dtype).requires_grad_(True)
