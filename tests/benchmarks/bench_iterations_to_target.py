"""How many times fewer iterations the embedded model takes to its target with exploration than without.

Flow-GRPO at the learning rate that suits plain seeds best, the same trained samples an iteration, paired by
run seed; 400 held-out images every second iteration, and the target has to hold in two evaluations.  About
half an hour.  ``docs/log.md`` has the other arms, losses, selections and learning rates.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, stdev

from spotlight_core.recipes import load_recipe
from tests.benchmarks import Measurement
from tests.benchmarks.one_process import OneProcess

SEEDS, MOST_ITERATIONS, EVERY, IMAGES, TARGET = range(5), 48, 2, 400, 0.7
T_975 = 2.776  # Student's t of four degrees of freedom
EXPLORING = ("exploration.audit_every=0",)  # 32 candidates at 8 of 10 steps for 8 trained seeds
PLAIN = ("exploration.type=none",)


def held_from(curve: Sequence[tuple[int, float]], target: float) -> int | None:
    """The first evaluated iteration from which two evaluations in a row are at the target."""
    for (iteration, score), (_, following) in pairwise(curve):
        if min(score, following) >= target:
            return iteration
    return None


def iterations_to_target(seed: int, overrides: Sequence[str]) -> int:
    """Of a run with this seed; RuntimeError when it does not get there."""
    run = OneProcess(
        load_recipe("quickstart_grpo", [f"rng_seed={seed}", f"iterations={MOST_ITERATIONS}", *overrides])
    )
    curve: list[tuple[int, float]] = []
    for iteration in range(1, MOST_ITERATIONS + 1):
        run.iterate()
        if iteration % EVERY == 0:
            curve.append((iteration, fmean(run.evaluate(IMAGES))))
            if (held := held_from(curve, TARGET)) is not None:
                return held
    raise RuntimeError(f"seed {seed} {overrides} is at {curve[-1]} and not at {TARGET}")


def measure() -> Measurement:
    plain = [iterations_to_target(seed, PLAIN) for seed in SEEDS]
    explored = [iterations_to_target(seed, EXPLORING) for seed in SEEDS]
    logs = [math.log(slow / quick) for slow, quick in zip(plain, explored, strict=True)]
    middle, half = fmean(logs), T_975 * stdev(logs) / math.sqrt(len(logs))
    details: dict[str, float | str] = {
        "plain seeds, iterations": str(plain),
        "32 explored of 8 trained (4K), iterations": str(explored),
        "95 % interval": f"{math.exp(middle - half):.2f} to {math.exp(middle + half):.2f}",
    }
    return Measurement(value=math.exp(middle), unit="times fewer iterations", details=details)
