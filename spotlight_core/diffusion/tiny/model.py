"""The embedded model: diffusers' own QwenImage transformer at 1.4 M parameters, in pixel space.

It draws the quoted digits of a prompt as a 16 x 32 grey image.  The transformer is the very class
that Qwen-Image runs; only the text encoder (one-hot characters of the quoted target) and the VAE
(pixels, patched 8 x 8) are replaced by parameter-free stand-ins.

Shape legend: B batch, S image tokens (8), C channels per token (64), H height, W width.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file

from spotlight_core.data.prompts import quoted_target
from spotlight_core.diffusion.tiny.glyphs import ALPHABET, HEIGHT, MAX_CHARACTERS, WIDTH, check_text
from spotlight_core.errors import BadInputError

PATCH = 8
ROWS, COLUMNS = HEIGHT // PATCH, WIDTH // PATCH
TEXT_CHANNELS = 16  # one-hot characters, an end mark, unused
END = len(ALPHABET)
WEIGHTS = Path(__file__).parent / "tiny_qwen_image.safetensors"


def build_transformer() -> QwenImageTransformer2DModel:
    """The untrained transformer (1.41 M parameters); seed torch first for reproducible weights."""
    return QwenImageTransformer2DModel(
        patch_size=PATCH,
        in_channels=PATCH * PATCH,
        out_channels=1,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=TEXT_CHANNELS,
        axes_dims_rope=(8, 12, 12),
    )


def embed_text(texts: Sequence[str]) -> torch.Tensor:
    """One-hot characters, padded with an end mark: fp32 ``[B, 5, 16]``."""
    embedding = torch.zeros(len(texts), MAX_CHARACTERS + 1, TEXT_CHANNELS)
    for row, text in enumerate(texts):
        for column in range(MAX_CHARACTERS + 1):
            index = ALPHABET.index(text[column]) if column < len(text) else END
            embedding[row, column, index] = 1.0
    return embedding


def patchify(image_BHW: torch.Tensor) -> torch.Tensor:
    """``[B, 16, 32]`` pixels to ``[B, 8, 64]`` tokens."""
    batch = image_BHW.shape[0]
    grid = image_BHW.reshape(batch, ROWS, PATCH, COLUMNS, PATCH).permute(0, 1, 3, 2, 4)
    return grid.reshape(batch, ROWS * COLUMNS, PATCH * PATCH)


def unpatchify(x_BSC: torch.Tensor) -> torch.Tensor:
    """The inverse of ``patchify``."""
    batch = x_BSC.shape[0]
    grid = x_BSC.reshape(batch, ROWS, COLUMNS, PATCH, PATCH).permute(0, 1, 3, 2, 4)
    return grid.reshape(batch, HEIGHT, WIDTH)


class TinyQwenImage:
    """The embedded model behind the ``DiffusionModel`` protocol."""

    latent_shape_SC = (ROWS * COLUMNS, PATCH * PATCH)

    def __init__(self, transformer: QwenImageTransformer2DModel) -> None:
        self.transformer = transformer

    @classmethod
    def from_pretrained(cls, weights: Path = WEIGHTS) -> "TinyQwenImage":
        """Build and load safetensors weights; BadInputError when the file is missing."""
        if not weights.is_file():
            raise BadInputError(
                f"no model weights at {weights}", "run `spotlight pretrain-tiny` to make them"
            )
        model = cls(build_transformer())
        model.load_weights(load_file(weights))
        return model

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the transformer's weights in place; every key must match."""
        self.transformer.load_state_dict(weights, strict=True)

    def save_weights(self, path: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.transformer.state_dict().items()}, path)

    def encode(self, prompts: Sequence[str]) -> torch.Tensor:
        return embed_text([check_text(quoted_target(prompt)) for prompt in prompts])

    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.transformer(
            hidden_states=x_BSC,
            timestep=sigma_B,
            encoder_hidden_states=text,
            img_shapes=[[(1, ROWS, COLUMNS)]] * x_BSC.shape[0],
            return_dict=False,
        )[0]

    def decode(self, x_BSC: torch.Tensor) -> np.ndarray:
        grey = ((unpatchify(x_BSC).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()
        return np.repeat(grey[..., None], 3, axis=-1)
