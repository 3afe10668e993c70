"""The decision rule: which denoise steps a threshold skips."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_core.diffusion.caching.decision import deciding_thresholds, skipped_steps
from spotlight_core.diffusion.caching.table import schedules

# Quarters add up without rounding.  Steps 1 to 6; the first distance is that of step 1 to step 0.
WORKED = (0.25, 0.25, 0.5, 1.0, 0.25, 0.25)
DISTANCES = st.lists(st.floats(0, 10), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("threshold", "skipped"),
    [
        (0.0, ()),
        (0.25, ()),  # a sum that reaches the threshold is computed
        (0.375, (1, 5)),  # 1: .25 <; 2: .5, anew; 3: .5, anew; 4: 1, anew; 5: .25 <; 6 is the last
        (0.75, (1, 2, 5)),  # 1: .25 <; 2: .5 <; 3: 1, anew; 4: 1, anew; 5: .25 <
        (1.25, (1, 2, 3, 5)),  # 3: 1 <; 4: 2, anew; 5: .25 <
        (2.125, (1, 2, 3, 4)),  # 4: 2 <; 5: 2.25, anew
        (2.5, (1, 2, 3, 4, 5)),
        (math.inf, (1, 2, 3, 4, 5)),
    ],
)
def test_a_hand_worked_trajectory_of_seven_steps(threshold: float, skipped: tuple[int, ...]) -> None:
    assert skipped_steps(WORKED, threshold) == skipped


@given(DISTANCES, st.floats(0, 20), st.floats(0, 20))
def test_a_higher_threshold_never_computes_more(distances: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert len(skipped_steps(distances, low)) <= len(skipped_steps(distances, high))


@given(DISTANCES, st.floats(0, 200))
def test_the_first_and_the_last_step_are_always_computed(distances: list[float], threshold: float) -> None:
    skipped = skipped_steps(distances, threshold)
    assert not {0, len(distances)} & {*skipped}
    assert list(skipped) == sorted({*skipped})


@given(DISTANCES, st.floats(0, 200))
def test_the_deciding_thresholds_miss_no_outcome(distances: list[float], threshold: float) -> None:
    grid = deciding_thresholds(distances)
    assert list(grid) == sorted({*grid})
    assert skipped_steps(distances, threshold) in {skipped_steps(distances, each) for each in grid}


def test_each_count_has_the_lowest_threshold_that_yields_it() -> None:
    table = schedules(WORKED)
    assert [(each.effective_steps, each.threshold, each.reused_steps) for each in table] == [
        (2, math.nextafter(2.25, 3), (1, 2, 3, 4, 5)),
        (3, 1.25, (1, 2, 3, 5)),
        (4, 0.75, (1, 2, 5)),
        (5, 0.5, (1, 5)),
        (7, 0.0, ()),  # steps 1 and 5 are as near: no threshold skips one alone
    ]
    coarse = schedules(WORKED, [9.0, 1.0])
    assert [(each.effective_steps, each.threshold) for each in coarse] == [(2, 9.0), (4, 1.0), (7, 0.0)]


def test_steps_at_no_distance_are_skipped_at_once() -> None:
    table = schedules((0.0, 0.0, 1.0))
    assert [(each.effective_steps, each.reused_steps) for each in table] == [(2, (1, 2)), (4, ())]


@pytest.mark.parametrize("distances", [(), (0.1, -0.1), (math.nan, 1.0), (math.inf, 1.0)])
def test_distances_that_decide_nothing(distances: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="are not finite numbers of at least 0"):
        skipped_steps(distances, 0.5)


def test_thresholds_that_decide_nothing() -> None:
    with pytest.raises(ValueError, match="NaN decides nothing"):
        skipped_steps(WORKED, math.nan)
    with pytest.raises(ValueError, match=r"threshold -0\.5 is negative"):
        schedules(WORKED, [-0.5])
