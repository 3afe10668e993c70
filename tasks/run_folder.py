"""The folder of a run: its layout, its one exclusive lock, and how durable state is written into it.

A reader finds each JSON file whole or not at all (temporary file, fsync, rename) and each line of a
log whole: a line cut off by a kill is dropped when the log is opened again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from spotlight_core.durable import write_text
from spotlight_core.errors import BadInputError
from spotlight_core.log_lines import whole_lines

Record = dict[str, Any]


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def append_record(path: Path, record: Record) -> None:
    """Add one line to a log and sync it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_records(path: Path) -> Iterator[Record]:
    """The whole lines of a log, in order; none when there is no log yet."""
    for line in whole_lines(path):
        if line.strip():
            yield json.loads(line)


def keep_records(path: Path, keep: Callable[[Record], bool]) -> int:
    """Rewrite a log durably with the records that ``keep``; returns how many were dropped."""
    records = list(read_records(path))
    kept = [record for record in records if keep(record)]
    if path.exists():
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
    return len(records) - len(kept)


class RunFolder:
    """``runs/<name>/`` and the places in it."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._lock: TextIO | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def runs(self) -> Path:
        """The folder of all runs: where the stores that runs share live."""
        return self.path.parent

    @property
    def run_id(self) -> str:
        """Marks every process of the run (``SPOTLIGHT_RUN``): a function of the folder, so that
        ``spotlight down`` finds the leftovers of a driver that wrote nothing."""
        return f"{self.name}-{hashlib.sha256(str(self.path).encode()).hexdigest()[:8]}"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def coordinator(self) -> Path:
        """Where the run's coordinator listens, and the token that it asks for."""
        return self.path / "coordinator.json"

    @property
    def iterations(self) -> Path:
        return self.path / "iterations.jsonl"

    @property
    def decisions(self) -> Path:
        return self.path / "decisions.jsonl"

    @property
    def seed_bank(self) -> Path:
        """What exploration has scored, as Parquet."""
        return self.path / "seed_bank"

    @property
    def scores(self) -> Path:
        """The rewards that each iteration saw, by request: what a simulated replay decides on."""
        return self.path / "scores.jsonl"

    @property
    def nodes(self) -> Path:
        return self.path / "nodes"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensor_store(self) -> Path:
        return self.path / "tensor_store"

    @property
    def trainer(self) -> Path:
        """Where a trainer of several processes exchanges files; of no use once they have ended."""
        return self.path / "trainer"

    @property
    def images(self) -> Path:
        return self.path / "images"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def accounts(self) -> Path:
        """Every change of a node's state with what it had cost by then."""
        return self.path / "ledger.csv"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    # -- existence and the lock -----------------------------------------------------------------------

    def exists(self) -> bool:
        """A run was begun here."""
        return self.recipe.exists()

    def create(self) -> None:
        """Make the folder and the places in it; harmless when they are there."""
        for place in (self.nodes, self.weights, self.checkpoints, self.tensor_store, self.images, self.logs):
            place.mkdir(parents=True, exist_ok=True)

    def empty(self) -> None:
        """Delete all that the run holds but its lock, which must be held; its rows in shared stores stay."""
        for place in self.path.iterdir():
            if place.is_dir():
                shutil.rmtree(place)
            elif place.name != "lock":
                place.unlink()

    def holder(self) -> str | None:
        """The pid that holds the lock, None when nobody does."""
        lock = self.path / "lock"
        if not lock.exists():
            return None
        with lock.open("r", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "another process"
        return None

    def acquire(self) -> None:
        """Take the run's exclusive lock; it is gone with this process, however it ends.

        Raises:
            BadInputError: another process holds it.
        """
        file = (self.path / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().strip() or "another process"
            file.close()
            raise self.in_use(pid) from None
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._lock = file

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def in_use(self, pid: str) -> BadInputError:
        return BadInputError(
            f"run {self.name} in {self.path} is in use by process {pid}",
            "wait for it, stop it, or give this run another --name",
        )

    # -- run.json -------------------------------------------------------------------------------------

    def facts(self) -> Record:
        """What ``run.json`` says; empty before the run began.

        Raises:
            BadInputError: it is no JSON object.
        """
        if not self.run_json.exists():
            return {}
        try:
            facts = json.loads(self.run_json.read_bytes())
        except (OSError, ValueError) as error:
            raise self._no_facts(str(error)) from error
        if not isinstance(facts, dict) or not isinstance(facts.get("epoch", 0), int):
            raise self._no_facts("not an object with a whole number as its epoch")
        return facts

    def _no_facts(self, why: str) -> BadInputError:
        return BadInputError(
            f"{self.run_json} cannot be read ({why})", "remove it, or begin the run again with --fresh"
        )

    def note(self, **facts: Any) -> None:
        """Merge facts into ``run.json``."""
        write_json(self.run_json, self.facts() | facts)


def check_writable(folder: Path, *, what: str = "runs", option: str = "--runs") -> None:
    """Fail early where ``what``, which ``option`` places, cannot be made in ``folder``; leaves nothing.

    Raises:
        BadInputError: the nearest existing ancestor is no folder, or refuses a new file.
    """
    remedy = f"give another folder with {option}, or change its permissions"
    ancestor = folder.absolute()
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        raise BadInputError(f"cannot write {what} to {folder}: {ancestor} is not a folder", remedy)
    try:
        with tempfile.TemporaryFile(dir=ancestor):
            pass
    except OSError as error:
        raise BadInputError(f"cannot write {what} to {folder} ({error.strerror})", remedy) from error


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Exclusive across processes; for setup that two runs must not do at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
