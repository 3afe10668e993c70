"""`spotlight profile`: measure what a recipe's denoising costs here, for planners and simulations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.options import RUNS, Runs

if TYPE_CHECKING:
    from rich.table import Table

    from spotlight_core.costs import CostModel


def profile(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a TOML file.")],
    output: Annotated[Path, typer.Option(help="The cost model to write.")] = Path("costs.json"),
    degrees: Annotated[str, typer.Option(help="SP degrees, up to 16; SP 1 is always measured.")] = "1,2",
    rows: Annotated[
        str | None, typer.Option(help="Rows of a request; one, and the recipe's own, when absent.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, max=1000, help="Denoise steps of each measured request.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Requests of each kind.")] = 5,
    override: Annotated[list[str] | None, typer.Option(help="section.key=value, as for train.")] = None,
    run: Annotated[
        str | None, typer.Option(help="A run whose seconds to train and to score are taken over.")
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Measure what a recipe's denoising costs on this machine, at each SP degree.

    Denoise steps, launch, publishing, loading and copying of weights, regrouping, and handing a request over.

    The file lets a run choose the degree: spotlight train RECIPE --override elastic.sp_degree=auto
    --override elastic.costs=costs.json --override fleet.gpus_per_node=4.

    Each rank has a GPU of its own.  Without GPUs ranks are processes that share the cores, where SP gains
    little; measure while nothing else runs.
    """
    from rich.console import Console

    from flows.preflight import check_file
    from flows.progress import counted
    from spotlight_core.costs.files import write_costs
    from spotlight_core.elastic.planner import MOST_RANKS
    from spotlight_core.profiling.measure import cost_model, measured
    from spotlight_core.profiling.plan import ProfilePlan
    from spotlight_core.recipes import load_recipe

    config = load_recipe(recipe, override or [])
    plan = ProfilePlan(
        degrees=tuple(sorted({1, *_numbers("degrees", degrees, MOST_RANKS)})),
        rows=_numbers("rows", rows) if rows else tuple(sorted({1, config.data.seeds_per_prompt})),
        steps=steps,
        repeats=repeats,
    )
    check_file(output, "the cost model")
    train_seconds, score_seconds = _recorded(runs, run)
    with counted("measuring", plan.records) as advance:
        records = measured(config, plan, lambda record: advance(1))
    costs = cost_model(records, train_seconds=train_seconds, score_seconds=score_seconds)
    write_costs(output, costs)
    Console().print(costs_table(recipe, costs, plan.rows))
    typer.echo(f"costs {output}")


def costs_table(name: str, costs: "CostModel", rows: tuple[int, ...]) -> "Table":
    """Milliseconds, one row for each thing that was measured; what one rank cannot do is left out."""
    from rich.table import Table

    table = Table(title=f"{name}: milliseconds on this machine", title_justify="left")
    table.add_column("what")
    for count in rows:
        table.add_column(f"{count} rows" if count > 1 else "1 row", justify="right")
    for degree in sorted({1, *(step.degree for step in costs.sharded)}):
        table.add_row(
            f"denoise step at SP {degree}",
            *(f"{costs.denoise_step_seconds(count, degree) * 1000:.2f}" for count in rows),
        )
    changes = (("regroup two ranks", costs.regroup_seconds), ("hand a state over", costs.reshard_seconds))
    for what, seconds in (
        ("denoise step that reuses a velocity", costs.reused_step_seconds),
        ("launch of a request", costs.launch_seconds),
        ("publish weights", costs.publish_seconds),
        ("load weights from the store", costs.load_seconds),
        ("load weights from the node's copy", costs.copy_seconds),
        *(changes if costs.sharded else ()),
        ("let weights go, for training", costs.sleep_seconds),
        ("take weights back", costs.wake_seconds),
        ("boot of a process", costs.boot_seconds),
    ):
        table.add_row(what, f"{seconds * 1000:.2f}")
    return table


def _numbers(option: str, text: str, most: int | None = None) -> tuple[int, ...]:
    from spotlight_core.errors import BadInputError

    try:
        numbers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        numbers = (0,)
    if numbers[0] < 1 or (most and numbers[-1] > most):
        up_to = f" to {most}" if most else ""
        raise BadInputError(f"--{option} {text}", f"give whole numbers from 1{up_to}, such as 1,2,4")
    return numbers


def _recorded(runs: Path, run: str | None) -> tuple[float, float]:
    """Seconds of an update and of scoring an image, of a run that was recorded."""
    if run is None:
        return 0.0, 0.0
    from flows.compare import recorded_costs
    from flows.targets import existing_run

    costs = recorded_costs(existing_run(runs, run))
    return costs.train_seconds, costs.score_seconds_per_image
