"""The outcome of a calibration: for each count of effective steps the denoise steps that reuse a velocity.

Torch-free, and a function of nothing but the file: every rank and every split of a batch reuses the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

from spotlight_core.diffusion.caching.decision import deciding_thresholds, skipped_steps
from spotlight_core.errors import BadInputError

Measure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
SIGMA_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The ``reused_steps`` of a ``Fidelity``, and the lowest threshold of the grid that yields that many."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    effective_steps: Annotated[int, Field(ge=1)]
    threshold: Measure
    reused_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """What full trajectories of some prompts showed, and what follows for cheaper ones.

    ``transformer`` is the class of diffusers, ``sigmas`` its noise levels, N + 1 from 1 to 0, and
    ``sde_steps`` the stochastic steps of the trajectories (see ``Fidelity``).  ``signal`` and
    ``velocity_change`` are relative L1 changes from the step before, N - 1 values: of the modulated input
    and of the velocity, mean over all rows.  ``polynomial`` rescales the first to the second, highest
    power first; what it gives below 0 is taken as 0.  ``fit_error`` and ``identity_error`` are root mean
    squares of its misses and of the bare signal's; ``notes`` say what to know of the fit.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    transformer: str
    sigmas: tuple[Measure, ...]
    sde_steps: tuple[int, int] | None
    rows: Annotated[int, Field(ge=1)]
    signal: tuple[Measure, ...]
    velocity_change: tuple[Measure, ...]
    polynomial: tuple[Number, ...]
    fit_error: Measure
    identity_error: Measure
    notes: tuple[str, ...]
    schedules: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        steps = self.denoise_steps
        if {len(self.signal), len(self.velocity_change)} != {steps - 1} or not self.polynomial:
            raise ValueError(f"{len(self.sigmas)} sigmas are not of {len(self.signal)} signals")
        for schedule in self.schedules:
            reused = schedule.reused_steps
            inside = all(0 < step < steps - 1 for step in reused) and list(reused) == sorted({*reused})
            if not inside or len(reused) != steps - schedule.effective_steps:
                raise ValueError(f"{schedule} is none of {steps} denoise steps")
        counts = list(self.effective_steps)
        if counts != sorted({*counts}) or counts[-1:] != [steps]:
            raise ValueError(f"effective steps {counts} do not rise to {steps}")

    @property
    def denoise_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def effective_steps(self) -> tuple[int, ...]:
        """The counts that some threshold yields, rising; the last is that of a full trajectory."""
        return tuple(schedule.effective_steps for schedule in self.schedules)

    def reused_steps(self, effective_steps: int) -> tuple[int, ...]:
        """The denoise steps that reuse a velocity, at the nearest count not below ``effective_steps``.

        Raises:
            BadInputError: fewer than 1 or more than ``denoise_steps`` effective steps.
        """
        if not 1 <= effective_steps <= self.denoise_steps:
            raise BadInputError(
                f"effective_steps = {effective_steps} is not possible with a table of {self.denoise_steps} "
                "denoise steps",
                f"give one of {', '.join(map(str, self.effective_steps))}",
            )
        return next(each.reused_steps for each in self.schedules if each.effective_steps >= effective_steps)

    def check(self, transformer: str, sigmas: Sequence[float]) -> None:
        """The table is of this transformer (its class) and of these noise levels.

        Raises:
            BadInputError: it is of others.
        """
        remedy = "calibrate again with this recipe"
        if transformer != self.transformer:
            raise BadInputError(f"the step table is of a {self.transformer}, no {transformer}", remedy)
        if len(sigmas) != len(self.sigmas):
            raise BadInputError(
                f"the step table is of {self.denoise_steps} denoise steps, not {len(sigmas) - 1}", remedy
            )
        for step, (ours, given) in enumerate(zip(self.sigmas, sigmas, strict=True)):
            if abs(ours - given) > SIGMA_TOLERANCE:
                raise BadInputError(
                    f"the step table has sigma {ours:.4f} at denoise step {step}, the recipe {given:.4f}",
                    remedy,
                )


def schedules(distances: Sequence[float], thresholds: Sequence[float] | None = None) -> tuple[Schedule, ...]:
    """For each count of effective steps that a threshold yields, the lowest one; counts rise.

    ``distances`` as in ``decision``.  Without ``thresholds`` every one at which the decision changes is
    tried; 0, which skips nothing, always is.

    Raises:
        ValueError: see ``skipped_steps``; a negative threshold.
    """
    grid = deciding_thresholds(distances) if thresholds is None else sorted({0.0, *thresholds})
    if grid[0] < 0:
        raise ValueError(f"threshold {grid[0]} is negative")
    found: dict[int, Schedule] = {}
    for threshold in grid:
        reused = skipped_steps(distances, threshold)
        count = len(distances) + 1 - len(reused)
        found.setdefault(count, Schedule(effective_steps=count, threshold=threshold, reused_steps=reused))
    return tuple(found[count] for count in sorted(found))
