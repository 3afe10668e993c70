"""Latents packed in 2 x 2 patches, and the dynamic shift that goes with them: Qwen-Image and FLUX.

Shape legend: B batch, S latent tokens (H/16 * W/16), C channels per token (4 times the VAE's).
"""

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from spotlight_core.diffusion.models.diffusers_model import DiffusersModel


class PackedModel(DiffusersModel):
    """A token is a 2 x 2 patch of latent pixels, in the order of the pipeline's ``_pack_latents``."""

    @property
    def _pixel_multiple(self) -> int:
        return int(self.pipeline.vae_scale_factor) * 2

    @property
    def _grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self._config.height // self._pixel_multiple, self._config.width // self._pixel_multiple

    def native_latents(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """The pipelines take packed tokens as they are."""
        return x_BSC

    def _unpacked(self, x_BSC: torch.Tensor) -> torch.Tensor:
        return self.pipeline._unpack_latents(
            x_BSC, self._config.height, self._config.width, self.pipeline.vae_scale_factor
        )

    def _set_timesteps(self, denoise_steps: int) -> None:
        scheduler = self.pipeline.scheduler
        mu = calculate_shift(
            self.latent_shape_SC[0],
            scheduler.config.get("base_image_seq_len", 256),
            scheduler.config.get("max_image_seq_len", 4096),
            scheduler.config.get("base_shift", 0.5),
            scheduler.config.get("max_shift", 1.15),
        )
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / denoise_steps, denoise_steps), mu=mu)
