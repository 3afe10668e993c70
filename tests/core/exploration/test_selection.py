"""Selection of seeds by exploration reward."""

from spotlight_core.exploration.selection import top_bottom
from spotlight_core.types import SeedScore


def scores(*rewards: float) -> list[SeedScore]:
    return [SeedScore(seed=seed, reward=reward) for seed, reward in enumerate(rewards)]


def test_half_best_and_half_worst_in_seed_order() -> None:
    assert top_bottom(scores(0.5, 0.9, 0.1, 0.7, 0.3, 0.8), 4) == (1, 2, 4, 5)


def test_ties_go_to_the_lower_seed_among_the_best() -> None:
    assert top_bottom(scores(1, 1, 1, 0, 0, 0), 2) == (0, 5)
    assert top_bottom(scores(0, 0, 0, 0), 3) == (0, 1, 3)


def test_too_few_scores_are_filled_with_fresh_seeds() -> None:
    assert top_bottom([SeedScore(seed=1, reward=0.2), SeedScore(seed=5, reward=0.4)], 4) == (0, 1, 2, 5)
