"""What the families share: loading, text, precision, guidance and decoding around a diffusers pipeline.

A family says how its transformer is called, how its latents are laid out, and what its guidance is.

Shape legend: B batch, S latent tokens, C channels per token, L text tokens, D text channels,
F frames, H height, W width.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from spotlight_core.config.model import FamilyConfig
from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.models.families import FAMILIES, guided
from spotlight_core.diffusion.models.loading import load_pipeline
from spotlight_core.diffusion.models.precision import Role, ordinary_tensors, precision
from spotlight_core.diffusion.models.text_cache import PromptEmbedding, TextCache, stack
from spotlight_core.diffusion.models.trainable import prepare_policy
from spotlight_core.diffusion.noise_schedule import NoiseSchedule
from spotlight_core.errors import BadInputError

CACHED_PROMPTS = 512  # up to 4 MB each in bf16 (FLUX, 512 tokens of 4,096 channels)
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
FIRST_SIGMA_TOLERANCE = 1e-5


class DiffusersModel(ABC):
    """A diffusers pipeline behind the ``DiffusionModel`` protocol.

    Tensors that come in may be on any device; a velocity comes back on its latents' device.  Embeddings
    are kept on the CPU.
    """

    def __init__(self, config: FamilyConfig, role: Role, gradient_checkpointing: bool = False) -> None:
        """The family's pipeline is loaded here, on the CPU; what draws moves to the GPU where there is one.

        Raises:
            BadInputError: see ``build_model``.
        """
        self._config = config
        self._precision = precision(config, role)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtypes = {
            "transformer": self._precision.weights,
            "vae": torch.float32,  # rewards look at pixels: they should see no rounding to 8 bits of mantissa
            "default": self._precision.compute,
        }
        self.pipeline = load_pipeline(config, dtypes)
        self._freeze()
        self.transformer = self.pipeline.transformer
        targets = FAMILIES[config.type].lora_targets
        prepare_policy(self.transformer, config, role, targets, gradient_checkpointing)
        self.transformer.to(self.device)
        self._check_size()
        self.latent_shape_SC = (math.prod(self._grid), int(self.transformer.config.in_channels))
        self._text = TextCache(self._embed_alone, CACHED_PROMPTS)

    def encode(self, prompts: Sequence[str]) -> TextEmbeddings:
        """See ``DiffusionModel``; tensors on the CPU, in the dtype of the text encoders."""
        with ordinary_tensors():
            negative = None
            if guided(self._config):
                negative = stack([self._text.get(self._config.negative_prompt)] * len(prompts))
            return stack([self._text.get(prompt) for prompt in prompts], negative)

    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        """See ``DiffusionModel``; on the device of ``x_BSC``.

        With guidance these are two forwards, not one of 2B rows: the rows stay independent, negative
        prompts may have another length, and activations take half the memory at a time.
        """
        dtype = self._precision.inputs
        with ordinary_tensors(), self._precision.around(self.device):
            x, sigma = x_BSC.to(self.device, dtype), sigma_B.to(self.device, torch.float32)
            v = self._forward(x, sigma, _moved(text, self.device, dtype)).float()
            if text.negative is not None:
                v_negative = self._forward(x, sigma, _moved(text.negative, self.device, dtype)).float()
                v = self._guide(v, v_negative)
        return v.to(x_BSC.device)

    def decode(self, x_BSC: torch.Tensor) -> np.ndarray:
        """See ``DiffusionModel``: ``round(clip(x / 2 + 1/2) * 255)``."""
        return self.pixels(x_BSC).mul(255).round().to(torch.uint8).movedim(1, -1).cpu().numpy()

    @torch.no_grad()
    def pixels(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """Images ``[B, 3, H, W]`` or videos ``[B, 3, F, H, W]`` in 0..1, fp32.

        One row at a time: a row's image does not depend on its neighbours, and memory stays bounded.
        """
        with ordinary_tensors():
            self.pipeline.vae.to(self.device)  # a trainer never decodes and so never moves it
            rows = [self._decoded(row.to(self.device, torch.float32)) for row in x_BSC.split(1)]
            return (torch.cat(rows) / 2 + 0.5).clamp(0, 1)

    def sigmas(self, denoise_steps: int, shift: float | None) -> np.ndarray:
        """See ``DiffusionModel``; without ``shift`` what the stock pipeline visits at this resolution.

        Raises:
            BadInputError: a scheduler whose sigmas are not those of a flow from 1 to 0.
        """
        if shift is not None:
            return NoiseSchedule(denoise_steps=denoise_steps, shift=shift).sigmas()
        self._set_timesteps(denoise_steps)
        sigmas = self.pipeline.scheduler.sigmas.cpu().numpy().astype(np.float32)
        # UniPC keeps 1e-6 off the first sigma against a logarithm of 0 of its own; the noise is at 1.
        if abs(sigmas[0] - 1.0) < FIRST_SIGMA_TOLERANCE:
            sigmas[0] = 1.0
        if (sigmas[0], sigmas[-1]) != (1.0, 0.0) or len(sigmas) != denoise_steps + 1:
            raise BadInputError(
                f"the {type(self.pipeline.scheduler).__name__} of {self._config.path!r} goes from "
                f"{sigmas[0]:g} to {sigmas[-1]:g} in {len(sigmas) - 1} steps, "
                f"not from 1 to 0 in {denoise_steps}",
                "set sampler.shift",
            )
        return sigmas

    @abstractmethod
    def native_latents(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """Tokens in the layout that the stock pipeline takes as ``latents``."""

    # -- what a family says -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def _grid(self) -> tuple[int, ...]:
        """Tokens along each axis: rows and columns, before them the frames of a video."""

    @property
    @abstractmethod
    def _pixel_multiple(self) -> int:
        """What height and width must be multiples of."""

    @abstractmethod
    def _embed(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Token embeddings ``[1, L, D]`` without padding that a mask would hide, and pooled ``[1, D]``."""

    @abstractmethod
    def _forward(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        """The transformer's output as ``[B, S, C]``, without guidance."""

    def _guide(self, v_BSC: torch.Tensor, v_negative_BSC: torch.Tensor) -> torch.Tensor:
        """The guided velocity: ``v₋ + w (v₊ - v₋)``, classifier-free guidance (arXiv 2207.12598)."""
        return v_negative_BSC + self._config.guidance * (v_BSC - v_negative_BSC)

    @abstractmethod
    def _decoded(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """The VAE's output in -1..1, ``[B, 3, H, W]`` or ``[B, 3, F, H, W]``."""

    @abstractmethod
    def _set_timesteps(self, denoise_steps: int) -> None:
        """Set the scheduler's timesteps as the stock pipeline does."""

    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(part for part in self.pipeline.components.values() if isinstance(part, nn.Module))

    # -- shared -----------------------------------------------------------------------------------------

    def _freeze(self) -> None:
        self.pipeline.vae.eval().requires_grad_(False)
        for name in TEXT_ENCODERS:
            encoder = getattr(self.pipeline, name, None)
            if encoder is not None:
                encoder.eval().requires_grad_(False).to(self.device)

    def _check_size(self) -> None:
        for name in ("height", "width"):
            pixels, multiple = getattr(self._config, name), self._pixel_multiple
            if pixels % multiple:
                below = pixels // multiple * multiple
                choice = f"{below} or {below + multiple}" if below else f"{multiple}"
                raise BadInputError(
                    f"model.{name} = {pixels} is no multiple of {multiple}",
                    f"give {choice}",
                )

    @torch.no_grad()
    def _embed_alone(self, prompt: str) -> PromptEmbedding:
        tokens_BLD, pooled_BD = self._embed(prompt)
        return PromptEmbedding(
            tokens_LD=tokens_BLD[0].cpu(), pooled_D=None if pooled_BD is None else pooled_BD[0].cpu()
        )


def _moved(text: TextEmbeddings, device: torch.device, dtype: torch.dtype) -> TextEmbeddings:
    """Without the negative prompt."""
    return TextEmbeddings(
        tokens_BLD=text.tokens_BLD.to(device, dtype),
        mask_BL=None if text.mask_BL is None else text.mask_BL.to(device),
        pooled_BD=None if text.pooled_BD is None else text.pooled_BD.to(device, dtype),
    )
