"""What may be explored: arms, what each costs, and the budget that it must fit."""

from collections.abc import Iterable
from dataclasses import dataclass

FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0)  # of the seeds that are trained
SHARES = (0.6, 0.7, 0.8, 0.9, 1.0)  # of the rollout's denoise steps
MOST_SEEDS = 32  # the paper's sweep ends there


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Arm:
    """Explore ``seeds_per_prompt`` candidates at ``effective_steps`` computed denoise steps."""

    seeds_per_prompt: int
    effective_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What exploration may use beside a training, and what it takes.

    ``gpu_seconds``: W, the seconds of training times the spot GPUs that are expected meanwhile.
    ``seconds_per_step``: GPU-seconds of one computed denoise step of one candidate.
    ``seconds_per_image``: GPU-seconds of all else that a candidate takes: decoding, scoring.
    """

    gpu_seconds: float
    seconds_per_step: float
    seconds_per_image: float = 0.0

    def cost(self, arm: Arm, prompts: int) -> float:
        """Planned GPU-seconds of an arm over ``prompts``: ``d C (s t_step + t_image)`` (Spotlight, §4)."""
        per_seed = arm.effective_steps * self.seconds_per_step + self.seconds_per_image
        return arm.seeds_per_prompt * prompts * per_seed

    def eligible(self, arms: Iterable[Arm], prompts: int) -> tuple[Arm, ...]:
        """The arms that fit, cheapest first; of equal ones fewer effective steps, then fewer seeds."""
        fitting = (arm for arm in arms if self.cost(arm, prompts) <= self.gpu_seconds)
        return tuple(sorted(fitting, key=lambda arm: self.order(arm, prompts)))

    def order(self, arm: Arm, prompts: int) -> tuple[float, int, int]:
        """By what ties between arms are broken."""
        return self.cost(arm, prompts), arm.effective_steps, arm.seeds_per_prompt


def arm_grid(seeds: Iterable[int], effective_steps: Iterable[int]) -> tuple[Arm, ...]:
    """All pairs, each once."""
    return tuple(
        sorted({Arm(seeds_per_prompt=d, effective_steps=s) for d in seeds for s in set(effective_steps)})
    )


def default_seeds(trained: int, factors: Iterable[float] = FACTORS) -> tuple[int, ...]:
    """Candidates for ``trained`` seeds of a prompt, up to ``MOST_SEEDS`` unless more are trained."""
    most = max(MOST_SEEDS, trained)
    return tuple(sorted({min(most, max(trained, round(trained * factor))) for factor in factors}))


def default_steps(denoise_steps: int, shares: Iterable[float] = SHARES) -> tuple[int, ...]:
    """Effective steps for a rollout of ``denoise_steps``, from .6 of them on: below, ranks go astray."""
    return tuple(sorted({max(1, round(denoise_steps * share)) for share in shares}))
