"""Payloads for tests of what keeps commits."""

import numpy as np

from spotlight_core.arrays import Arrays, to_bytes


def state(rng_seed: int = 0, values: int = 512) -> Arrays:
    """Latents ``x_BSC`` with a denormal, a negative zero, an infinity and a NaN, and log-probabilities."""
    generator = np.random.default_rng(rng_seed)
    x_BSC = generator.standard_normal((2, 4, values // 8), dtype=np.float32)
    x_BSC[0, 0, :4] = [np.float32(1e-42), -0.0, np.inf, np.nan]
    return {"x_BSC": x_BSC, "logp_TB": generator.standard_normal((3, 2), dtype=np.float32)}


def payload(rng_seed: int = 0, values: int = 512) -> bytes:
    return to_bytes(state(rng_seed, values))
