"""`spotlight calibrate`: which denoise steps previews of a recipe's model can skip, as a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from spotlight_core.diffusion.caching.table import StepTable

MOST_PROMPTS = 256


def calibrate(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, or a TOML file.")],
    output: Annotated[Path, typer.Option(help="The table of steps to write.")] = Path("steps.json"),
    prompts: Annotated[
        int, typer.Option(min=2, max=MOST_PROMPTS, help="Training prompts to run in full.")
    ] = 8,
    seeds: Annotated[int, typer.Option(min=1, max=64, help="Seeds of each prompt.")] = 2,
    override: Annotated[
        list[str] | None, typer.Option("--override", help="section.key=value; repeat for more.")
    ] = None,
) -> None:
    """Find the denoise steps that cheaper previews skip, by TeaCache's rule on full trajectories.

    The file is for exploration: spotlight train RECIPE --override exploration.steps=steps.json.
    Without one, steps are skipped by a fixed rule.
    """
    from rich.console import Console

    from flows.preflight import check_file
    from spotlight_core.batches import BatchPlanner
    from spotlight_core.data.prompts import read_prompts
    from spotlight_core.data.sampler import GroupSampler
    from spotlight_core.diffusion.caching.calibrate import calibrate as calibrated
    from spotlight_core.diffusion.caching.files import table_text
    from spotlight_core.diffusion.models import build_model
    from spotlight_core.durable import write_text
    from spotlight_core.recipes import load_recipe

    config = load_recipe(recipe, override or [])
    check_file(output, "the table of steps")
    sampler = GroupSampler(prompts=read_prompts(config.data.prompts, "train"), rng_seed=config.rng_seed)
    chosen = sampler.batch(0, prompts)
    fidelity = BatchPlanner(config=config, sampler=sampler).fidelity(0, chosen[0])
    console = Console()
    with Console(stderr=True).status(f"calibrating on {prompts} prompts"):
        model = build_model(config.model, "rollout")
        table = calibrated(
            model,
            [prompt.text for prompt in chosen],
            config.sampler,
            fidelity,
            seeds=range(seeds),
            rng_seed=config.rng_seed,
        )
    write_text(output, table_text(table))
    console.print(steps_table(config.name, table))
    for note in table.notes:
        console.print(f"note: {note}")
    console.print(f"steps {output}", soft_wrap=True)


def steps_table(name: str, steps: "StepTable") -> "Table":
    """A row for each count of computed steps."""
    from rich.table import Table

    table = Table(title=f"{name}: {steps.denoise_steps} denoise steps", title_justify="left")
    table.add_column("computed", justify="right")
    table.add_column("threshold", justify="right")
    table.add_column("reuse the last velocity at")
    for schedule in reversed(steps.schedules):
        reused = " ".join(map(str, schedule.reused_steps)) or "–"
        table.add_row(str(schedule.effective_steps), f"{schedule.threshold:.3f}", reused)
    return table
