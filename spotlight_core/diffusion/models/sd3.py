"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206): latent pixels as tokens, classifier-free guidance.

Shape legend: B batch, S latent pixels (H/8 * W/8), C channels per latent pixel (16), L text tokens.
"""

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift

from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.models.diffusers_model import DiffusersModel

TRAINING_TIMESTEPS = 1000


class SD3(DiffusersModel):
    """Stable Diffusion 3 and 3.5 behind the ``DiffusionModel`` protocol."""

    @property
    def _pixel_multiple(self) -> int:
        return int(self.pipeline.vae_scale_factor) * int(self.pipeline.patch_size)

    @property
    def _grid(self) -> tuple[int, int]:
        """Rows and columns of latent pixels."""
        scale = int(self.pipeline.vae_scale_factor)
        return self._config.height // scale, self._config.width // scale

    def native_latents(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """``[B, C, H/8, W/8]``."""
        return x_BSC.transpose(1, 2).unflatten(2, self._grid)

    def _embed(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """CLIP's 77 tokens, then T5's, padded and not masked, as the model was trained."""
        tokens_BLD, _, pooled_BD, _ = self.pipeline.encode_prompt(
            prompt,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self._config.max_text_tokens,
        )
        return tokens_BLD, pooled_BD

    def _forward(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        v_BCHW = self.transformer(
            hidden_states=self.native_latents(x_BSC),
            timestep=sigma_B * TRAINING_TIMESTEPS,
            encoder_hidden_states=text.tokens_BLD,
            pooled_projections=text.pooled_BD,
            return_dict=False,
        )[0]
        return v_BCHW.flatten(2).transpose(1, 2)

    def _decoded(self, x_BSC: torch.Tensor) -> torch.Tensor:
        vae = self.pipeline.vae
        latents = self.native_latents(x_BSC) / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(latents, return_dict=False)[0]

    def _set_timesteps(self, denoise_steps: int) -> None:
        scheduler, patch = self.pipeline.scheduler, self.transformer.config.patch_size
        mu = None
        if scheduler.config.get("use_dynamic_shifting"):
            mu = calculate_shift(
                (self._grid[0] // patch) * (self._grid[1] // patch),
                scheduler.config.get("base_image_seq_len", 256),
                scheduler.config.get("max_image_seq_len", 4096),
                scheduler.config.get("base_shift", 0.5),
                scheduler.config.get("max_shift", 1.16),
            )
        scheduler.set_timesteps(denoise_steps, mu=mu)
