"""What two runs would cost on nodes of their own, up to the target: `spotlight compare`."""

from rich.table import Table

from flows.targets import begun_recipe
from spotlight_core.costs import CostModel
from spotlight_core.costs.recorded import from_records
from spotlight_core.simulator.compare import Comparison, SimulatedCost, simulated_cost
from tasks.run_folder import RunFolder, read_records

BOOT_SECONDS = 0.0  # both fleets boot once: it is no part of an iteration


def compare_runs(run: RunFolder, baseline: RunFolder) -> Comparison:
    """Both runs under the cost model measured in ``run``.

    Raises:
        BadInputError: a run never held its target.
    """
    costs = recorded_costs(run)
    return Comparison(run=_simulated(run, costs), baseline=_simulated(baseline, costs))


def recorded_costs(run: RunFolder) -> CostModel:
    """What a run measured by being run."""
    return from_records(read_records(run.journal), read_records(run.iterations), BOOT_SECONDS)


def _simulated(run: RunFolder, costs: CostModel) -> SimulatedCost:
    return simulated_cost(run.name, begun_recipe(run), list(read_records(run.iterations)), costs)


def comparison_table(comparison: Comparison) -> Table:
    """Side by side, and how much of the ratio each factor brings; factors below 1 favour the run."""
    run, baseline = comparison.run, comparison.baseline
    table = Table(title="Simulated cost to reach the target (not measured dollars)")
    for heading in ("", run.run, baseline.run, "factor"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "iterations", str(run.iterations), str(baseline.iterations), f"{comparison.iterations_factor:.3f}"
    )
    table.add_row(
        "seconds per iteration",
        f"{run.seconds_per_iteration:.3f}",
        f"{baseline.seconds_per_iteration:.3f}",
        f"{comparison.seconds_factor:.3f}",
    )
    table.add_row(
        "USD per hour of the fleet",
        f"{run.usd_per_hour:.2f}",
        f"{baseline.usd_per_hour:.2f}",
        f"{comparison.price_factor:.3f}",
    )
    table.add_row("USD", f"{run.usd:.4f}", f"{baseline.usd:.4f}", f"{comparison.usd_ratio:.3f}")
    return table
