"""TeaCache's decision (arXiv 2411.19108, section 3.3): skip while the accumulated distance stays below a
threshold.

Distances are those of N denoise steps: N - 1 values, the first of step 1 to step 0, the last of step
N - 1 to step N - 2.
"""

import math
from collections.abc import Sequence
from itertools import accumulate


def skipped_steps(distances: Sequence[float], threshold: float) -> tuple[int, ...]:
    """The denoise steps that reuse the last velocity; the first and the last never do.

    A step adds its distance to what the steps since the last computed one have added up.  Below
    ``threshold`` it is skipped, else computed, and the sum begins anew.  A higher threshold never
    computes more steps, since no distance is negative.

    Raises:
        ValueError: no distance, one that is negative or not finite, or a threshold that is no number.
    """
    if not distances or not all(math.isfinite(distance) and distance >= 0 for distance in distances):
        raise ValueError(f"distances {list(distances)} are not finite numbers of at least 0")
    if math.isnan(threshold):
        raise ValueError("a threshold of NaN decides nothing")
    skipped, accumulated = [], 0.0
    for step, distance in enumerate(distances[:-1], start=1):
        accumulated += distance
        if accumulated < threshold:
            skipped.append(step)
        else:
            accumulated = 0.0
    return tuple(skipped)


def deciding_thresholds(distances: Sequence[float]) -> tuple[float, ...]:
    """One threshold for each different outcome of ``skipped_steps``, rising from 0, which skips nothing.

    The outcome changes only where the threshold passes what some run of steps adds up to: these sums,
    and one number above them all.
    """
    between = distances[:-1]
    sums = {total for start in range(len(between)) for total in accumulate(between[start:])}
    above = math.nextafter(max(sums, default=0.0), math.inf)
    return tuple(sorted({0.0, *sums, above}))
