"""The SDE window: which denoise steps of a trajectory are stochastic, and so scored and trained.

A function of the recipe, the iteration and the prompt occurrence alone: exploration of a batch, its
rollout and its training agree on it, and a resumed run draws it again.
"""

import math

from spotlight_core.config import (
    FixedWindowConfig,
    OdeConfig,
    ProgressiveWindowConfig,
    RandomWindowConfig,
    SamplerConfig,
)
from spotlight_core.philox import named_generator

Window = tuple[int, int]  # half-open


def sde_window(config: SamplerConfig, rng_seed: int, iteration: int, occurrence: str) -> Window | None:
    """The window of one group in one iteration; None for a sampler without SDE steps."""
    if isinstance(config, OdeConfig) or not config.noise_level:
        return None
    window, last = config.window, config.denoise_steps - 1
    if window is None:
        return (0, last)
    if isinstance(window, FixedWindowConfig):
        return (window.first, window.end)
    if isinstance(window, RandomWindowConfig):
        places = (last if window.end is None else window.end) - window.first - window.size + 1
        draw = named_generator("window", rng_seed, iteration, occurrence).integers(places)
        first = window.first + int(draw)
    else:
        first = _progressive_first(window, last, iteration)
    return (first, first + window.size)


def _progressive_first(window: ProgressiveWindowConfig, last: int, iteration: int) -> int:
    """Where MixGRPO's window begins: each place is held for its number of iterations, then from the start."""
    places = range(0, last - window.size + 1, window.stride)
    held = [
        max(round(window.iterations_per_move * math.exp(-window.decay * max(first - window.threshold, 0))), 1)
        for first in places
    ]
    left = iteration % sum(held)
    for first, iterations in zip(places, held, strict=True):
        if left < iterations:
            return first
        left -= iterations
    raise AssertionError("the remainder is below the sum")
