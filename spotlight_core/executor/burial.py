"""The books of nodes that could not close their own: a stop record each, and the words for the ledger."""

from pathlib import Path

from spotlight_core.events import Event, Lost, NodeJoined, NodeKey
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.journal import read_words


def burial(life: NodeLife, log: NodeLog, at: float, cause: str, joined: bool) -> list[Event]:
    """The events that bring the ledger to what the node's log says, with a stop record if there is none."""
    stopped_at = log.stop(life, at, "coordinator")
    node, incarnation = life.node, life.incarnation
    birth = NodeJoined(
        node=node, incarnation=incarnation, pool=life.pool, gpus=life.gpus, started_at=life.started_at
    )
    lost = Lost(node=node, incarnation=incarnation, cause=cause, stopped_at=stopped_at)
    return [lost] if joined else [birth, lost]


def bury_open_nodes(run_folder: Path, stopped_at: float) -> list[Event]:
    """Close the books of a run whose driver was killed: to be called once its processes are gone.

    Nodes without a stop record get one at ``stopped_at`` (wall-clock seconds).  Returned are the
    events that the journal lacks, unstamped and in order: the Lost of every such node and of those
    whose own last words the driver did not live to hear, with a NodeJoined before it for a node that
    was still booting.  Called again after they were appended it returns nothing.
    """
    log = NodeLog(folder=run_folder / "nodes")
    joined, lost = _journaled(run_folder / "journal.jsonl")
    events: list[Event] = []
    for life in log.lives():
        key = (life.node, life.incarnation)
        if key not in lost:
            events += burial(life, log, stopped_at, "killed", key in joined)
    return events


def _journaled(journal: Path) -> tuple[set[NodeKey], set[NodeKey]]:
    """Nodes whose NodeJoined, and whose Lost, the journal holds."""
    joined: set[NodeKey] = set()
    lost: set[NodeKey] = set()
    for word in read_words(journal):
        if isinstance(word, NodeJoined):
            joined.add((word.node, word.incarnation))
        elif isinstance(word, Lost):
            lost.add((word.node, word.incarnation))
    return joined, lost
