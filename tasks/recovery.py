"""After a driver that did not say goodbye: end what it left, and bring its records into order."""

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator

from msgspec.structs import replace
from pydantic import ValidationError

from spotlight_core.config import RunConfig
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Lost, encode
from spotlight_core.executor.burial import bury_open_nodes
from spotlight_core.executor.processes import reap
from spotlight_core.journal import drop_cut_line, last_event
from spotlight_core.parallel.rendezvous import meeting_place
from spotlight_core.storage import store_url
from spotlight_core.tensor_store import TensorStore
from tasks.run_folder import RunFolder

LOG = logging.getLogger(__name__)


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
    """What a former life left that no later one reads: where its coordinator was, half-written checkpoints,
    and in-flight latents."""
    folder.coordinator.unlink(missing_ok=True)
    shutil.rmtree(meeting_place(folder.path), ignore_errors=True)
    for half in folder.checkpoints.glob(".*.tmp"):
        shutil.rmtree(half)
    try:
        config = RunConfig.model_validate_json(folder.recipe.read_bytes())
        TensorStore.open(store_url(config.fleet.store, folder.path, folder.run_id), memory_bytes=0).clear()
    except (SpotlightError, ValidationError) as error:  # they cost space and nothing else
        said = f"{folder.recipe} is no recipe" if isinstance(error, ValidationError) else error
        LOG.warning("commits of a former driver stay where they are: %s", said)


def _journal_losses(folder: RunFolder, ended: int) -> None:
    """Nodes were paid for until they were ended: just now, or, when none of the run's processes was
    left (a second Ctrl-C, a reboot), at about the journal's last event."""
    last = last_event(folder.journal)
    now = time.time() if ended or last is None else last.at
    events = bury_open_nodes(folder.path, now)
    if not events:
        return
    epoch, seq = (0, 0) if last is None else (last.epoch, last.seq)
    with folder.journal.open("ab") as journal:
        for number, event in enumerate(events, start=seq + 1):
            if isinstance(event, Lost):
                # The run went, not the provider's machine: it must not count as a preemption.
                event = replace(event, cause="shutdown")
            journal.write(encode(event.stamped(now, number, epoch)) + b"\n")


def begin_epoch(folder: RunFolder) -> int:
    """A new epoch, in run.json when this returns: whatever has an older one says not one more word.

    Higher than the journal's last, and than what run.json says of a start that journalled nothing.
    """
    last = last_event(folder.journal)
    noted = folder.facts().get("epoch", -1)
    epoch = 1 + max(noted, -1 if last is None else last.epoch)
    folder.note(run_id=folder.run_id, epoch=epoch)
    return epoch


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
