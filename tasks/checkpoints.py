"""Checkpoints: the whole state of a run and of its trainer, whole or not at all.

    checkpoints/<iteration>/  state.json  trainer/*.safetensors  manifest.json (sha256 of every file)

``<iteration>`` is the iteration that runs next.  ``state.json`` holds the ``RunState`` and what a
resumed run must agree with: which model and loss, which noise, what the exploration planner learned,
which MLflow run.

The order of an iteration's durable writes is: its lines in ``iterations.jsonl``, ``decisions.jsonl``
and ``scores.jsonl``, then the checkpoint, then the tracker.  A kill between any two leaves a log that
is at most one line ahead of the checkpoint; resuming cuts that line (``rewind``), the deterministic
redo writes it again, and the tracker never saw it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from spotlight_core.config import RunConfig
from spotlight_core.durable import fsync_folder
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.journal import drop_cut_line
from spotlight_core.philox import SCHEME
from spotlight_core.seed_bank import SeedBank
from spotlight_core.types import RunState
from tasks.run_folder import RunFolder, keep_records, write_json

KEEP = 2
_STATE, _TRAINER, _MANIFEST = "state.json", "trainer", "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The content of ``state.json``.

    ``recipe`` is what the trainer's tensors depend on, ``noise`` what all draws depend on, ``planner``
    the exploration planner's own state.
    """

    state: RunState
    recipe: Mapping[str, Any]
    noise: Mapping[str, Any]
    planner: Mapping[str, Any] = field(default_factory=dict)
    mlflow_run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a run resumes from: ``trainer`` is the folder of its tensors; ``damaged`` says which newer
    checkpoints could not be used, and why."""

    saved: Saved
    trainer: Path
    damaged: tuple[str, ...]

    @property
    def state(self) -> RunState:
        return self.saved.state


def saved(
    config: RunConfig, state: RunState, *, planner: Mapping[str, Any], mlflow_run_id: str | None
) -> Saved:
    """What to save of a run of this recipe, besides the trainer's tensors."""
    return Saved(
        state=state,
        recipe=_identity(config),
        noise={"rng_seed": config.rng_seed, "scheme": SCHEME},
        planner=planner,
        mlflow_run_id=mlflow_run_id,
    )


def save(folder: RunFolder, saved: Saved, save_trainer: Callable[[Path], None]) -> Path:
    """Write the checkpoint of ``saved.state.iteration`` durably and drop all but the last two.

    ``save_trainer`` writes the trainer's tensors into the folder that it is given.
    """
    iteration = saved.state.iteration
    target = folder.checkpoints / str(iteration)
    temporary = folder.checkpoints / f".{iteration}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_json(temporary / _STATE, asdict(saved))
    (temporary / _TRAINER).mkdir()
    save_trainer(temporary / _TRAINER)
    _sync(temporary / _TRAINER)
    files = {name: _sha256(temporary / name) for name in _files(temporary)}
    write_json(temporary / _MANIFEST, {"iteration": iteration, "sha256": files})
    if target.exists():  # a damaged one that was skipped on resume
        shutil.rmtree(target)
    temporary.rename(target)
    fsync_folder(folder.checkpoints)
    for stale in _numbers(folder)[KEEP:]:
        shutil.rmtree(folder.checkpoints / str(stale), ignore_errors=True)
    return target


def latest(folder: RunFolder) -> Checkpoint | None:
    """The newest checkpoint whose hashes hold, None when there was never one.

    Raises:
        SpotlightError: there are checkpoints and all of them are damaged.
    """
    damaged: list[str] = []
    for number in _numbers(folder):
        path = folder.checkpoints / str(number)
        try:
            found = _load(path)
        except _DAMAGE as error:
            damaged.append(f"checkpoint {number} is damaged ({error})")
            continue
        return Checkpoint(saved=found, trainer=path / _TRAINER, damaged=tuple(damaged))
    if damaged:
        raise SpotlightError(
            f"no usable checkpoint in {folder.checkpoints}: {'; '.join(damaged)}",
            "restore one of them from a backup, or start anew under another --name",
        )
    return None


def ema_weights(folder: RunFolder, number: int) -> dict[str, Any]:
    """The EMA weights in checkpoint ``number`` by published name: tensors, whole, on the CPU.

    Raises:
        SpotlightError: the checkpoint is damaged or gone.
    """
    from spotlight_core.learning.trainer_state import read_tensors

    path = folder.checkpoints / str(number)
    try:
        _load(path)
    except _DAMAGE as error:
        raise SpotlightError(
            f"checkpoint {number} of run {folder.name} is damaged ({error})", "give another checkpoint"
        ) from error
    return read_tensors(path / _TRAINER, "ema.")


def check_fits(found: Saved, config: RunConfig) -> None:
    """Refuse a checkpoint that this recipe cannot go on from.

    Raises:
        BadInputError: it was written under another model, LoRA or loss, another seed, or noise that
            other versions of this program draw.
    """
    expected = saved(config, found.state, planner={}, mlflow_run_id=None)
    for theirs, ours in ((found.recipe, expected.recipe), (found.noise, expected.noise)):
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                raise BadInputError(
                    f"checkpoint {found.state.iteration} was written with {name} = {theirs.get(name)!r}, "
                    f"this run has {ours.get(name)!r}",
                    "resume with the recipe and version the run was started with, or give another --name",
                )


def rewind(folder: RunFolder, iteration: int) -> int:
    """Cut the logs to what was done before ``iteration``; returns how many iterations were cut.

    The journal is never cut: nodes were paid for iterations that are done again.
    """
    drop_cut_line(folder.journal)
    for log in folder.nodes.glob("*.jsonl"):
        drop_cut_line(log)
    # Decision n + 1 is taken in iteration n.
    keep_records(folder.decisions, lambda record: record["iteration"] <= iteration)
    SeedBank(folder.seed_bank).rewind(iteration)
    keep_records(folder.scores, lambda record: record["iteration"] < iteration)
    return keep_records(folder.iterations, lambda record: record["iteration"] < iteration)


class _Damaged(Exception):
    pass


_DAMAGE = (OSError, ValueError, KeyError, ValidationError, _Damaged)


def _identity(config: RunConfig) -> dict[str, Any]:
    """What must be equal for one recipe to go on from the other's tensors, flat."""
    model = config.model.model_dump(mode="json", exclude={"rollout_dtype", "training_dtype"})
    return {f"model.{name}": value for name, value in model.items()} | {"loss.type": config.loss.type}


def _load(path: Path) -> Saved:
    manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    expected = manifest["sha256"]
    for name, digest in expected.items():
        if _sha256(path / name) != digest:
            raise _Damaged(f"{name} differs from its hash in {_MANIFEST}")
    unknown = set(_files(path)) - {_MANIFEST} - set(expected)
    if unknown:
        raise _Damaged(f"{min(unknown)} is not in {_MANIFEST}")
    return TypeAdapter(Saved).validate_python(json.loads((path / _STATE).read_text(encoding="utf-8")))


def _files(path: Path) -> list[str]:
    """Every file below ``path``, by its place in it."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir())


def _sync(folder: Path) -> None:
    """Make the files in ``folder``, and their names, survive a power cut."""
    for file in folder.iterdir():
        with file.open("rb+") as handle:
            os.fsync(handle)
    fsync_folder(folder)


def _numbers(folder: RunFolder) -> list[int]:
    """Iterations that have a checkpoint, newest first."""
    if not folder.checkpoints.is_dir():
        return []
    names = [path.name for path in folder.checkpoints.iterdir() if path.name.isdigit()]
    return sorted(map(int, names), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
