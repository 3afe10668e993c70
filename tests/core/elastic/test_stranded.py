"""Stranded GPUs: the static baseline agrees with counting placements, elastic groups strand nothing."""

import math
import statistics

import pytest

from spotlight_core.elastic.layout import FixedDegree
from spotlight_core.elastic.stranded import Capacity, FixedGroups, expected_of_fixed, replayed
from spotlight_core.errors import BadInputError
from spotlight_core.market.generator import MarketModel, generated_trace
from spotlight_core.market.traces import ClockEvent, ClockTrace

PLACEMENTS = range(50)


@pytest.fixture(scope="module")
def capacity() -> Capacity:
    model = MarketModel(nodes=24, hours=12.0, mean_life_minutes=60.0, mean_away_minutes=40.0)
    return Capacity.of(generated_trace(model, seed=3), 8)


def test_a_trace_is_scaled_by_its_most_nodes() -> None:
    events = [ClockEvent(0.0, "add", f"n{node}") for node in range(4)]
    events += [
        ClockEvent(10.0, "remove", "n0"),
        ClockEvent(30.0, "remove", "n1"),
        ClockEvent(40.0, "add", "n0"),
    ]
    scaled = Capacity.of(ClockTrace(events=tuple(events)), 8)
    assert scaled.times == (0.0, 10.0, 30.0, 40.0)
    assert scaled.gpus == (8, 6, 4)
    with pytest.raises(BadInputError, match="no node is ever there"):
        Capacity.of(ClockTrace(events=(ClockEvent(0.0, "remove", "n"),)), 8)


@pytest.mark.parametrize(("nodes", "gpus_per_node", "degree"), [(4, 2, 2), (2, 4, 2), (2, 4, 4)])
def test_fixed_groups_strand_what_counting_placements_says(
    capacity: Capacity, nodes: int, gpus_per_node: int, degree: int
) -> None:
    expected = expected_of_fixed(capacity, degree, nodes * gpus_per_node)
    runs = [
        replayed(capacity, FixedGroups(degree), nodes=nodes, gpus_per_node=gpus_per_node, placement=seed)
        for seed in PLACEMENTS
    ]
    assert expected.share > 0.05
    for name in ("share", "any_share"):
        values = [getattr(run, name) for run in runs]
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert statistics.mean(values) == pytest.approx(getattr(expected, name), abs=4 * error + 1e-9)


def test_by_hand() -> None:
    """Two pairs, three GPUs there: one is always stranded; with two there, in two of three placements."""
    half = Capacity((0.0, 10.0, 30.0), (3, 2))
    expected = expected_of_fixed(half, 2, 4)
    assert expected.available_gpu_seconds == 70.0
    assert expected.stranded_gpu_seconds == pytest.approx(10 * 1 + 20 * 2 * 2 / 3)
    assert expected.any_share == pytest.approx((10 + 20 * 2 / 3) / 30)


def test_elastic_groups_strand_nothing_but_the_moments_of_regrouping(capacity: Capacity) -> None:
    for seed in PLACEMENTS:
        run = replayed(
            capacity, FixedDegree(2), nodes=4, gpus_per_node=2, placement=seed, regroup_seconds=0.05
        )
        assert 0 < run.share <= 0.01
        assert run.any_share == 0.0
    idle = replayed(capacity, FixedDegree(2, 2), nodes=4, gpus_per_node=2, placement=0)
    fixed = replayed(capacity, FixedGroups(2), nodes=4, gpus_per_node=2, placement=0)
    assert idle.stranded_gpu_seconds == fixed.stranded_gpu_seconds, "where memory wants two, a half is idle"
