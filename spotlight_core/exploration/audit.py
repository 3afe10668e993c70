"""Does what exploration saw predict what rollouts earn?"""

from collections.abc import Sequence

import numpy as np


def _average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, ties given the mean of the ranks they span.  [N] -> [N]."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[group]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks, ties averaged.

    Rewards repeat (an OCR score has few values), where the formula without ties, 1 - 6*sum(d^2)/...,
    is wrong.  None when either side is constant or shorter than 2: no order, so no correlation.

    Raises:
        ValueError: lengths differ, or a value is not finite.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"spearman needs two sequences of one length, got shapes {x.shape} and {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("spearman needs finite values")
    if x.size < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    ranks = [_average_ranks(values) for values in (x, y)]
    dx, dy = (values - values.mean() for values in ranks)
    return float(np.clip((dx @ dy) / np.sqrt((dx @ dx) * (dy @ dy)), -1.0, 1.0))
