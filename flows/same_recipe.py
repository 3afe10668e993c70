"""Whether a run goes on, or repeats another one, under a recipe that allows it."""

from collections.abc import Sequence
from pathlib import Path

from flows.targets import begun_recipe, existing_run
from spotlight_core.batches import BatchPlanner
from spotlight_core.config import RunConfig
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.requirements import row_checks
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.errors import BadInputError
from spotlight_core.exploration.decision_log import read_decision_log
from spotlight_core.recipe_differences import (
    WITH_EFFECT,
    Difference,
    differences,
    effective_differences,
    shown,
)
from tasks.run_folder import RunFolder


def check_same_recipe(given: RunConfig, begun: RunConfig) -> None:
    """A run continues under the recipe it was begun with; services may move.

    Raises:
        BadInputError: names the first key that differs, a ``type`` before the keys that follow from it.
    """
    differing = [
        difference
        for difference in differences(begun, given)
        if not difference.key.startswith("services.") or difference.key in WITH_EFFECT
    ]
    _refuse(
        differing, "the run was begun", "resume with the same recipe and overrides, or start another --name"
    )


def replayed(config: RunConfig, runs: Path, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """``config`` with the decisions of run ``name`` of the same recipe.

    Raises:
        BadInputError: no such run, a recipe that trains something else, a log that does not go as far, or
            an override of what replaying sets.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in ("decisions", "replay"):
            raise BadInputError(f"--override {override} beside --replay {name}, which sets {key}", "drop one")
    folder = existing_run(runs, name)
    check_replay(config, folder)
    return config.model_copy(update={"decisions": "replayed", "replay": folder.path})


def check_replay(config: RunConfig, folder: RunFolder) -> None:
    """The run in ``folder`` can be replayed under ``config``."""
    if not folder.exists():
        raise BadInputError(f"no run to replay in {folder.path}", "check replay, or --replay and --runs")
    _refuse(
        effective_differences(begun_recipe(folder), config),
        f"run {folder.name}, whose decisions are replayed, was begun",
        "replay it under its own recipe: only fleet, services, prices and name may differ",
    )
    log = read_decision_log(folder.decisions, config.iterations)
    prompts = read_prompts(config.data.prompts, "train", row_checks(config))
    planner = BatchPlanner(config=config, sampler=GroupSampler(prompts=prompts, rng_seed=config.rng_seed))
    for iteration in range(1, config.iterations):
        log.batch(planner.plain(iteration, iteration * config.data.prompts_per_iteration))


def _refuse(differing: Sequence[Difference], who: str, remedy: str) -> None:
    if differing:
        key, old, new = min(differing, key=lambda each: not each.key.endswith(".type"))
        raise BadInputError(f"{who} with {key} = {shown(old)}, now {shown(new)}", remedy)
