"""Pretraining of the embedded model: `spotlight pretrain-tiny`.

Flow matching on drawn digit strings.  A share of the caption's characters is replaced at random, so
the base model draws sharp but often wrong digits: that is the headroom RL closes.

Shape legend: B batch, S image tokens, C channels per token.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.tiny.glyphs import draw
from spotlight_core.diffusion.tiny.model import (
    ALPHABET,
    MAX_CHARACTERS,
    TinyQwenImage,
    build_transformer,
    embed_text,
    patchify,
)
from spotlight_core.philox import named_generator

BATCH = 64
LEARNING_RATE = 2e-3
EMA_DECAY = 0.995
MIN_CHARACTERS = 2
DEFAULT_OPTIMIZER_STEPS = 2000
DEFAULT_CAPTION_NOISE = 0.4


def _examples(
    generator: np.random.Generator, caption_noise: float, held_out: frozenset[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of drawn strings and their noised captions: ``x0_BSC`` and one-hot text."""
    images: list[np.ndarray] = []
    captions: list[str] = []
    while len(images) < BATCH:
        length = generator.integers(MIN_CHARACTERS, MAX_CHARACTERS + 1)
        text = "".join(generator.choice(list(ALPHABET), size=length))
        if text in held_out:
            continue
        images.append(draw(text, shift_y=int(generator.integers(0, 2))))
        replaced = generator.random(length) < caption_noise
        swaps = generator.choice(list(ALPHABET), size=length)
        captions.append("".join(s if r else c for c, s, r in zip(text, swaps, replaced, strict=True)))
    return patchify(torch.from_numpy(np.stack(images))), embed_text(captions)


def pretrain(
    output: Path,
    *,
    optimizer_steps: int = DEFAULT_OPTIMIZER_STEPS,
    caption_noise: float = DEFAULT_CAPTION_NOISE,
    rng_seed: int = 0,
    held_out: frozenset[str] = frozenset(),
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train from scratch and write the EMA weights to ``output`` (safetensors, 5.6 MB).

    Strings in ``held_out`` are never drawn.  Sets torch to one thread (sums depend on the count), so
    the result is a function of the arguments and the CPU's instruction set alone.
    """
    torch.set_num_threads(1)
    torch.manual_seed(rng_seed)
    generator = named_generator("pretrain", rng_seed)
    model = TinyQwenImage(build_transformer())
    averaged = AveragedModel(model.transformer, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    optimizer = torch.optim.AdamW(model.transformer.parameters(), lr=LEARNING_RATE, weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=optimizer_steps, pct_start=0.05
    )
    for step in range(optimizer_steps):
        x0_BSC, text = _examples(generator, caption_noise, held_out)
        sigma_B = torch.sigmoid(torch.from_numpy(generator.standard_normal(BATCH, dtype=np.float32)))
        noise_BSC = torch.from_numpy(generator.standard_normal(tuple(x0_BSC.shape), dtype=np.float32))
        sigma_B11 = sigma_B[:, None, None]
        velocity = model.velocity(
            (1 - sigma_B11) * x0_BSC + sigma_B11 * noise_BSC, sigma_B, TextEmbeddings(tokens_BLD=text)
        )
        loss = torch.nn.functional.mse_loss(velocity, noise_BSC - x0_BSC)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.transformer.parameters(), 1.0)
        optimizer.step()
        decay.step()
        averaged.update_parameters(model.transformer)
        on_step(step + 1, loss.item())
    model.transformer.load_state_dict(averaged.module.state_dict())
    model.save_weights(output)
