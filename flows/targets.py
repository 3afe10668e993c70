"""Which run, which policy: what `spotlight evaluate` and `spotlight export` are pointed at."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spotlight_core.config import RunConfig
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.types import PolicyVersion
from tasks.run_folder import RunFolder, read_records

Weights = Mapping[str, Any]  # tensors of torch, which only the core computes with
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run; its newest evaluated EMA weights, or those in one of its checkpoints."""

    folder: RunFolder
    config: RunConfig
    checkpoint: int | None = None

    @property
    def name(self) -> str:
        return self.folder.name if self.checkpoint is None else f"{self.folder.name} at {self.checkpoint}"


def find_target(runs: Path, target: str) -> Target:
    """What ``target`` names: a run in ``runs``, or a checkpoint by its path, as in runs/x/checkpoints/12.

    Raises:
        BadInputError: neither.
    """
    path = Path(target).resolve()
    if path.parent.name == CHECKPOINTS and path.name.isdigit():
        folder = RunFolder(path.parent.parent)
        if folder.exists():
            if not path.is_dir():
                there = _numbers(folder)
                raise BadInputError(
                    f"run {folder.name} has no checkpoint {path.name} (there: {there or 'none'})",
                    "give one of those, or the run for its newest evaluated weights",
                )
            return Target(folder=folder, config=begun_recipe(folder), checkpoint=int(path.name))
    folder = existing_run(runs, target)
    return Target(folder=folder, config=begun_recipe(folder))


def _numbers(folder: RunFolder) -> str:
    found = folder.checkpoints.iterdir() if folder.checkpoints.is_dir() else ()
    return ", ".join(map(str, sorted(int(path.name) for path in found if path.name.isdigit())))


def chosen_weights(target: Target) -> tuple[PolicyVersion, Weights]:
    """The target's EMA weights and their identity; loads torch.

    Raises:
        BadInputError: the run was not evaluated yet.
        SpotlightError: the weights are gone or damaged.
    """
    from spotlight_core.weights.digest import weights_digest
    from spotlight_core.weights.store import WeightStore
    from tasks import checkpoints

    if target.checkpoint is None:
        policy = newest_evaluated(target.folder)
        try:
            return policy, WeightStore(target.folder.weights).load(policy)
        except SpotlightError as error:
            if target.folder.facts().get("status") != "finished":
                raise
            raise SpotlightError(error.problem, _instead(target.folder)) from error
    weights = checkpoints.ema_weights(target.folder, target.checkpoint)
    return PolicyVersion(label="ema", number=target.checkpoint, digest=weights_digest(weights)), weights


def _instead(folder: RunFolder) -> str:
    """The remedy where the newest weights of a finished run, which cannot be resumed, are damaged."""
    from tasks import checkpoints

    try:
        newest = checkpoints.latest(folder)
    except SpotlightError:
        newest = None
    if newest is None:
        return "restore the file from a backup: the run has finished, and holds no usable checkpoint"
    return f"the run has finished: give its newest checkpoint, {newest.trainer.parent}"


def newest_evaluated(folder: RunFolder) -> PolicyVersion:
    """The policy version that the run evaluated last, whose weights are kept.

    Raises:
        BadInputError: the run was not evaluated yet.
    """
    evaluations = [record["evaluation"] for record in read_records(folder.iterations) if record["evaluation"]]
    if not evaluations:
        raise BadInputError(
            f"run {folder.name} has no evaluated weights yet",
            "continue it with `spotlight train --resume`, or give one of its checkpoints",
        )
    return PolicyVersion(**evaluations[-1]["policy"])


def begun_recipe(folder: RunFolder) -> RunConfig:
    """The resolved recipe that a run was begun with.

    Raises:
        BadInputError: it was written by another version, or cannot be read.
    """
    try:
        return RunConfig.model_validate_json(folder.recipe.read_bytes())
    except OSError as error:
        raise BadInputError(
            f"cannot read {folder.recipe} ({error})", "restore it, or name another run"
        ) from error
    except ValidationError as error:
        raise BadInputError(
            f"{folder.recipe} does not fit this version ({error.error_count()} faults)",
            "use the version it was begun with",
        ) from error


def existing_run(runs: Path, name: str) -> RunFolder:
    """The run of that name.

    Raises:
        BadInputError: there is none; lists those there are.
    """
    folder = RunFolder(runs / name)
    if not folder.exists():
        known = ", ".join(each.name for each in all_runs(runs)) or "none"
        raise BadInputError(f"no run {name!r} in {runs} (there: {known})", "check the name and --runs")
    return folder


def all_runs(runs: Path) -> list[RunFolder]:
    """Every run in the folder, by name."""
    if not runs.is_dir():
        return []
    folders = [RunFolder(path) for path in sorted(runs.iterdir()) if path.is_dir()]
    return [folder for folder in folders if folder.exists()]
