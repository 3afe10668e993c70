import pytest

from spotlight_core.exploration.audit import spearman

# Constants: scipy.stats.spearmanr, version 1.17.
TIED_A = [0.5, 0.5, 1.0, 0.0, 0.75, 0.5]
TIED_B = [0.25, 0.75, 1.0, 0.0, 0.75, 0.5]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], 1.0),
        ([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], -1.0),
        ([3.0, 1.0, 4.0, 1.5, 5.0], [2.0, 7.0, 1.0, 8.0, 2.5], -0.6),
        (TIED_A, TIED_B, 0.8932596002688613),
        ([0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], 0.0),
    ],
)
def test_equals_scipy(a: list[float], b: list[float], expected: float) -> None:
    assert spearman(a, b) == pytest.approx(expected, abs=1e-12)


def test_is_symmetric_and_blind_to_monotone_maps() -> None:
    assert spearman(TIED_B, TIED_A) == spearman(TIED_A, TIED_B)
    assert spearman([value**3 + 7 for value in TIED_A], TIED_B) == pytest.approx(spearman(TIED_A, TIED_B))


@pytest.mark.parametrize(
    ("a", "b"), [([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]), ([1.0, 2.0], [5.0, 5.0]), ([1.0], [2.0]), ([], [])]
)
def test_no_order_gives_none(a: list[float], b: list[float]) -> None:
    assert spearman(a, b) is None


def test_refuses_what_has_no_ranks() -> None:
    with pytest.raises(ValueError, match="one length"):
        spearman([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="finite"):
        spearman([1.0, float("nan")], [1.0, 2.0])
