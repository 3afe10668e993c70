"""What is known of each family without loading it: diffusers' names, LoRA targets, guidance, its index.

Torch-free, so that preflight and plans ask here too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotlight_core.config.model import FamilyConfig, FluxConfig
from spotlight_core.diffusion.models.files import check_components
from spotlight_core.errors import BadInputError
from spotlight_core.hub import is_hub_id, local_folder, offline

INDEX = "model_index.json"

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
MMDIT_ATTENTION = tuple(
    f"attn.{layer}" for layer in (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
"""The attention of a transformer with a text and an image stream, under diffusers' names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``pipeline`` and ``transformer`` are classes of diffusers; ``lora_targets`` are the endings of the
    layers that LoRA adapts where the recipe names none; ``text`` are the components that no prompt can do
    without (SD3 can be had without its third encoder)."""

    pipeline: str
    transformer: str
    lora_targets: tuple[str, ...]
    text: tuple[str, ...] = ("tokenizer", "text_encoder")


FAMILIES: Mapping[str, Family] = {
    "qwen_image": Family(
        pipeline="QwenImagePipeline",
        transformer="QwenImageTransformer2DModel",
        lora_targets=MMDIT_ATTENTION,
    ),
    "flux": Family(
        pipeline="FluxPipeline",
        transformer="FluxTransformer2DModel",
        text=("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
        lora_targets=MMDIT_ATTENTION,
    ),
    "sd3": Family(
        pipeline="StableDiffusion3Pipeline",
        transformer="SD3Transformer2DModel",
        text=("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
        lora_targets=(*MMDIT_ATTENTION, *(f"attn2.{layer}" for layer in ATTENTION)),
    ),
    "wan": Family(
        pipeline="WanPipeline",
        transformer="WanTransformer3DModel",
        lora_targets=tuple(f"attn{place}.{layer}" for place in (1, 2) for layer in ATTENTION),
    ),
}
"""By ``model.type``."""


def guided(config: FamilyConfig) -> bool:
    """Whether every velocity takes a second forward, of the negative prompt; FLUX's guidance is an input."""
    return not isinstance(config, FluxConfig) and config.guidance > 1


def check_path(config: FamilyConfig) -> None:
    """``model.path`` is a folder that holds a pipeline, or has the form of a hub id.

    Raises:
        BadInputError: neither.
    """
    remedy = f"give a folder that holds {INDEX}, or a hub id such as Qwen/Qwen-Image"
    folder = Path(config.path)
    if folder.is_dir():
        if not (folder / INDEX).is_file():
            raise BadInputError(f"model.path {config.path} has no {INDEX}", remedy)
    elif not is_hub_id(config.path):
        raise BadInputError(f"model.path {config.path!r} is no folder here and no hub id", remedy)


def check_index(config: FamilyConfig, index: Mapping[str, Any]) -> None:
    """``index``, the content of ``model_index.json``, is that of a pipeline of the recipe's family, and
    the files that it names are here, unless a download may still bring them.

    Raises:
        BadInputError: another pipeline, Wan's with a transformer for each half of the noise, or an
            incomplete one.
    """
    found, expected = index.get("_class_name"), FAMILIES[config.type].pipeline
    if found != expected:
        family = next((name for name, each in FAMILIES.items() if each.pipeline == found), None)
        remedy = f"set model.type = {family!r}" if family else f"give a {expected} in diffusers' format"
        raise BadInputError(f"model.path {config.path} holds a {found}, no {expected}", remedy)
    if any(index.get("transformer_2") or ()):  # [null, null] where a pipeline was saved without it
        raise BadInputError(
            f"model.path {config.path} has two transformers, for high and for low noise",
            "give a Wan model with one transformer: 2.1 at 1.3B or 14B, 2.2 at 5B",
        )
    if Path(config.path).is_dir() or offline():
        folder = local_folder(config.path, config.revision, INDEX)
        if folder is not None:
            check_parts(config, folder, index)


def check_parts(config: FamilyConfig, folder: Path, index: Mapping[str, Any]) -> None:
    """``folder`` holds every component of ``index`` with its files, and what the family cannot do without.

    Raises:
        BadInputError: a component or a file of one is missing or damaged.
    """
    check_components(folder, index, ("transformer", "vae", "scheduler", *FAMILIES[config.type].text))
