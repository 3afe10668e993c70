"""Published models: what plans take for a model whose files are not here.

Each count is what diffusers' and transformers' classes count at the published configuration.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]
"""A transformer's own, by diffusers' names, as in ``transformer/config.json``."""

CLIP_L, CLIP_L_PROJECTED, CLIP_G = 123_060_480, 123_650_304, 694_659_840
T5_XXL, UMT5_XXL, QWEN_VL_7B = 4_762_310_656, 5_680_910_336, 8_292_166_656
IMAGE_VAE, VIDEO_VAE, WAN_2_2_VAE = 83_819_683, 126_892_531, 704_688_668


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters of the parts, and the settings of the transformer that its layers follow from.

    ``pixels_per_latent``: pixels of a latent pixel, each side.  ``source`` says whose size it is: that of
    files, of a published model, or of the published model that an unknown one is taken for.
    """

    settings: Settings
    transformer: int
    text_encoders: int
    vae: int
    pixels_per_latent: int = 8
    source: str = "published"


def _settings(layers: int, heads: int, channels: int, **more: Any) -> Settings:
    return {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": channels, **more}


_FLUX = _settings(19, 24, 128, num_single_layers=38)
_SD3 = _settings(24, 24, 64)
_FLUX_TEXT, _SD3_TEXT = CLIP_L + T5_XXL, CLIP_L_PROJECTED + CLIP_G + T5_XXL

PUBLISHED: Mapping[str, Mapping[str, ModelSize]] = {
    "qwen_image": {
        "Qwen/Qwen-Image": ModelSize(
            settings=_settings(60, 24, 128),
            transformer=20_430_401_088,
            text_encoders=QWEN_VL_7B,
            vae=VIDEO_VAE,
        )
    },
    "flux": {
        "black-forest-labs/FLUX.1-dev": ModelSize(
            settings=_FLUX,
            transformer=11_901_408_320,
            text_encoders=_FLUX_TEXT,
            vae=IMAGE_VAE,
        ),
        "black-forest-labs/FLUX.1-schnell": ModelSize(
            settings=_FLUX,
            transformer=11_891_178_560,
            text_encoders=_FLUX_TEXT,
            vae=IMAGE_VAE,
        ),
    },
    "sd3": {
        "stabilityai/stable-diffusion-3.5-medium": ModelSize(
            settings={**_SD3, "dual_attention_layers": tuple(range(13))},
            transformer=2_243_171_520,
            text_encoders=_SD3_TEXT,
            vae=IMAGE_VAE,
        ),
        "stabilityai/stable-diffusion-3.5-large": ModelSize(
            settings=_settings(38, 38, 64),
            transformer=8_056_627_520,
            text_encoders=_SD3_TEXT,
            vae=IMAGE_VAE,
        ),
        "stabilityai/stable-diffusion-3-medium-diffusers": ModelSize(
            settings=_SD3,
            transformer=2_028_328_000,
            text_encoders=_SD3_TEXT,
            vae=IMAGE_VAE,
        ),
    },
    "wan": {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": ModelSize(
            settings=_settings(30, 12, 128, ffn_dim=8960),
            transformer=1_418_996_800,
            text_encoders=UMT5_XXL,
            vae=VIDEO_VAE,
        ),
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": ModelSize(
            settings=_settings(40, 40, 128, ffn_dim=13824),
            transformer=14_288_491_584,
            text_encoders=UMT5_XXL,
            vae=VIDEO_VAE,
        ),
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": ModelSize(
            settings=_settings(30, 24, 128, ffn_dim=14336),
            transformer=4_999_787_712,
            text_encoders=UMT5_XXL,
            vae=WAN_2_2_VAE,
            pixels_per_latent=16,
        ),
    },
}
"""By family and hub id; the one that stands for the family first."""
