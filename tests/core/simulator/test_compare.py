"""Simulated costs against sums done by hand."""

import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.simulator.compare import (
    Comparison,
    SimulatedCost,
    iterations_to_target,
    simulated_cost,
    simulated_seconds_per_iteration,
)
from tests.parity.conftest import COSTS, small_recipe

# Load 0.02, four requests of 2 seeds one after the other (five steps of 0.003 + 2 x 0.0005; launch 0.001
# for the first alone, since the others are handed over early), the last one's scoring 2 x 0.004, training 1.
ALONE_SECONDS = 0.02 + 0.001 + 4 * 5 * 0.004 + 2 * 0.004 + 1.0


def records(*scores: float) -> list[dict[str, object]]:
    """Evaluations after iterations 0, 4, 8...; the first of the base model."""
    base: list[dict[str, object]] = [{"iteration": -1, "evaluation": {"score": 0.5}}]
    for index, score in enumerate(scores, start=1):
        base.append({"iteration": 4 * index - 1, "evaluation": {"score": score}})
        base.append({"iteration": 4 * index, "evaluation": None})
    return base


def test_seconds_per_iteration_of_one_node() -> None:
    config = small_recipe("exploration={type='none'}", "fleet.spot_nodes=0")
    assert simulated_seconds_per_iteration(config, COSTS) == pytest.approx(ALONE_SECONDS, rel=1e-9)


def test_exploration_beside_training_costs_nothing_and_behind_it_costs_time() -> None:
    spot = simulated_seconds_per_iteration(small_recipe(), COSTS)
    plain = simulated_seconds_per_iteration(small_recipe("exploration={type='none'}"), COSTS)
    # Beside one second of training, both spot nodes finish 6 requests of 4 seeds and 4 computed steps.
    assert spot == pytest.approx(plain, abs=0.03)
    alone = simulated_seconds_per_iteration(small_recipe("fleet.spot_nodes=0"), COSTS)
    explored = 0.001 + 6 * 4 * (0.003 + 4 * 0.0005) + 4 * 0.004
    audited = 3 * 5 * 0.004 / 4  # the other 6 of 8 seeds of one prompt, every fourth iteration
    assert alone == pytest.approx(ALONE_SECONDS + explored + audited, rel=1e-9)


def test_the_target_must_hold_for_two_evaluations() -> None:
    assert iterations_to_target(records(0.7, 0.91, 0.85, 0.92, 0.93), 0.9) == 16
    assert iterations_to_target(records(0.7, 0.91), 0.9) is None


def test_a_run_that_never_held_its_target_has_no_price() -> None:
    with pytest.raises(BadInputError, match=r"never held its target 0\.9"):
        simulated_cost("r", small_recipe(), records(0.7, 0.91, 0.8), COSTS)


def test_dollars_are_iterations_seconds_and_price() -> None:
    config = small_recipe("exploration={type='none'}", "fleet.spot_nodes=0", "prices={reserved=36.0}")
    cost = simulated_cost("r", config, records(0.91, 0.92), COSTS)
    assert cost.usd == pytest.approx(4 * ALONE_SECONDS * 36.0 / 3600)


def test_the_three_factors_multiply_to_the_ratio() -> None:
    run = SimulatedCost(run="a", iterations=10, seconds_per_iteration=3.0, usd_per_hour=15.0)
    baseline = SimulatedCost(run="b", iterations=20, seconds_per_iteration=2.0, usd_per_hour=30.0)
    comparison = Comparison(run=run, baseline=baseline)
    assert comparison.usd_ratio == pytest.approx(0.375)
    factors = (comparison.iterations_factor, comparison.seconds_factor, comparison.price_factor)
    assert factors == (0.5, 1.5, 0.5)
