"""When each node started and stopped, in the nodes' own files: what the ledger is checked against.

``nodes/<node>-<incarnation>.jsonl`` holds a start and a stop record, and one for the strike of a
replayed kill.  The node writes its own; the coordinator writes the stop of a node that could not, with
the very seconds that its Lost carries.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spotlight_core.errors import SpotlightError

Writer = Literal["node", "coordinator"]


def keep_warnings(path: Path | None) -> None:
    """Write this process's warnings to a file of the run, made with the first of them."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("spotlight_core").addHandler(handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLife:
    """What a node's log says.  ``stopped_at`` None: it runs, or died without a word."""

    node: str
    incarnation: int
    pool: str
    gpus: int
    started_at: float
    stopped_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLog:
    """The folder of the nodes' logs.  Times are wall-clock seconds."""

    folder: Path

    def path(self, node: str, incarnation: int) -> Path:
        return self.folder / f"{node}-{incarnation}.jsonl"

    def start(self, node: str, incarnation: int, pool: str, gpus: int, at: float) -> None:
        """Record a start; creates the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {"event": "start", "node": node, "incarnation": incarnation, "pool": pool, "gpus": gpus}
        self._append(node, incarnation, record | {"at": at, "by": "node"})

    def stop(self, life: NodeLife, at: float, by: Writer) -> float:
        """Record a stop, unless there is one already; returns the seconds that hold."""
        known = self.life(life.node, life.incarnation)
        if known is not None and known.stopped_at is not None:
            return known.stopped_at
        record = {"event": "stop", "node": life.node, "incarnation": life.incarnation, "pool": life.pool}
        at = max(at, life.started_at)
        self._append(life.node, life.incarnation, record | {"gpus": life.gpus, "at": at, "by": by})
        return at

    def strike(self, node: str, incarnation: int, at: float, lease: str, request: str, step: int) -> None:
        """Record that the replayed trace kills the node before denoise ``step`` of ``request``: nobody
        else will know how far it was."""
        record = {"event": "strike", "at": at, "lease": lease, "request": request, "denoise_step": step}
        self._append(node, incarnation, record)

    def struck(self, node: str, incarnation: int) -> bool:
        """Whether the replayed trace killed this life of the node."""
        return any(record["event"] == "strike" for record in _records(self.path(node, incarnation)))

    def life(self, node: str, incarnation: int) -> NodeLife | None:
        """What the log of one incarnation says; None when it never started."""
        return _read(self.path(node, incarnation))

    def lives(self) -> Iterator[NodeLife]:
        """Every node that ever started, by file name."""
        for path in sorted(self.folder.glob("*.jsonl")):
            life = _read(path)
            if life is not None:
                yield life

    def next_incarnation(self, node: str) -> int:
        """The number of the node's next life, from 1: a number is never used twice in a run."""
        return 1 + max((life.incarnation for life in self.lives() if life.node == node), default=0)

    def _append(self, node: str, incarnation: int, record: dict[str, object]) -> None:
        with self.path(node, incarnation).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A node that was killed while it wrote leaves half a line.
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _read(path: Path) -> NodeLife | None:
    """The life that a node's file tells of; None where it never began.

    Raises:
        SpotlightError: the file holds something else, so what the node cost is not known.
    """
    try:
        return _life(_records(path))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpotlightError(
            f"{path} is no log of a node ({type(error).__name__}: {error})",
            "restore the file, or move it away: the node it tells of is then not paid for",
        ) from error


def _life(records: list[dict[str, Any]]) -> NodeLife | None:
    started = next((record for record in records if record["event"] == "start"), None)
    if started is None:
        return None
    stops = [record["at"] for record in records if record["event"] == "stop"]
    return NodeLife(
        node=started["node"],
        incarnation=started["incarnation"],
        pool=started["pool"],
        gpus=started["gpus"],
        started_at=started["at"],
        stopped_at=min(stops, default=None),
    )
