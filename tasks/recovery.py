"""After a driver that did not say goodbye: end what it left, and bring its records into order."""

import contextlib
import shutil
import time
from collections.abc import Iterator

from msgspec.structs import replace

from spotlight_core.events import Lost, encode
from spotlight_core.executor.fleet import bury_open_nodes
from spotlight_core.executor.processes import reap
from spotlight_core.journal import last_position
from tasks.run_folder import RunFolder, drop_cut_line, read_records


def sweep(folder: RunFolder) -> int:
    """End the run's processes and write the stop records of nodes that could not; how many ended.

    Needs the folder's lock: of a run that is still driven, everything would look like a leftover.
    """
    ended = reap(folder.run_id)
    if folder.exists():
        drop_cut_line(folder.journal)
        for log in folder.nodes.glob("*.jsonl"):
            drop_cut_line(log)
        _journal_losses(folder, ended)
        _clear(folder)
    return ended


def _clear(folder: RunFolder) -> None:
    """In-flight latents of a former driver, which no request resumes from, and half-written checkpoints."""
    for commit in folder.tensor_store.glob("*"):
        commit.unlink()
    for half in folder.checkpoints.glob(".*.tmp"):
        shutil.rmtree(half)


def _journal_losses(folder: RunFolder, ended: int) -> None:
    """Nodes were paid for until they were ended: just now, or, when none of the run's processes was
    left (a second Ctrl-C, a reboot), at about the journal's last event."""
    now = time.time() if ended else _last_event_at(folder)
    events = bury_open_nodes(folder.path, now)
    if not events:
        return
    epoch, seq = last_position(folder.journal)
    with folder.journal.open("ab") as journal:
        for number, event in enumerate(events, start=seq + 1):
            if isinstance(event, Lost):
                # The run went, not the provider's machine: it must not count as a preemption.
                event = replace(event, cause="shutdown")
            journal.write(encode(event.stamped(now, number, max(epoch, 0))) + b"\n")


def _last_event_at(folder: RunFolder) -> float:
    return max(
        (record["at"] for record in read_records(folder.journal) if "at" in record), default=time.time()
    )


@contextlib.contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock.

    Raises:
        BadInputError: a living process has it.
    """
    folder.acquire()
    try:
        yield
    finally:
        folder.release()
