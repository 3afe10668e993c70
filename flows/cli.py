"""The `spotlight` command.  Nothing heavy is imported before a command needs it: `--help` answers at once."""

import errno
import json
import sys
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotlight_core.errors import BadInputError, SpotlightError

if TYPE_CHECKING:
    from spotlight_core.config import RunConfig
    from tasks.run_folder import RunFolder

app = typer.Typer(
    name="spotlight",
    help="RL post-training of diffusion transformers on spot GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)

Runs = Annotated[Path, typer.Option("--runs", help="Folder of all runs.")]
RunName = Annotated[str, typer.Argument(help="Name of a run in --runs.")]
RUNS = Path("runs")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the run and of its folder; the recipe's when absent, numbered if taken."),
    ] = None,
    runs: Runs = RUNS,
    override: Annotated[list[str] | None, typer.Option(help="section.key=value, as often as needed.")] = None,
    trace: Annotated[str | None, typer.Option(help="Availability trace of the spot nodes, or none.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace a run of the same name.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan, start nothing.")
    ] = False,
) -> None:
    """Train a recipe, with live progress."""
    from flows import preflight
    from flows.plan import describe

    config = _resolved(recipe, name, override or [], trace)
    if name is None and not (resume or fresh):
        config = config.model_copy(update={"name": _free_name(runs, config.name)})
    folder = _folder(runs, config.name)
    if resume:
        preflight.check_folder(folder, resume=True, fresh=fresh)
        begun = _begun(folder)
        preflight.check_same_recipe(config, begun)
        config = begun.model_copy(update={"services": config.services})
    for note in preflight.check_run(config, folder, resume=resume, fresh=fresh):
        typer.echo(f"note: {note}", err=True)
    if dry_run:
        typer.echo(describe(config, folder))
        return
    _train(config, folder, resume=resume, fresh=fresh)


def _train(config: "RunConfig", folder: "RunFolder", *, resume: bool, fresh: bool) -> None:
    from rich.console import Console

    from flows import launch
    from flows.plan import where_to_look
    from flows.progress import build_display

    display = build_display(Console())
    try:
        digest = launch.train(config, folder, resume=resume, fresh=fresh, display=display)
    finally:
        display.close()
    typer.echo(where_to_look(folder))
    typer.echo(f"weights {digest}")


@app.command()
def evaluate(
    run: RunName,
    runs: Runs = RUNS,
    images: Annotated[
        int | None, typer.Option(min=1, help="Held-out images; the recipe's final_images when absent.")
    ] = None,
) -> None:
    """Score a run's newest EMA weights on held-out prompts, without a fleet."""
    from flows.launch import evaluate_run

    folder = _existing(runs, run)
    evaluation = evaluate_run(_begun(folder), folder, images)
    typer.echo(
        f"{evaluation.policy.name}: score {evaluation.score:.4f}, held out {evaluation.held_out:.4f}, "
        f"grey share {evaluation.grey_share:.4f} over {evaluation.images} images"
    )


@app.command()
def report(
    run: RunName,
    runs: Runs = RUNS,
    baseline: Annotated[str | None, typer.Option(help="A run to compare with.")] = None,
) -> None:
    """Write the HTML report of a run, finished or not."""
    from tasks.reporting import write_report

    folder = _existing(runs, run)
    other = _existing(runs, baseline).path if baseline else None
    typer.echo(f"report {write_report(folder.path, baseline=other)}")


@app.command()
def compare(
    run: RunName,
    baseline: Annotated[str, typer.Argument(help="The run to compare it with.")],
    runs: Runs = RUNS,
) -> None:
    """Simulated cost of two runs up to their target, and what each factor brings to the ratio."""
    from rich.console import Console

    from flows.compare import compare_runs, comparison_table

    Console().print(comparison_table(compare_runs(_existing(runs, run), _existing(runs, baseline))))


@app.command()
def down(
    run: Annotated[str | None, typer.Argument(help="Name of a run; all runs when absent.")] = None,
    runs: Runs = RUNS,
) -> None:
    """End what a killed driver left behind: processes, ports, shared memory, Ray's folder."""
    from tasks.recovery import held, sweep

    folders = [_existing(runs, run)] if run else _all(runs)
    for folder in folders:
        if run is None and folder.holder() is not None:
            typer.echo(f"{folder.name}: still driven by process {folder.holder()}, left alone")
            continue
        with held(folder):
            typer.echo(f"{folder.name}: {sweep(folder)} processes ended")


@app.command()
def recipes() -> None:
    """List the shipped recipes."""
    from spotlight_core.recipes import RECIPES, recipe_names

    for name in recipe_names():
        first = (RECIPES / f"{name}.toml").read_text(encoding="utf-8").split("\n", 1)[0]
        typer.echo(f"{name:20} {first.lstrip('# ')}")


@app.command("pretrain-tiny")
def pretrain_tiny(
    output: Annotated[Path, typer.Option(help="Safetensors file to write.")] = Path(
        "tiny_qwen_image.safetensors"
    ),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; those of the shipped weights when absent.")
    ] = None,
    caption_noise: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of caption characters replaced.")
    ] = None,
    rng_seed: Annotated[int, typer.Option(help="Seed of every draw.")] = 0,
    prompts: Annotated[Path | None, typer.Option(help="Prompt file whose strings are never drawn.")] = None,
) -> None:
    """Make the embedded model's base weights from scratch (minutes)."""
    from flows.pretrain import run_pretraining

    if not output.absolute().parent.is_dir():
        raise BadInputError(
            f"no folder {output.absolute().parent}", "make it first, or give another --output"
        )
    run_pretraining(
        output, steps=steps, caption_noise=caption_noise, rng_seed=rng_seed, prompts=prompts, say=typer.echo
    )


# -- helpers ---------------------------------------------------------------------------------------------


def _resolved(recipe: str, name: str | None, overrides: list[str], trace: str | None) -> "RunConfig":
    from spotlight_core.recipes import load_recipe

    assignments = list(overrides)
    if name is not None:
        assignments.append(f"name={json.dumps(name)}")
    if trace is not None:
        assignments.append(f"fleet.trace={trace}")
    return load_recipe(recipe, assignments)


def _begun(folder: "RunFolder") -> "RunConfig":
    from pydantic import ValidationError

    from spotlight_core.config import RunConfig

    try:
        return RunConfig.model_validate_json(folder.recipe.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise BadInputError(
            f"{folder.recipe} does not fit this version ({error.error_count()} faults)",
            "use the version it was begun with",
        ) from error


def _folder(runs: Path, name: str) -> "RunFolder":
    from tasks.run_folder import RunFolder

    return RunFolder(runs / name)


def _free_name(runs: Path, name: str) -> str:
    """``name``, or the first of ``name-2``, ``name-3``... that no run has: a run is never overwritten."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(free for free in chain([name], numbered) if not _folder(runs, free).exists())


def _existing(runs: Path, name: str) -> "RunFolder":
    folder = _folder(runs, name)
    if not folder.exists():
        known = ", ".join(each.name for each in _all(runs)) or "none"
        raise BadInputError(f"no run {name!r} in {runs} (there: {known})", "check the name and --runs")
    return folder


def _all(runs: Path) -> "list[RunFolder]":
    from tasks.run_folder import RunFolder

    if not runs.is_dir():
        return []
    folders = [RunFolder(path) for path in sorted(runs.iterdir()) if path.is_dir()]
    return [folder for folder in folders if folder.exists()]


def main() -> None:
    """Entry point: one line per error, exit code 2 for bad input, 1 for failures, 130 when interrupted."""
    try:
        app()
    except SpotlightError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(f"error: {error.strerror}: free some space and continue with --resume", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
