"""Checkpoints: the whole RunState and the trainer's tensors, whole or not at all.

    checkpoints/<iteration>/  state.json  tensors.safetensors  manifest.json (sha256 of both)

``<iteration>`` is the iteration that runs next.  The order of an iteration's durable writes is:
its lines in ``iterations.jsonl``, ``decisions.jsonl`` and ``scores.jsonl``, then the checkpoint, then
the tracker.  A kill between any two leaves a log that is at most one line ahead of the checkpoint;
resuming cuts that line (``rewind``), the deterministic redo writes it again, and the tracker never
saw it.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from spotlight_core.errors import SpotlightError
from spotlight_core.types import RunState
from tasks.run_folder import RunFolder, drop_cut_line, fsync_folder, keep_records, write_json

Tensors = dict[str, Any]  # of torch, which only the core computes with

KEEP = 2
_STATE, _TENSORS, _MANIFEST = "state.json", "tensors.safetensors", "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a run resumes from; ``damaged`` says which newer ones could not be used, and why."""

    state: RunState
    tensors: Tensors
    damaged: tuple[str, ...]


def save(folder: RunFolder, state: RunState, tensors: Tensors) -> Path:
    """Write the checkpoint of ``state.iteration`` durably and drop all but the last two."""
    from spotlight_core.weights.store import write_durably

    target = folder.checkpoints / str(state.iteration)
    temporary = folder.checkpoints / f".{state.iteration}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_json(temporary / _STATE, {"state": asdict(state)})
    write_durably(tensors, temporary / _TENSORS)
    files = {name: _sha256(temporary / name) for name in (_STATE, _TENSORS)}
    write_json(temporary / _MANIFEST, {"iteration": state.iteration, "sha256": files})
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
        try:
            state, tensors = _load(folder.checkpoints / str(number))
        except _DAMAGE as error:
            damaged.append(f"checkpoint {number} is damaged ({error})")
            continue
        return Checkpoint(state=state, tensors=tensors, damaged=tuple(damaged))
    if damaged:
        raise SpotlightError(
            f"no usable checkpoint in {folder.checkpoints}: {'; '.join(damaged)}",
            "restore one of them from a backup, or start anew under another --name",
        )
    return None


def rewind(folder: RunFolder, iteration: int) -> int:
    """Cut the logs to what was done before ``iteration``; returns how many iterations were cut.

    The journal is never cut: nodes were paid for iterations that are done again.
    """
    drop_cut_line(folder.journal)
    for log in folder.nodes.glob("*.jsonl"):
        drop_cut_line(log)
    # Decision n + 1 is taken in iteration n.
    keep_records(folder.decisions, lambda record: record["iteration"] <= iteration)
    keep_records(folder.scores, lambda record: record["iteration"] < iteration)
    return keep_records(folder.iterations, lambda record: record["iteration"] < iteration)


class _HashMismatch(Exception):
    pass


_DAMAGE = (OSError, ValueError, KeyError, ValidationError, SafetensorError, _HashMismatch)


def _load(path: Path) -> tuple[RunState, Tensors]:
    from safetensors.torch import load_file

    manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    for name, expected in manifest["sha256"].items():
        if _sha256(path / name) != expected:
            raise _HashMismatch(f"{name} differs from its hash in {_MANIFEST}")
    record = json.loads((path / _STATE).read_text(encoding="utf-8"))
    state = TypeAdapter(RunState).validate_python(record["state"])
    return state, load_file(path / _TENSORS)


def _numbers(folder: RunFolder) -> list[int]:
    """Iterations that have a checkpoint, newest first."""
    if not folder.checkpoints.is_dir():
        return []
    names = [path.name for path in folder.checkpoints.iterdir() if path.name.isdigit()]
    return sorted(map(int, names), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
