"""Commands about availability traces: `spotlight trace show`, `generate` and `stranded`."""

from pathlib import Path
from typing import Annotated

import typer

from flows.options import AsJson

app = typer.Typer(
    help="Look at availability traces of spot nodes, and make synthetic ones.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A trace in any of the known formats.")],
    as_json: AsJson = False,
) -> None:
    """What a trace holds: nodes over time, preemptions, storms, and what was repaired in the file."""
    import dataclasses
    import json

    from rich.console import Console

    from flows.trace_view import trace_view
    from spotlight_core.market.trace_summary import summarised
    from spotlight_core.market.traces import read_trace

    trace = read_trace(file)
    summary = summarised(trace)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(summary), indent=2))
    else:
        Console().print(trace_view(file.name, summary))


@app.command()
def generate(
    output: Annotated[Path, typer.Option(help="CSV file to write.")],
    seed: Annotated[int, typer.Option(help="Equal seeds and parameters give equal traces.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Machines of the market.")] = 16,
    hours: Annotated[float, typer.Option(min=0.01, max=8_784, help="Length of the trace.")] = 24.0,
    mean_life_minutes: Annotated[
        float, typer.Option(min=0.01, help="Mean time until a machine is taken, storms apart.")
    ] = 120.0,
    mean_away_minutes: Annotated[float, typer.Option(min=0.01, help="Mean time until it is back.")] = 30.0,
    storms_per_day: Annotated[float, typer.Option(min=0, help="Moments at which many go at once.")] = 2.0,
    storm_fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the machines that a storm takes.")
    ] = 0.5,
    notice_seconds: Annotated[
        float,
        typer.Option(min=0, help="Notice, told in the file; fleet.grace_seconds gives it."),
    ] = 30.0,
) -> None:
    """Write a seeded synthetic trace, which `spotlight train --trace` replays."""
    from flows.preflight import check_file
    from flows.trace_view import one_line
    from spotlight_core.durable import write_text
    from spotlight_core.market.generator import MarketModel, bamboo_csv, generated_trace
    from spotlight_core.market.trace_summary import summarised

    model = MarketModel(
        nodes=nodes,
        hours=hours,
        mean_life_minutes=mean_life_minutes,
        mean_away_minutes=mean_away_minutes,
        storms_per_day=storms_per_day,
        storm_fraction=storm_fraction,
        notice_seconds=notice_seconds,
    )
    trace = generated_trace(model, seed)
    check_file(output, "the trace")
    write_text(output, bamboo_csv(trace, model, seed))
    typer.echo(f"trace {output}: {one_line(summarised(trace))}")


@app.command()
def stranded(
    file: Annotated[Path, typer.Argument(help="A trace in any of the formats with a clock.")],
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes of the fleet.")] = 4,
    gpus: Annotated[int, typer.Option(min=1, max=16, help="GPUs of each node.")] = 2,
    degree: Annotated[int, typer.Option(min=1, max=16, help="GPUs of an SP group.")] = 2,
    placements: Annotated[
        int, typer.Option(min=1, max=10_000, help="Seeded draws of which GPU comes and goes.")
    ] = 50,
    regroup_seconds: Annotated[
        float, typer.Option(min=0, help="What GPUs stand still for when their group is formed anew.")
    ] = 0.05,
    as_json: AsJson = False,
) -> None:
    """How much of a spot fleet stands idle because the rest of its SP group is gone.

    The trace's nodes are scaled to the fleet's GPUs.  Fixed groups work whole or not at all; elastic ones
    re-form from the GPUs that are left.
    """
    import dataclasses
    import json

    from rich.console import Console

    from flows.trace_view import stranded_view
    from spotlight_core.elastic.stranded import compared
    from spotlight_core.errors import BadInputError
    from spotlight_core.market.traces import ClockTrace, read_trace

    if gpus % degree:
        raise BadInputError(
            f"--degree {degree} with --gpus {gpus}: fixed groups would leave GPUs over for good",
            "give a degree that divides the GPUs of a node",
        )
    trace = read_trace(file)
    if not isinstance(trace, ClockTrace):
        raise BadInputError(
            f"{file} follows a run's progress and has no clock", "give a trace that tells when nodes came"
        )
    found = compared(
        trace,
        nodes=nodes,
        gpus_per_node=gpus,
        degree=degree,
        placements=placements,
        regroup_seconds=regroup_seconds,
    )
    if as_json:
        typer.echo(json.dumps({name: dataclasses.asdict(one) for name, one in found.items()}, indent=2))
    else:
        Console().print(stranded_view(file.name, found))
