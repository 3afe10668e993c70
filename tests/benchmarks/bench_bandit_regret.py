"""What each bandit misses against the best fixed arm on a simulated problem that drifts, over 200 seeds.

An arm's gain rises with its seeds and falls with the steps it leaves out; both change as the policy learns:
early on the most seeds pay best, late in training fewer do, since rewards of a good policy vary less.  An
observation is noisy, as a handful of groups is.  All arms fit the budget.  Regret: the mean gain of the best
fixed arm less what the bandit had, per iteration; the value is that of ``ucb`` over that of drawing arms
evenly.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from spotlight_core.exploration.arms import Arm, arm_grid, default_seeds, default_steps
from spotlight_core.exploration.bandits import Bandit, PaperUcb, PriorUcb, Thompson
from spotlight_core.exploration.planner import FEW_SEEDS, FEW_STEPS
from spotlight_core.philox import named_generator
from tests.benchmarks import Measurement

SEEDS, ITERATIONS, TRAINED, DENOISE_STEPS = 200, 60, 8, 20
NOISE = 0.2  # of one observation
PAPER = arm_grid(default_seeds(TRAINED), default_steps(DENOISE_STEPS))
FEW = arm_grid(default_seeds(TRAINED, FEW_SEEDS), default_steps(DENOISE_STEPS, FEW_STEPS))


def gain(arm: Arm, iteration: int) -> float:
    """How much larger reward spreads under an arm: log in seeds, less for previews that mislead."""
    progress = iteration / ITERATIONS
    seeds = math.log2(arm.seeds_per_prompt / TRAINED)
    best = 2.0 - 1.4 * progress  # in doublings of the trained seeds
    faithful = 1 - 1.2 * (1 - arm.effective_steps / DENOISE_STEPS) ** 2 * (1 + progress)
    return 1 + 0.35 * max(0.0, faithful) * (seeds - seeds**2 / (2 * best + 1))


class Even:
    """Draws arms evenly."""

    def __init__(self, seed: int) -> None:
        self._draws = named_generator("even", seed)

    def choose(self, eligible: Sequence[Arm]) -> Arm:
        return eligible[int(self._draws.integers(len(eligible)))]

    def observe(self, arm: Arm, reward: float) -> None:
        """Learns nothing."""


def regret(bandit: Bandit | Even, arms: Sequence[Arm], seed: int) -> float:
    """Mean gain that the best fixed arm of all has over the bandit."""
    noise = named_generator("regret", seed).normal(0.0, NOISE, ITERATIONS)
    order = sorted(arms, key=lambda arm: arm.seeds_per_prompt * arm.effective_steps)
    had = []
    for iteration in range(ITERATIONS):
        arm = bandit.choose(order)
        had.append(gain(arm, iteration))
        bandit.observe(arm, had[-1] + float(noise[iteration]))
    best = max(fmean(gain(arm, iteration) for iteration in range(ITERATIONS)) for arm in PAPER)
    return best - fmean(had)


def measure() -> Measurement:
    bandits: dict[str, tuple[Callable[[int], Bandit | Even], Sequence[Arm]]] = {
        "evenly, 25 arms": (Even, PAPER),
        "ucb_paper, 25 arms": (lambda seed: PaperUcb(8, 0.5), PAPER),
        "ucb_paper, 6 arms": (lambda seed: PaperUcb(8, 0.5), FEW),
        "ucb, 25 arms": (lambda seed: PriorUcb(8, 0.5), PAPER),
        "ucb, 6 arms": (lambda seed: PriorUcb(8, 0.5), FEW),
        "thompson, 25 arms": (lambda seed: Thompson(8, seed), PAPER),
        "thompson, 6 arms": (lambda seed: Thompson(8, seed), FEW),
        "evenly, 6 arms": (Even, FEW),
    }
    found = {
        name: [regret(make(seed), arms, seed) for seed in range(SEEDS)]
        for name, (make, arms) in bandits.items()
    }
    details: dict[str, float | str] = {
        name: f"{fmean(each):.4f} ± {1.96 * stdev(each) / math.sqrt(SEEDS):.4f} regret an iteration"
        for name, each in found.items()
    }
    value = fmean(found["ucb, 6 arms"]) / fmean(found["evenly, 25 arms"])
    return Measurement(value=value, unit="of the regret of drawing arms evenly", details=details)
