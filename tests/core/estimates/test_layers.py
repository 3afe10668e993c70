"""The linear layers that plans count are those of diffusers' own transformers, name for name."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from peft import LoraConfig as PeftLoraConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spotlight_core.config import LoraConfig
from spotlight_core.diffusion.models.families import FAMILIES
from spotlight_core.estimates.layers import (
    Linear,
    depth,
    forward_flops,
    linear_layers,
    lora_parameters,
    width,
)
from spotlight_core.estimates.published import PUBLISHED
from spotlight_core.estimates.sizes import published_size
from spotlight_core.recipes import load_recipe, recipe_names

# What the published files say beside the settings that plans need.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen_image": (QwenImageTransformer2DModel, {"joint_attention_dim": 3584}),
    "flux": (FluxTransformer2DModel, {"guidance_embeds": True}),
    "sd3": (
        SD3Transformer2DModel,
        {"caption_projection_dim": 1536, "qk_norm": "rms_norm", "pos_embed_max_size": 384},
    ),
    "wan": (WanTransformer3DModel, {}),
}


# As wide as published, and of few blocks: of each kind, the last and the dual ones included.
FEW: dict[str, dict[str, Any]] = {
    "qwen_image": {"num_layers": 2},
    "flux": {"num_layers": 2, "num_single_layers": 3},
    "sd3": {"num_layers": 3, "dual_attention_layers": (0, 1)},
    "wan": {"num_layers": 2},
}


def transformer(family: str, settings: Mapping[str, Any]) -> Any:
    """The architecture without weights."""
    model, more = MODELS[family]
    with torch.device("meta"):
        return model(**{**settings, **more})


@pytest.mark.parametrize("family", MODELS)
def test_layers_and_adapters_are_counted_as_diffusers_and_peft_have_them(family: str) -> None:
    settings = {**published_size(family, "").settings, **FEW[family]}
    model = transformer(family, settings)
    real = {
        Linear(name=name, inputs=module.in_features, outputs=module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "blocks." in name
    }
    assert set(linear_layers(family, settings)) == real
    assert width(settings) == model.config.num_attention_heads * model.config.attention_head_dim
    assert depth(settings) == len({tuple(layer.name.split(".")[:2]) for layer in real})

    lora = LoraConfig(rank=4)
    with torch.device("meta"):
        model.requires_grad_(False)
        model.add_adapter(PeftLoraConfig(r=4, target_modules=list(FAMILIES[family].lora_targets)))
    adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert lora_parameters(family, settings, lora) == adapters > 0


TINY = {"num_attention_heads": 2, "attention_head_dim": 32}
ROWS, COLUMNS, TEXT = 6, 8, 10


def inputs(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of a tiny transformer, and what its forward takes: 6 x 8 image tokens, 10 text tokens."""
    rope = {"axes_dims_rope": (8, 12, 12)}
    tokens, timestep = torch.zeros(1, ROWS * COLUMNS, 64), torch.ones(1)
    text = torch.zeros(1, TEXT, 48)
    common = {"encoder_hidden_states": text, "timestep": timestep}
    if family == "qwen_image":
        given = {"hidden_states": tokens, "img_shapes": [[(1, ROWS, COLUMNS)]]}
        return {**rope, "joint_attention_dim": 48}, {**common, **given}
    if family == "flux":
        ids = {"img_ids": torch.zeros(ROWS * COLUMNS, 3), "txt_ids": torch.zeros(TEXT, 3)}
        given = {"hidden_states": tokens, "pooled_projections": torch.zeros(1, 8), **ids}
        return {**rope, "joint_attention_dim": 48, "pooled_projection_dim": 8}, {**common, **given}
    if family == "sd3":
        latents = torch.zeros(1, 16, 2 * ROWS, 2 * COLUMNS)
        given = {"hidden_states": latents, "pooled_projections": torch.zeros(1, 8)}
        settings = {"joint_attention_dim": 48, "pooled_projection_dim": 8, "caption_projection_dim": 64}
        return {**settings, "sample_size": 16, "pos_embed_max_size": 16}, {**common, **given}
    latents = torch.zeros(1, 16, 1, 2 * ROWS, 2 * COLUMNS)
    return {"text_dim": 48, "freq_dim": 32, "ffn_dim": 256}, {**common, "hidden_states": latents}


@pytest.mark.parametrize("family", MODELS)
def test_the_operations_of_a_forward_are_what_torch_counts(family: str) -> None:
    more, arguments = inputs(family)
    settings = {**published_size(family, "").settings, **FEW[family], **TINY, **more}
    model = MODELS[family][0](**settings).eval()
    counter = FlopCounterMode(display=False)
    # The fused attention of CPUs is not counted.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(**arguments, return_dict=False)
    blocks = sum(
        count
        for module, counts in counter.get_flop_counts().items()
        if re.fullmatch(r"[^.]+\.(\w*blocks)\.\d+", module)
        for count in counts.values()
    )
    assert forward_flops(family, settings, ROWS * COLUMNS, TEXT) == pytest.approx(blocks, rel=1e-9)


def test_the_adapter_of_a_recipe_with_targets_of_its_own() -> None:
    lora = load_recipe("qwen_image_ocr").model.lora
    assert lora is not None
    # 60 blocks: eight square layers of 3072 channels and four between 3072 and 12288, at rank 64.
    assert lora_parameters(
        "qwen_image", published_size("qwen_image", "Qwen/Qwen-Image").settings, lora
    ) == 60 * 64 * (8 * 2 * 3072 + 4 * (3072 + 12288))


@pytest.mark.parametrize("name", recipe_names())
def test_every_target_of_a_shipped_recipe_is_a_layer_of_its_model(name: str) -> None:
    model = load_recipe(name).model
    if model.lora is None:
        assert model.type == "tiny"
        return
    layers = [layer.name for layer in linear_layers(model.type, published_size(model.type, "").settings)]
    for target in model.lora.target_modules:
        assert any(layer.endswith(f".{target}") for layer in layers), target


@pytest.mark.parametrize("family", MODELS)
def test_published_settings_fit_the_published_counts(family: str) -> None:
    for size in PUBLISHED[family].values():
        weights = sum(layer.inputs * layer.outputs for layer in linear_layers(family, size.settings))
        assert 0.95 * size.transformer < weights < size.transformer
