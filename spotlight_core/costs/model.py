"""The cost model that planners decide by and simulated runs are timed with."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A denoise step of ``tokens`` latent tokens a row on ``degree`` GPUs: ``fixed + per_row x rows``."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    tokens: Annotated[int, Field(ge=1)]
    degree: Annotated[int, Field(ge=1)]
    fixed_seconds: Seconds
    per_row_seconds: Seconds

    def seconds(self, rows: int) -> float:
        return self.fixed_seconds + self.per_row_seconds * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds on a node's GPUs.

    The first fields are of the recipe's own size on one GPU, where a denoise step costs ``fixed +
    per_row x rows``.  ``sharded`` has the steps of other SP degrees, and of other sizes.
    ``reused_step_seconds``: a denoise step that computes no velocity; simulated ones take no time.

    ``launch_seconds``: from a command to the first denoise step.  ``load_seconds``: a policy version from
    the Weight Store.  ``copy_seconds``: the same from a neighbour on the node.  ``regroup_seconds``: from
    the end of one layout to the next one's first step.  ``reshard_seconds``: a request's state to a rank
    that joins.  ``standby_seconds``: a booted process takes a rank's place; ``boot_seconds`` without one.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    denoise_step_fixed_seconds: Seconds
    denoise_step_per_row_seconds: Seconds
    launch_seconds: Seconds
    load_seconds: Seconds
    score_seconds_per_image: Seconds
    train_seconds: Seconds
    boot_seconds: Seconds
    reused_step_seconds: Seconds = 0.0
    publish_seconds: Seconds = 0.0
    copy_seconds: Seconds = 0.0
    regroup_seconds: Seconds = 0.0
    reshard_seconds: Seconds = 0.0
    standby_seconds: Seconds = 0.0
    sleep_seconds: Seconds = 0.0
    wake_seconds: Seconds = 0.0
    tokens: Annotated[int, Field(ge=1)] = 1
    sharded: tuple[StepCost, ...] = ()

    def denoise_step_seconds(self, rows: int, degree: int = 1, tokens: int | None = None) -> float:
        """One denoise step of ``rows`` rows, of the recipe's own size unless ``tokens`` says another.

        Between two measured sizes it is interpolated in tokens, outside them it goes as the nearest one
        does per token.  Between two measured degrees it is interpolated in the share of a GPU (1 / degree);
        above the highest nothing is gained.
        """
        tokens = self.tokens if tokens is None else tokens
        table = self._steps()
        degrees = sorted(table)
        if degree in table:
            return _at_tokens(table[degree], rows, tokens)
        if degree > degrees[-1]:
            return _at_tokens(table[degrees[-1]], rows, tokens)
        low, high = next((a, b) for a, b in pairwise(degrees) if a < degree < b)
        slow, fast = (_at_tokens(table[each], rows, tokens) for each in (low, high))
        share = (1 / low - 1 / degree) / (1 / low - 1 / high)
        return slow + share * (fast - slow)

    def _steps(self) -> dict[int, list[StepCost]]:
        own = StepCost(
            tokens=self.tokens,
            degree=1,
            fixed_seconds=self.denoise_step_fixed_seconds,
            per_row_seconds=self.denoise_step_per_row_seconds,
        )
        table: dict[int, list[StepCost]] = {}
        for step in (own, *self.sharded):
            table.setdefault(step.degree, []).append(step)
        for steps in table.values():
            steps.sort(key=lambda step: step.tokens)
        return table


def _at_tokens(steps: list[StepCost], rows: int, tokens: int) -> float:
    if tokens <= steps[0].tokens:
        return steps[0].seconds(rows) * tokens / steps[0].tokens
    for low, high in pairwise(steps):
        if tokens <= high.tokens:
            share = (tokens - low.tokens) / (high.tokens - low.tokens)
            return low.seconds(rows) + share * (high.seconds(rows) - low.seconds(rows))
    return steps[-1].seconds(rows) * tokens / steps[-1].tokens
