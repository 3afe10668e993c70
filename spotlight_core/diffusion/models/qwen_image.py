"""Qwen-Image (arXiv 2508.02324): packed latents, a masked prompt, true CFG that keeps the norm.

Shape legend: B batch, S latent tokens (H/16 * W/16), C channels per token (64), L text tokens.
"""

import torch

from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.models.packed import PackedModel


class QwenImage(PackedModel):
    """Qwen-Image behind the ``DiffusionModel`` protocol."""

    def _embed(self, prompt: str) -> tuple[torch.Tensor, None]:
        tokens_BLD, _ = self.pipeline.encode_prompt(
            prompt, device=self.device, max_sequence_length=self._config.max_text_tokens
        )
        return tokens_BLD, None

    def _forward(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        rows, columns = self._grid
        return self.transformer(
            hidden_states=x_BSC,
            timestep=sigma_B,
            encoder_hidden_states=text.tokens_BLD,
            encoder_hidden_states_mask=text.mask_BL,
            img_shapes=[[(1, rows, columns)]] * x_BSC.shape[0],
            return_dict=False,
        )[0]

    def _guide(self, v_BSC: torch.Tensor, v_negative_BSC: torch.Tensor) -> torch.Tensor:
        """``c = v₋ + w (v₊ - v₋)``, then ``c ‖v₊‖ / ‖c‖`` over a token's channels."""
        combined = super()._guide(v_BSC, v_negative_BSC)
        norms = torch.norm(v_BSC, dim=-1, keepdim=True), torch.norm(combined, dim=-1, keepdim=True)
        return combined * (norms[0] / norms[1])

    def _decoded(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """The VAE is a video's: an image is its first and only frame."""
        vae = self.pipeline.vae
        mean, std = (
            torch.tensor(values, device=x_BSC.device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return vae.decode(self._unpacked(x_BSC) * std + mean, return_dict=False)[0][:, :, 0]
