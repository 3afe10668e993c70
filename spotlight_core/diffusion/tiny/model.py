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
from torch import nn

from spotlight_core.config.model import TinyModelConfig
from spotlight_core.data.prompts import quoted_target
from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.models.families import MMDIT_ATTENTION
from spotlight_core.diffusion.models.precision import Precision, Role, ordinary_tensors, precision
from spotlight_core.diffusion.models.trainable import prepare_policy
from spotlight_core.diffusion.noise_schedule import NoiseSchedule
from spotlight_core.diffusion.tiny.glyphs import ALPHABET, HEIGHT, MAX_CHARACTERS, WIDTH, check_text
from spotlight_core.errors import BadInputError

PATCH = 8
ROWS, COLUMNS = HEIGHT // PATCH, WIDTH // PATCH
TEXT_CHANNELS = 16  # one-hot characters, an end mark, unused
END = len(ALPHABET)
WEIGHTS = Path(__file__).parent / "tiny_qwen_image.safetensors"
FP32 = precision(TinyModelConfig(), "training")


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

    def __init__(self, transformer: QwenImageTransformer2DModel, precision: Precision | None = None) -> None:
        """``precision`` is fp32 when absent."""
        self.transformer = transformer
        self._precision = precision or FP32

    @classmethod
    def from_config(
        cls, config: TinyModelConfig, role: Role, gradient_checkpointing: bool = False
    ) -> "TinyQwenImage":
        """The recipe's model with its base weights, and LoRA where the recipe has one.

        Raises:
            BadInputError: missing weights, or a LoRA target that the transformer does not have.
        """
        asked = precision(config, role)
        model = cls.from_pretrained(config.weights or WEIGHTS)
        transformer = model.transformer
        if asked.weights is not torch.float32:
            transformer = transformer.to(asked.weights)
        prepare_policy(transformer, config, role, MMDIT_ATTENTION, gradient_checkpointing)
        return cls(transformer, asked)

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

    def modules(self) -> tuple[nn.Module, ...]:
        return (self.transformer,)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the transformer's weights in place; every key must match."""
        self.transformer.load_state_dict(weights, strict=True)

    def save_weights(self, path: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.transformer.state_dict().items()}, path)

    def encode(self, prompts: Sequence[str]) -> TextEmbeddings:
        texts = [check_text(quoted_target(prompt)) for prompt in prompts]
        return TextEmbeddings(tokens_BLD=embed_text(texts))

    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        dtype = self._precision.inputs
        with ordinary_tensors(), self._precision.around(x_BSC.device):
            v_BSC = self.transformer(
                hidden_states=x_BSC.to(dtype),
                timestep=sigma_B,
                encoder_hidden_states=text.tokens_BLD.to(dtype),
                img_shapes=[[(1, ROWS, COLUMNS)]] * x_BSC.shape[0],
                return_dict=False,
            )[0]
        return v_BSC.float()

    def sigmas(self, denoise_steps: int, shift: float | None) -> np.ndarray:
        return NoiseSchedule(denoise_steps=denoise_steps, shift=shift or 1.0).sigmas()

    def decode(self, x_BSC: torch.Tensor) -> np.ndarray:
        grey = ((unpatchify(x_BSC).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()
        return np.repeat(grey[..., None], 3, axis=-1)
