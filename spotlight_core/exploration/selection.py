"""Which of the explored seeds are rolled out."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from spotlight_core.config.exploration import Selection
from spotlight_core.philox import named_generator
from spotlight_core.types import SeedScore


def select_seeds(
    selection: Selection, scores: Sequence[SeedScore], count: int, key: Sequence[int | str] = ()
) -> tuple[int, ...]:
    """``count`` seeds of the scored ones, in seed order.

    With fewer than ``count`` scores all of them are taken, and fresh seeds, the lowest indices that were
    not explored, fill the group.  ``key`` names the draw of ``random``, and nothing else depends on it.
    """
    ranked = [score.seed for score in sorted(scores, key=lambda s: (-s.reward, s.seed))]
    if len(ranked) <= count:
        fresh = (seed for seed in range(len(ranked) + count) if seed not in set(ranked))
        return tuple(sorted([*ranked, *(next(fresh) for _ in range(count - len(ranked)))]))
    if selection == "random":
        drawn = named_generator(*key).permutation(len(ranked))[:count]
        return tuple(sorted(sorted(ranked)[index] for index in drawn))
    best = _BEST[selection](sorted((score.reward for score in scores), reverse=True), count)
    return tuple(sorted([*ranked[:best], *ranked[len(ranked) - (count - best) :]]))


def _half(rewards: Sequence[float], count: int) -> int:
    """Spotlight's, §3: as many of the best as of the worst."""
    return (count + 1) // 2


def _all(rewards: Sequence[float], count: int) -> int:
    """The best alone: what best-of-d is without contrast."""
    return count


def _most_variance(rewards: Sequence[float], count: int) -> int:
    """How many of the best, the others being of the worst, so that rewards vary most.

    The subset of the largest variance is always of that form (arXiv 2504.13818).  Of equal ones the most
    even.
    """

    def rank(best: int) -> tuple[float, int]:
        chosen = [*rewards[:best], *rewards[len(rewards) - (count - best) :]]
        return round(float(np.var(chosen)), 12), -abs(2 * best - count)

    return max(range(count + 1), key=rank)


_BEST: Mapping[str, Callable[[Sequence[float], int], int]] = {
    "top_bottom": _half,
    "variance_max": _most_variance,
    "top_only": _all,
}
