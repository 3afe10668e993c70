"""How large a model is, told before anything is loaded: for `--dry-run`, and for planning memory.

Counts come from the safetensors headers where the model is a local folder, else from this table of
published models, each equal to what diffusers' and transformers' classes count at the published
configuration.  Without torch.
"""

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from spotlight_core.config.model import DiffusersModelConfig, TinyModelConfig, WanConfig
from spotlight_core.errors import BadInputError

CLIP_L, CLIP_L_PROJECTED, CLIP_G = 123_060_480, 123_650_304, 694_659_840
T5_XXL, UMT5_XXL, QWEN_VL_7B = 4_762_310_656, 5_680_910_336, 8_292_166_656
IMAGE_VAE, VIDEO_VAE, WAN_2_2_VAE = 83_819_683, 126_892_531, 704_688_668
TINY = 1_405_840
MAX_HEADER_BYTES = 100_000_000  # as the safetensors format allows


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Parameters of the parts; ``source`` says whose count it is: a folder, a published model, or the
    published model of the family that a name comes closest to."""

    transformer: int
    text_encoders: int
    vae: int
    source: str

    @property
    def total(self) -> int:
        return self.transformer + self.text_encoders + self.vae


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSize:
    """``tokens`` S and ``channels`` C of a latent as samplers see it; ``attended``: image tokens of the
    transformer's attention, fewer where it patches the latent itself."""

    tokens: int
    channels: int
    attended: int


_SD3_TEXT = CLIP_L_PROJECTED + CLIP_G + T5_XXL
_PUBLISHED: Mapping[str, Mapping[str, tuple[int, int, int]]] = {
    "qwen_image": {"Qwen/Qwen-Image": (20_430_401_088, QWEN_VL_7B, VIDEO_VAE)},
    "flux": {
        "black-forest-labs/FLUX.1-dev": (11_901_408_320, CLIP_L + T5_XXL, IMAGE_VAE),
        "black-forest-labs/FLUX.1-schnell": (11_891_178_560, CLIP_L + T5_XXL, IMAGE_VAE),
    },
    "sd3": {
        "stabilityai/stable-diffusion-3.5-medium": (2_243_171_520, _SD3_TEXT, IMAGE_VAE),
        "stabilityai/stable-diffusion-3.5-large": (8_056_627_520, _SD3_TEXT, IMAGE_VAE),
        "stabilityai/stable-diffusion-3-medium-diffusers": (2_028_328_000, _SD3_TEXT, IMAGE_VAE),
    },
    "wan": {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (1_418_996_800, UMT5_XXL, VIDEO_VAE),
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": (14_288_491_584, UMT5_XXL, VIDEO_VAE),
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (4_999_787_712, UMT5_XXL, WAN_2_2_VAE),
    },
}
# Per family: pixels of a latent pixel, its channels, and latent pixels of a patch, each side.
_LATENTS = {"qwen_image": (8, 16, 2), "flux": (8, 16, 2), "sd3": (8, 16, 2), "wan": (8, 16, 2)}
_PACKED = ("qwen_image", "flux")
_VARIANT = re.compile(r"\.(fp16|bf16|fp32)[.-]")  # a second copy of the same weights, never loaded here
_WAN_5B = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
_WAN_FRAMES_PER_LATENT = 4


def model_size(config: TinyModelConfig | DiffusersModelConfig) -> ModelSize:
    """The parameter counts of the recipe's model; the family's first published one where its name says
    nothing (``source`` tells).

    Raises:
        BadInputError: a local folder without safetensors, or with damaged ones.
    """
    if isinstance(config, TinyModelConfig):
        return ModelSize(transformer=TINY, text_encoders=0, vae=0, source="the embedded model")
    folder = Path(config.path)
    if folder.is_dir():
        parts = {part.name: _folder_parameters(part) for part in folder.iterdir() if part.is_dir()}
        if not parts.get("transformer"):
            raise BadInputError(
                f"no safetensors in {str(folder / 'transformer')!r}",
                "give a whole pipeline in diffusers' format",
            )
        return ModelSize(
            transformer=parts["transformer"],
            text_encoders=sum(count for name, count in parts.items() if name.startswith("text_encoder")),
            vae=parts.get("vae", 0),
            source=f"files in {config.path}",
        )
    published = _PUBLISHED[_family(config)]
    known = config.path in published
    name = config.path if known else next(iter(published))
    transformer, text_encoders, vae = published[name]
    source = f"published {name}" if known else f"{config.path} taken for {name}"
    return ModelSize(transformer=transformer, text_encoders=text_encoders, vae=vae, source=source)


def latent_size(config: DiffusersModelConfig) -> LatentSize:
    """Latent tokens at the recipe's resolution and frames, for the published VAE and patch of the family."""
    family = _family(config)
    pixels, channels, patch = _LATENTS[family]
    if config.path == _WAN_5B:
        pixels, channels = 16, 48
    frames = (config.frames - 1) // _WAN_FRAMES_PER_LATENT + 1 if isinstance(config, WanConfig) else 1
    latent_pixels = frames * (config.height // pixels) * (config.width // pixels)
    attended = latent_pixels // patch**2
    if family in _PACKED:
        return LatentSize(tokens=attended, channels=channels * patch**2, attended=attended)
    return LatentSize(tokens=latent_pixels, channels=channels, attended=attended)


def _family(config: DiffusersModelConfig) -> str:
    return str(config.type)  # type: ignore[attr-defined]  # every family's section has one


def _folder_parameters(folder: Path) -> int:
    """Parameters in a component's safetensors; buffers that are saved beside them count too."""
    files = [file for file in sorted(folder.glob("*.safetensors")) if not _VARIANT.search(file.name)]
    return sum(_header_parameters(file) for file in files)


def _header_parameters(file: Path) -> int:
    """The format is a length (8 bytes, little-endian), then JSON of names to dtype, shape and place."""
    try:
        with file.open("rb") as data:
            (length,) = struct.unpack("<Q", data.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(data.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise BadInputError(
            f"{str(file)!r} is no safetensors file ({error})", "copy the model again"
        ) from error
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
