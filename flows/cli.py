"""The `spotlight` command.  Nothing heavy is imported before a command needs it: `--help` answers at once."""

import errno
import json
import sys
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.calibrate import calibrate
from flows.options import RUNS, RunName, Runs
from flows.profile import profile
from flows.run_commands import audit, explain
from flows.trace_commands import app as trace_app
from spotlight_core.errors import SpotlightError

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
app.add_typer(trace_app, name="trace")

TargetName = Annotated[
    str,
    typer.Argument(metavar="RUN|CHECKPOINT", help="Name of a run, or a path like runs/NAME/checkpoints/12."),
]
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EROFS: "make it writable",
}


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe.")],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the run and of its folder; the recipe's when absent, numbered if taken."),
    ] = None,
    runs: Runs = RUNS,
    override: Annotated[
        list[str] | None,
        typer.Option(help="section.key=value, such as model.lora.rank=8; as often as needed."),
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Availability trace of the spot nodes, or none.")] = None,
    replay: Annotated[
        str | None, typer.Option(help="A run whose decisions are followed: its weights come out again.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Replace a run of the same name.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check everything, show the plan with its costs, start and download nothing."
        ),
    ] = False,
    gpu: Annotated[str, typer.Option(help="GPU that the plan's costs are estimated for.")] = "H100",
) -> None:
    """Train a recipe, with live progress."""
    from flows import preflight
    from flows.plan import describe
    from flows.same_recipe import check_same_recipe, replayed
    from flows.targets import begun_recipe

    config = _resolved(recipe, name, override or [], trace)
    if replay is not None:
        config = replayed(config, runs, replay, override or [])
    if name is None and not (resume or fresh):
        config = config.model_copy(update={"name": _free_name(runs, config.name)})
    folder = _folder(runs, config.name)
    if resume:
        preflight.check_folder(folder, resume=True, fresh=fresh)
        begun = begun_recipe(folder)
        check_same_recipe(config, begun)
        config = begun.model_copy(update={"services": config.services})
    for note in preflight.check_run(config, folder, resume=resume, fresh=fresh, dry_run=dry_run):
        typer.echo(f"note: {note}", err=True)
    if dry_run:
        typer.echo(describe(config, folder, gpu))
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
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        again = "continue with --resume" if folder.exists() else "start again"
        raise SpotlightError(_told(error), f"{REMEDIES[error.errno]} and {again}") from error
    finally:
        display.close()
    typer.echo(where_to_look(folder))
    typer.echo(f"weights {digest}")


@app.command()
def evaluate(
    target: TargetName,
    runs: Runs = RUNS,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A .txt or .jsonl file, or a folder with a test split; the recipe's when absent."),
    ] = None,
    images: Annotated[
        int | None,
        typer.Option(
            min=1, help="Images, one a prompt from the first on; the recipe's final_images when absent."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="PNG with the first images and their scores; in the run's images/ when absent."),
    ] = None,
) -> None:
    """Score a run's newest evaluated EMA weights, or those of a checkpoint, without a fleet.

    The scores are those of the run's own evaluations: the same prompts, noise, sampler and rewards.
    """
    from flows.launch import evaluate_target
    from flows.preflight import check_picture, evaluation_prompts
    from flows.progress import counted
    from flows.targets import find_target

    chosen = find_target(runs, target)
    rows = evaluation_prompts(chosen.config, prompts, images)
    if output is not None:
        check_picture(output)
    with counted("images", len(rows)) as advance:
        found = evaluate_target(chosen, rows, output, advance)
    scored = found.evaluation
    typer.echo(
        f"{scored.policy.name}: score {scored.score:.4f}, held out {scored.held_out:.4f}, "
        f"grey share {scored.grey_share:.4f} over {scored.images} images"
    )
    for name, mean in found.parts.items():
        typer.echo(f"  {name} {mean:.4f}")
    typer.echo(f"images {found.grid}")


@app.command()
def export(
    target: TargetName,
    output: Annotated[Path, typer.Option(help="Folder to write; an earlier export there is replaced.")],
    runs: Runs = RUNS,
) -> None:
    """Write a policy for diffusers: the LoRA adapter, or the transformer when all weights were trained.

    With a model card (README.md) that shows how to load it, and the recipe.  The EMA weights are
    written, those that evaluations score.
    """
    from flows.export import export_policy
    from flows.targets import find_target

    written = export_policy(find_target(runs, target), output)
    typer.echo(f"export {written}")


@app.command()
def report(
    run: RunName,
    runs: Runs = RUNS,
    baseline: Annotated[str | None, typer.Option(help="A run to compare with.")] = None,
) -> None:
    """Write the HTML report of a run, finished or not."""
    from flows.targets import existing_run
    from tasks.reporting import write_report

    folder = existing_run(runs, run)
    other = existing_run(runs, baseline).path if baseline else None
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
    from flows.targets import existing_run

    comparison = compare_runs(existing_run(runs, run), existing_run(runs, baseline))
    Console().print(comparison_table(comparison))


app.command()(explain)
app.command()(audit)
app.command()(profile)
app.command()(calibrate)


@app.command()
def down(
    run: Annotated[str | None, typer.Argument(help="Name of a run; all runs when absent.")] = None,
    runs: Runs = RUNS,
) -> None:
    """End what a killed driver left behind: processes, ports, shared memory, Ray's folder."""
    from flows.targets import all_runs, existing_run
    from tasks.recovery import held, sweep

    folders = [existing_run(runs, run)] if run else all_runs(runs)
    for folder in folders:
        if run is None and folder.holder() is not None:
            typer.echo(f"{folder.name}: still driven by process {folder.holder()}, left alone")
            continue
        with held(folder):
            typer.echo(f"{folder.name}: {sweep(folder)} processes ended")


@app.command()
def recipes() -> None:
    """List the shipped recipes, one line each."""
    from spotlight_core.recipes import RECIPES, recipe_names

    for name in recipe_names():
        first = (RECIPES / f"{name}.toml").read_text(encoding="utf-8").split("\n", 1)[0]
        typer.echo(f"{name:20} {first.lstrip('# ')}")


@app.command()
def keys(
    section: Annotated[
        str | None, typer.Argument(help="Such as sampler or model.lora; all when absent.")
    ] = None,
) -> None:
    """Every key that a recipe may hold, with its default and what it means."""
    from spotlight_core.recipe_reference import reference

    typer.echo(reference(section))


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
    from flows.preflight import check_file
    from flows.pretrain import run_pretraining

    check_file(output, "the weights")
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


def _folder(runs: Path, name: str) -> "RunFolder":
    from tasks.run_folder import RunFolder

    return RunFolder(runs / name)


def _free_name(runs: Path, name: str) -> str:
    """``name``, or the first of ``name-2``, ``name-3``... that no run has: a run is never overwritten."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(free for free in chain([name], numbered) if not _folder(runs, free).exists())


def _told(error: OSError) -> str:
    named = f"{error.filename}: " if error.filename is not None else ""
    return f"{named}{error.strerror}"


def main() -> None:
    """Entry point: one line per error, exit code 2 for bad input, 1 for failures, 130 when interrupted."""
    try:
        app()
    except SpotlightError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # One that names no file is a fault of ours, or of a socket: its traceback says more.
        if error.errno not in REMEDIES and error.filename is None:
            raise
        remedy = REMEDIES.get(error.errno or 0, "check the path and its permissions")
        print(f"error: {_told(error)}: {remedy}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
