"""Wan 2.1 and 2.2 text-to-video (arXiv 2503.20314), one transformer: latent pixels of all frames as tokens.

Shape legend: B batch, S latent pixels (F * H/8 * W/8 with F latent frames), C channels per latent
pixel (16), L text tokens.
"""

import torch

from spotlight_core.config.model import WanConfig
from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.models.diffusers_model import DiffusersModel

TRAINING_TIMESTEPS = 1000


class Wan(DiffusersModel):
    """Wan text-to-video behind the ``DiffusionModel`` protocol; ``decode`` gives videos."""

    _config: WanConfig

    @property
    def _pixel_multiple(self) -> int:
        return int(self.pipeline.vae_scale_factor_spatial) * int(self.transformer.config.patch_size[1])

    @property
    def _grid(self) -> tuple[int, int, int]:
        """Latent frames, rows and columns of latent pixels."""
        scale = int(self.pipeline.vae_scale_factor_spatial)
        frames = (self._config.frames - 1) // int(self.pipeline.vae_scale_factor_temporal) + 1
        return frames, self._config.height // scale, self._config.width // scale

    def native_latents(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """``[B, C, F, H/8, W/8]``."""
        return x_BSC.transpose(1, 2).unflatten(2, self._grid)

    def _embed(self, prompt: str) -> tuple[torch.Tensor, None]:
        """UMT5 tokens, zeros where the prompt has ended, not masked, as the model was trained."""
        tokens_BLD, _ = self.pipeline.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self._config.max_text_tokens,
        )
        return tokens_BLD, None

    def _forward(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        """Also for the model whose pipeline gives each token its timestep: in text-to-video all are equal."""
        v_BCFHW = self.transformer(
            hidden_states=self.native_latents(x_BSC),
            timestep=sigma_B * TRAINING_TIMESTEPS,
            encoder_hidden_states=text.tokens_BLD,
            return_dict=False,
        )[0]
        return v_BCFHW.flatten(2).transpose(1, 2)

    def _decoded(self, x_BSC: torch.Tensor) -> torch.Tensor:
        vae = self.pipeline.vae
        mean, std = (
            torch.tensor(values, device=x_BSC.device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return vae.decode(self.native_latents(x_BSC) * std + mean, return_dict=False)[0]

    def _set_timesteps(self, denoise_steps: int) -> None:
        self.pipeline.scheduler.set_timesteps(denoise_steps)
