"""How many spot GPUs are counted on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_core.exploration.capacity import NodeSpan, expected_gpus, gpus_at, mean_gpus


def span(start: float, end: float | None = None, gpus: int = 1) -> NodeSpan:
    return NodeSpan(start=start, end=end, gpus=gpus)


def test_how_many_were_there_at_a_moment_and_on_average() -> None:
    spans = [span(0.0, 10.0, 2), span(5.0)]
    assert [gpus_at(spans, at) for at in (-1.0, 0.0, 5.0, 10.0)] == [0, 2, 3, 1]
    assert mean_gpus(spans, 0.0, 20.0) == pytest.approx((2 * 10 + 15) / 20)


def test_a_calm_market_stays_as_it_is() -> None:
    assert expected_gpus([span(0.0, gpus=4)], 1000.0, 60.0, 0.25, 6000.0) == 4.0


def test_a_market_that_takes_a_node_each_minute_is_not_counted_on() -> None:
    # Ten nodes at first, one less every 60 s: over the next 60 s half a node is missed on average.
    spans = [span(0.0, 60.0 * number) for number in range(1, 10)] + [span(0.0)]
    expected = expected_gpus(spans, 300.0, 60.0, 0.5, 6000.0)
    assert gpus_at(spans, 300.0) == 5
    assert expected == pytest.approx(4.5, abs=0.05)


def test_a_lower_quantile_counts_on_less() -> None:
    spans = [span(40.0 * number, 40.0 * number + 20.0) for number in range(50)] + [span(0.0, gpus=3)]
    low, high = (expected_gpus(spans, 1990.0, 30.0, q, 6000.0) for q in (0.1, 0.9))
    assert low < high


def test_without_history_the_number_of_now_is_taken() -> None:
    assert expected_gpus([span(95.0, gpus=2)], 100.0, 60.0, 0.25, 6000.0) == 2.0
    assert expected_gpus([], 100.0, 60.0, 0.25, 6000.0) == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 900), st.floats(1, 500), st.integers(1, 8)), max_size=8),
    st.floats(0.0, 1.0),
)
def test_it_is_never_below_0_or_above_all_there_ever_were(
    lives: list[tuple[float, float, int]], quantile: float
) -> None:
    spans = [span(start, start + length, gpus) for start, length, gpus in lives]
    expected = expected_gpus(spans, 1000.0, 50.0, quantile, 2000.0)
    assert 0.0 <= expected <= 2 * sum(gpus for _, _, gpus in lives)
