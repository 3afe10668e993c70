"""The books of nodes that could not close their own: a stop record each, and the word for the ledger."""

from pathlib import Path

from spotlight_core.events import BootFailed, Event, Lost, NodeJoined, NodeKey
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.journal import read_words


def burial(life: NodeLife, log: NodeLog, at: float, cause: str, joined: bool) -> Event:
    """What brings the ledger to what the node's log says, with a stop record if there is none.

    The Lost of a node that had joined; else a BootFailed, since what ran of it is paid for.
    """
    stopped_at = log.stop(life, at, "coordinator")
    if joined:
        return Lost(node=life.node, incarnation=life.incarnation, cause=cause, stopped_at=stopped_at)
    return BootFailed(
        node=life.node,
        pool=life.pool,
        error=f"{cause} while it booted",
        incarnation=life.incarnation,
        gpus=life.gpus,
        started_at=life.started_at,
        stopped_at=stopped_at,
    )


def bury_open_nodes(run_folder: Path, stopped_at: float) -> list[Event]:
    """Close the books of a run whose driver was killed: to be called once its processes are gone.

    Nodes without a stop record get one at ``stopped_at`` (wall-clock seconds).  Returned are the
    events that the journal lacks, unstamped and in order: the Lost of every such node and of those
    whose own last words the driver did not live to hear, a BootFailed for one that was still booting.
    Called again after they were appended it returns nothing.
    """
    log = NodeLog(folder=run_folder / "nodes")
    joined, ended = _journaled(run_folder / "journal.jsonl")
    lives = [(life, (life.node, life.incarnation)) for life in log.lives()]
    return [burial(life, log, stopped_at, "killed", key in joined) for life, key in lives if key not in ended]


def _journaled(journal: Path) -> tuple[set[NodeKey], set[NodeKey]]:
    """Nodes whose NodeJoined, and whose end, the journal holds."""
    joined: set[NodeKey] = set()
    ended: set[NodeKey] = set()
    for word in read_words(journal):
        match word:
            case NodeJoined():
                joined.add((word.node, word.incarnation))
            case Lost() | BootFailed():
                ended.add((word.node, word.incarnation))
    return joined, ended
