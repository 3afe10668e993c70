"""Reused steps against the measured table, and their properties for every length."""

import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.exploration.fidelity import reused_steps


@pytest.mark.parametrize(
    ("effective_steps", "expected"),
    [(10, ()), (9, (9,)), (8, (7, 9)), (7, (2, 5, 8)), (6, (2, 4, 6, 8)), (5, (1, 3, 5, 7, 8))],
)
def test_table_at_ten_steps(effective_steps: int, expected: tuple[int, ...]) -> None:
    assert reused_steps(10, effective_steps) == expected


@pytest.mark.parametrize("denoise_steps", range(1, 41))
def test_count_range_and_order_at_any_length(denoise_steps: int) -> None:
    for effective_steps in range(1, denoise_steps + 1):
        steps = reused_steps(denoise_steps, effective_steps)
        assert len(steps) == denoise_steps - effective_steps
        assert list(steps) == sorted(set(steps))
        assert all(1 <= step < denoise_steps for step in steps)


@pytest.mark.parametrize("effective_steps", [0, 11])
def test_impossible_counts_are_refused(effective_steps: int) -> None:
    with pytest.raises(BadInputError, match="effective_steps"):
        reused_steps(10, effective_steps)
