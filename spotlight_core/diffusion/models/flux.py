"""FLUX.1: packed latents; the guidance is an input of the distilled transformer, no negative prompt.

Shape legend: B batch, S latent tokens (H/16 * W/16), C channels per token (64), L text tokens.
"""

import torch

from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.models.packed import PackedModel


class Flux(PackedModel):
    """FLUX.1 behind the ``DiffusionModel`` protocol."""

    def _embed(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """T5 tokens, padded and not masked, as the model was trained; CLIP's pooled output."""
        tokens_BLD, pooled_BD, _ = self.pipeline.encode_prompt(
            prompt, device=self.device, max_sequence_length=self._config.max_text_tokens
        )
        return tokens_BLD, pooled_BD

    def _forward(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        rows, columns = self._grid
        guidance_B = None
        if self.transformer.config.guidance_embeds:
            guidance_B = torch.full_like(sigma_B, self._config.guidance)
        return self.transformer(
            hidden_states=x_BSC,
            timestep=sigma_B,
            guidance=guidance_B,
            pooled_projections=text.pooled_BD,
            encoder_hidden_states=text.tokens_BLD,
            txt_ids=torch.zeros(text.tokens_BLD.shape[1], 3, device=x_BSC.device),
            img_ids=self.pipeline._prepare_latent_image_ids(1, rows, columns, x_BSC.device, torch.float32),
            return_dict=False,
        )[0]

    def _guide(self, v_BSC: torch.Tensor, v_negative_BSC: torch.Tensor) -> torch.Tensor:
        raise ValueError("FLUX embeds its guidance: give no negative embeddings")

    def _decoded(self, x_BSC: torch.Tensor) -> torch.Tensor:
        vae = self.pipeline.vae
        latents = self._unpacked(x_BSC) / vae.config.scaling_factor + vae.config.shift_factor
        return vae.decode(latents, return_dict=False)[0]
