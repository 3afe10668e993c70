"""Selection of seeds by exploration reward."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_core.config.exploration import Selection
from spotlight_core.exploration.selection import select_seeds
from spotlight_core.types import SeedScore

ALL: list[Selection] = ["top_bottom", "variance_max", "top_only", "random"]
LEVELS = st.lists(st.sampled_from([0.0, 1 / 3, 2 / 3, 1.0]), min_size=3, max_size=8)  # of three digits


def scores(*rewards: float) -> list[SeedScore]:
    return [SeedScore(seed=seed, reward=reward) for seed, reward in enumerate(rewards)]


def test_half_best_and_half_worst_in_seed_order() -> None:
    assert select_seeds("top_bottom", scores(0.5, 0.9, 0.1, 0.7, 0.3, 0.8), 4) == (1, 2, 4, 5)


def test_ties_go_to_the_lower_seed_among_the_best() -> None:
    assert select_seeds("top_bottom", scores(1, 1, 1, 0, 0, 0), 2) == (0, 5)
    assert select_seeds("top_bottom", scores(0, 0, 0, 0), 3) == (0, 1, 3)
    assert select_seeds("top_only", scores(1, 0, 1, 1), 2) == (0, 2)


@pytest.mark.parametrize("selection", ALL)
def test_too_few_scores_are_filled_with_fresh_seeds(selection: Selection) -> None:
    few = [SeedScore(seed=1, reward=0.2), SeedScore(seed=5, reward=0.4)]
    assert select_seeds(selection, few, 4) == (0, 1, 2, 5)


def test_the_best_alone() -> None:
    assert select_seeds("top_only", scores(0.5, 0.9, 0.1, 0.7), 2) == (1, 3)


def test_where_one_seed_stands_out_most_variance_takes_it_and_more_of_the_others() -> None:
    assert select_seeds("variance_max", scores(0.9, 0.2, 0.1, 0.1, 0.1, 0.1), 4) == (0, 3, 4, 5)
    assert select_seeds("top_bottom", scores(0.9, 0.2, 0.1, 0.1, 0.1, 0.1), 4) == (0, 1, 4, 5)


@given(LEVELS, st.integers(2, 6))
def test_no_subset_varies_more(rewards: list[float], count: int) -> None:
    chosen = select_seeds("variance_max", scores(*rewards), count)
    if len(rewards) > count:
        most = max(np.var(subset) for subset in combinations(rewards, count))
        assert np.var([rewards[seed] for seed in chosen]) == pytest.approx(most)


def test_a_random_draw_is_its_keys_and_every_seed_comes_up() -> None:
    known = scores(0.5, 0.9, 0.1, 0.7, 0.3, 0.8)
    drawn = {key: select_seeds("random", known, 2, ("selection", key)) for key in range(40)}
    assert drawn == {key: select_seeds("random", known[::-1], 2, ("selection", key)) for key in range(40)}
    assert {seed for seeds in drawn.values() for seed in seeds} == set(range(6))
    assert all(len(set(seeds)) == 2 for seeds in drawn.values())


@given(LEVELS, st.integers(2, 6), st.sampled_from(ALL))
def test_a_group_has_its_size_whatever_was_scored(
    rewards: list[float], count: int, selection: Selection
) -> None:
    chosen = select_seeds(selection, scores(*rewards), count)
    assert len(set(chosen)) == count
    assert list(chosen) == sorted(chosen)
