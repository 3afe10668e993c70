"""Every family's model at a tiny size, with inputs whose lengths divide by nothing."""

import copy
from pathlib import Path
from typing import Any

import torch

from spotlight_core.config.model import LoraConfig
from spotlight_core.diffusion.model import DiffusionModel, TextEmbeddings
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.tiny.model import TinyQwenImage
from tests.core.diffusion.models.tiny_pipelines import FAMILIES, recipe, save_pipeline

EMBEDDED = "tiny"
MODELS = (EMBEDDED, *FAMILIES)


def saved(root: Path) -> dict[str, Path]:
    return {family: save_pipeline(family, root / family) for family in FAMILIES}


def model_of(name: str, folders: dict[str, Path], *, lora: bool = False, checkpointing: bool = False) -> Any:
    """The model as training has it: its parameters want gradients."""
    if name == EMBEDDED:
        model = TinyQwenImage.from_pretrained()
        if checkpointing:
            model.transformer.enable_gradient_checkpointing()
        return model
    extra: dict[str, Any] = {"lora": LoraConfig(rank=2, alpha=4).model_dump()} if lora else {}
    extra |= {"height": 48, "width": 48} if name in ("qwen_image", "flux") else {}
    return build_model(recipe(name, folders[name], **extra), "training", checkpointing)


def inputs(model: DiffusionModel) -> tuple[torch.Tensor, torch.Tensor, TextEmbeddings]:
    """Latents, sigmas and texts of two prompts of different lengths."""
    draws = torch.Generator().manual_seed(5)
    x_BSC = torch.randn((2, *model.latent_shape_SC), generator=draws)
    text = model.encode(['A door with the number "42"', 'A "917"'])
    return x_BSC, torch.tensor([0.9, 0.4]), text


def copies(model: Any, count: int) -> list[Any]:
    """Models with equal weights, one a thread; the text encoder's cache is shared."""
    made = []
    for _ in range(count):
        other = copy.copy(model)
        other.transformer = copy.deepcopy(model.transformer)
        made.append(other)
    return made
