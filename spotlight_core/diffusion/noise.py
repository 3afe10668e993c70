"""Counter-based noise: every random latent is a function of names, never of a generator's history.

Philox (NumPy's, whose bits do not depend on the CPU's capability, batch size or thread count) is
keyed by a hash of ``(rng_seed, prompt occurrence, seed, denoise step)``.  A resumed, recomputed or
moved request therefore sees the very same trajectory, and exploration and rollout of one seed share
both their initial noise and their whole SDE noise stream.

Shape legend: B batch (seeds of one request), S sequence, C channel.
"""

from collections.abc import Sequence

import numpy as np
import torch

from spotlight_core.philox import named_generator

INITIAL_NOISE = -1  # the "denoise step" that names x at sigma = 1


def seed_noise(
    rng_seed: int, occurrence: str, seed: int, denoise_step: int, shape_SC: tuple[int, ...]
) -> np.ndarray:
    """Standard normal noise, fp32, of shape ``shape_SC`` for one seed at one denoise step.

    ``occurrence`` names the prompt's appearance in the run (prompts repeat, noise must not).
    """
    generator = named_generator("noise", rng_seed, occurrence, seed, denoise_step)
    return generator.standard_normal(shape_SC, dtype=np.float32)


def batch_noise(
    rng_seed: int,
    occurrences: Sequence[str],
    seeds: Sequence[int],
    denoise_step: int,
    shape_SC: tuple[int, ...],
) -> torch.Tensor:
    """``seed_noise`` of each row's prompt occurrence and seed, stacked: fp32 ``[B, *shape_SC]``."""
    rows = [
        seed_noise(rng_seed, occurrence, seed, denoise_step, shape_SC)
        for occurrence, seed in zip(occurrences, seeds, strict=True)
    ]
    return torch.from_numpy(np.stack(rows))
