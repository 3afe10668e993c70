"""The model section: which diffusion transformer, what of it is trained, and in which precision."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from spotlight_core.config.section import Name, Section

Dtype = Literal["fp32", "bf16"]
SIZE_MULTIPLE = 16  # a VAE's 8 pixels, in patches of 2 x 2, in every family; a larger VAE wants more


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685) through PEFT; the base weights stay as they are."""

    rank: int = Field(32, ge=1, le=1024)
    """Rank r of the adapters."""
    alpha: float = Field(64.0, gt=0)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    target_modules: tuple[Name, ...] = ()
    """Suffixes of the linear layers to adapt; the family's attention layers when empty."""


class ModelSection(Section):
    """What all models share."""

    lora: LoraConfig | None = None
    """Train adapters of these shapes; all weights when absent."""
    rollout_dtype: Dtype = "fp32"
    """Weights of rollout and evaluation; latents and log-probabilities are fp32 whatever it is."""
    training_dtype: Dtype = "fp32"
    """Frozen weights and activations of training; trained weights and gradients are fp32 whatever it is."""


class TinyModelConfig(ModelSection):
    type: Literal["tiny"] = "tiny"
    """The embedded model."""
    weights: Path | None = None
    """Safetensors to start from; the shipped base weights when absent."""


class DiffusersModelConfig(ModelSection):
    """A model in diffusers' format."""

    path: Name
    """Hub id or local folder, as ``from_pretrained`` takes it."""
    revision: Name | None = None
    """Hub revision; the newest when absent."""
    height: int = Field(512, ge=SIZE_MULTIPLE, multiple_of=SIZE_MULTIPLE)
    """Pixels of an image, top to bottom."""
    width: int = Field(512, ge=SIZE_MULTIPLE, multiple_of=SIZE_MULTIPLE)
    """Pixels of an image, side to side."""
    negative_prompt: str = ""
    """What classifier-free guidance leads away from."""
    max_text_tokens: int = Field(256, ge=8, le=512)
    """Longer prompts are cut."""


class QwenImageConfig(DiffusersModelConfig):
    type: Literal["qwen_image"]
    """Qwen-Image (arXiv 2508.02324)."""
    max_text_tokens: int = Field(256, ge=8, le=1024)
    """Longer prompts are cut."""
    guidance: float = Field(4.0, ge=1)
    """True-CFG scale with the norm kept; 1 for none."""


class FluxConfig(DiffusersModelConfig):
    type: Literal["flux"]
    """FLUX.1-dev."""
    guidance: float = Field(3.5, ge=0)
    """The distilled guidance that the transformer takes as an input."""

    @model_validator(mode="after")
    def _no_negative_prompt(self) -> "FluxConfig":
        if self.negative_prompt:
            raise ValueError(
                f"negative_prompt = {self.negative_prompt!r} has no use in FLUX, whose guidance is distilled "
                "into the transformer: leave it out"
            )
        return self


class SD3Config(DiffusersModelConfig):
    type: Literal["sd3"]
    """Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""
    guidance: float = Field(4.5, ge=1)
    """Classifier-free guidance scale; 1 for none."""


class WanConfig(DiffusersModelConfig):
    type: Literal["wan"]
    """Wan 2.1 and 2.2 text-to-video, one transformer (arXiv 2503.20314)."""
    guidance: float = Field(5.0, ge=1)
    """Classifier-free guidance scale; 1 for none."""
    frames: int = Field(33, ge=1)
    """Frames of a video: one more than a multiple of four."""

    @model_validator(mode="after")
    def _whole_latent_frames(self) -> "WanConfig":
        if self.frames % 4 != 1:
            raise ValueError(f"frames = {self.frames} is not 4 n + 1: give 1, 5, 9, ...")
        return self


FamilyConfig = QwenImageConfig | FluxConfig | SD3Config | WanConfig
"""A diffusers model of any family."""
ModelConfig = Annotated[TinyModelConfig | FamilyConfig, Field(discriminator="type")]
