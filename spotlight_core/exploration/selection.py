"""Which of the explored seeds are rolled out."""

from collections.abc import Sequence

from spotlight_core.types import SeedScore


def top_bottom(scores: Sequence[SeedScore], count: int) -> tuple[int, ...]:
    """The ``count``/2 best and the rest worst seeds by exploration reward (Spotlight, §3).

    Ties are broken by seed index; with fewer than ``count`` scores the group is filled with fresh
    seeds, the lowest indices that were not explored.  Returned in seed order.
    """
    ranked = [score.seed for score in sorted(scores, key=lambda s: (-s.reward, s.seed))]
    if len(ranked) <= count:
        fresh = (seed for seed in range(len(ranked) + count) if seed not in set(ranked))
        return tuple(sorted([*ranked, *(next(fresh) for _ in range(count - len(ranked)))]))
    best = (count + 1) // 2
    return tuple(sorted([*ranked[:best], *ranked[len(ranked) - (count - best) :]]))
