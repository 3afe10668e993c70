"""Counts before loading: equal to what the classes count and to what the files hold."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.models.diffusers_model import DiffusersModel
from spotlight_core.errors import BadInputError
from spotlight_core.estimates import published
from spotlight_core.estimates.sizes import image_tokens, model_size
from tests.core.diffusion.models.tiny_pipelines import FAMILIES, recipe, save_pipeline

SD3 = {
    "sample_size": 128,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
}
SD3_5_MEDIUM = {"pos_embed_max_size": 384, "dual_attention_layers": tuple(range(13))}
T5: dict[str, Any] = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
CLIP_G: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
CLIP_L: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
QWEN_VL: dict[str, Any] = {
    "text_config": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
    },
    "tie_word_embeddings": False,
}
WAN_2_2_VAE: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


def _sd3(layers: int, **more: Any) -> SD3Transformer2DModel:
    sizes = {"num_layers": layers, "num_attention_heads": layers, "caption_projection_dim": 64 * layers}
    return SD3Transformer2DModel(
        **SD3, **sizes, pos_embed_max_size=more.pop("pos_embed_max_size", 192), **more
    )


def _wan(heads: int, layers: int, ffn_dim: int, channels: int = 16) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        num_attention_heads=heads,
        num_layers=layers,
        ffn_dim=ffn_dim,
        in_channels=channels,
        out_channels=channels,
    )


def _image_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _published(family: str, hub_id: str) -> int:
    return published.PUBLISHED[family][hub_id].transformer


@pytest.fixture
def flux_folder(tmp_path: Path) -> Path:
    return save_pipeline("flux", tmp_path / "flux")


@pytest.mark.parametrize(
    ("count", "build"),
    [
        (_published("qwen_image", "Qwen/Qwen-Image"), QwenImageTransformer2DModel),
        (
            _published("flux", "black-forest-labs/FLUX.1-dev"),
            lambda: FluxTransformer2DModel(guidance_embeds=True),
        ),
        (_published("flux", "black-forest-labs/FLUX.1-schnell"), FluxTransformer2DModel),
        (_published("sd3", "stabilityai/stable-diffusion-3-medium-diffusers"), lambda: _sd3(24)),
        (
            _published("sd3", "stabilityai/stable-diffusion-3.5-medium"),
            lambda: _sd3(24, qk_norm="rms_norm", **SD3_5_MEDIUM),
        ),
        (
            _published("sd3", "stabilityai/stable-diffusion-3.5-large"),
            lambda: _sd3(38, qk_norm="rms_norm"),
        ),
        (_published("wan", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"), lambda: _wan(12, 30, 8960)),
        (_published("wan", "Wan-AI/Wan2.1-T2V-14B-Diffusers"), lambda: _wan(40, 40, 13824)),
        (_published("wan", "Wan-AI/Wan2.2-TI2V-5B-Diffusers"), lambda: _wan(24, 30, 14336, 48)),
        (published.IMAGE_VAE, _image_vae),
        (published.VIDEO_VAE, AutoencoderKLQwenImage),
        (published.VIDEO_VAE, AutoencoderKLWan),
        (published.WAN_2_2_VAE, lambda: AutoencoderKLWan(**WAN_2_2_VAE)),
        (published.CLIP_L, lambda: CLIPTextModel(CLIPTextConfig(**CLIP_L))),
        (published.CLIP_L_PROJECTED, lambda: CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_L))),
        (published.CLIP_G, lambda: CLIPTextModelWithProjection(CLIPTextConfig(**CLIP_G))),
        (published.T5_XXL, lambda: T5EncoderModel(T5Config(vocab_size=32128, **T5))),
        (published.UMT5_XXL, lambda: UMT5EncoderModel(UMT5Config(vocab_size=256384, **T5))),
        (published.QWEN_VL_7B, lambda: Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**QWEN_VL))),
    ],
)
def test_published_counts_are_what_the_classes_count(
    count: int, build: Callable[[], torch.nn.Module]
) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build().parameters()) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folders_counts_are_what_is_loaded_from_it(tmp_path: Path, family: str) -> None:
    config = recipe(family, save_pipeline(family, tmp_path))
    model = build_model(config, "rollout")
    assert isinstance(model, DiffusersModel)

    def held(prefix: str) -> int:
        modules = [m for name, m in model.pipeline.components.items() if name.startswith(prefix) and m]
        return sum(tensor.numel() for module in modules for tensor in module.state_dict().values())

    size = model_size(config)
    assert size.transformer == held("transformer")
    assert size.vae == held("vae")
    # A tied embedding is one parameter under two names.
    assert size.text_encoders <= held("text_encoder") <= 2 * size.text_encoders
    assert size.source == f"files in {tmp_path}"
    heads = model.transformer.config.num_attention_heads
    assert (size.settings["num_attention_heads"], size.pixels_per_latent) == (heads, 8)


def test_a_second_copy_in_another_precision_is_not_counted(flux_folder: Path) -> None:
    alone = model_size(recipe("flux", flux_folder))
    weights = flux_folder / "transformer" / "diffusion_pytorch_model.safetensors"
    shutil.copy(weights, weights.with_name("diffusion_pytorch_model.fp16.safetensors"))
    shutil.copy(weights, weights.with_name("diffusion_pytorch_model.bf16-00001-of-00002.safetensors"))
    assert model_size(recipe("flux", flux_folder)) == alone


def test_a_name_that_says_nothing_is_taken_for_the_familys_first_model() -> None:
    other = model_size(recipe("sd3", Path("someone/finetune")))
    assert other.transformer == 2_243_171_520
    assert other.source == "someone/finetune taken for stabilityai/stable-diffusion-3.5-medium"
    known = model_size(recipe("sd3", Path("stabilityai/stable-diffusion-3.5-large")))
    assert (known.transformer, known.source) == (
        8_056_627_520,
        "published stabilityai/stable-diffusion-3.5-large",
    )


def test_a_cached_snapshot_is_counted_once_its_weights_are_there(
    flux_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--black-forest-labs--FLUX.1-dev"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    shutil.copytree(flux_folder, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    config = recipe("flux", Path("black-forest-labs/FLUX.1-dev"))
    size = model_size(config)
    assert (size.transformer, size.source) == (11_901_408_320, "published black-forest-labs/FLUX.1-dev")
    assert size.settings["num_attention_heads"] == 2
    shutil.copytree(flux_folder, snapshot, dirs_exist_ok=True)
    size = model_size(config)
    assert size.transformer == model_size(recipe("flux", flux_folder)).transformer
    assert size.source == "files in black-forest-labs/FLUX.1-dev"


@pytest.mark.parametrize(
    ("family", "path", "overrides", "expected"),
    [
        ("qwen_image", "published/model", {"height": 512, "width": 1024}, 2048),
        ("flux", "published/model", {"height": 1024, "width": 1024}, 4096),
        ("sd3", "published/model", {"height": 512, "width": 512}, 1024),
        ("wan", "published/model", {"height": 480, "width": 832, "frames": 33}, 9 * 30 * 52),
        (
            "wan",
            "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
            {"height": 704, "width": 1280, "frames": 121},
            31 * 22 * 40,
        ),
    ],
)
def test_image_tokens_at_a_resolution(
    family: str, path: str, overrides: dict[str, Any], expected: int
) -> None:
    config = recipe(family, Path(path), **overrides)
    assert image_tokens(config, model_size(config)) == expected


def test_a_folder_says_by_itself_how_much_its_vae_shrinks(tmp_path: Path) -> None:
    folder = save_pipeline("wan", tmp_path / "wan")
    config = recipe("wan", folder, height=64, width=96, frames=5)
    assert image_tokens(config, model_size(config)) == 2 * 4 * 6
    file = folder / "vae" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "scale_factor_spatial": 16}))
    assert image_tokens(config, model_size(config)) == 2 * 2 * 3


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    with pytest.raises(BadInputError, match=r"no safetensors in '.*transformer'"):
        model_size(recipe("flux", tmp_path))
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    for content in (b"abc", b"\xff" * 16, (4).to_bytes(8, "little") + b"{..}"):
        file.write_bytes(content)
        with pytest.raises(
            BadInputError, match=r"diffusion_pytorch_model.safetensors' is no whole safetensors file"
        ):
            model_size(recipe("flux", tmp_path))
    (tmp_path / "transformer" / "config.json").write_text("[1]")
    with pytest.raises(BadInputError, match=r"transformer/config.json is no JSON object"):
        model_size(recipe("flux", tmp_path))
