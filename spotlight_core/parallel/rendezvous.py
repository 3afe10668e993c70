"""Where the processes of a node meet, once: after that a group is a tuple of ranks and a number.

The node's owner creates a folder, best in ``/dev/shm``, and each rank's process joins it.  It holds a
table of words that all map and an outbox of each rank.  Forming a group writes one word.
"""

import contextlib
import hashlib
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spotlight_core.errors import BadInputError
from spotlight_core.parallel.membership import Membership
from spotlight_core.parallel.table import (
    BOOTS,
    CLOSED,
    ENDED,
    FILE_NAME,
    GENERATION,
    HEARTBEAT,
    LOST,
    MAX_SLOTS,
    OWNER_PID,
    PID,
    STEP_MICROSECONDS,
    STEPS,
    NodeTable,
    Pulse,
)

if TYPE_CHECKING:
    from spotlight_core.parallel.outbox import Inboxes, Outbox
    from spotlight_core.parallel.shared_memory import SharedMemoryCommunicator

HEARTBEAT_SECONDS = 0.1


def meeting_place(run_folder: Path) -> Path:
    """Where the nodes of a run meet: in memory, where this machine has files there."""
    memory = Path("/dev/shm")
    root = memory if memory.is_dir() else Path(tempfile.gettempdir())
    name = hashlib.sha256(str(run_folder.absolute()).encode()).hexdigest()
    return root / f"spotlight-{name[:16]}"


def _sweep(folder: Path) -> None:
    """Remove rendezvous beside each other whose owners are dead; a killed one cannot do it itself."""
    for found in folder.glob(f"*/{FILE_NAME}"):
        with contextlib.suppress(BadInputError):
            if NodeTable(found.parent).is_abandoned():
                shutil.rmtree(found.parent, ignore_errors=True)


def _no_place(path: Path, error: OSError) -> BadInputError:
    return BadInputError(
        f"cannot make a rendezvous at {path} ({error})",
        "name a folder that is not there yet, where there is room",
    )


class NodeRendezvous:
    """A process's end of its node's meeting place: the owner's (``rank`` None) or a rank's."""

    def __init__(self, table: NodeTable, rank: int | None) -> None:
        """Use ``create`` or ``join``."""
        self.table, self.rank = table, rank
        self._lock = threading.Lock()  # of this process's threads
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None
        self._outbox: Outbox
        self._inboxes: Inboxes
        self._current: SharedMemoryCommunicator | None = None

    @classmethod
    def create(cls, path: Path, slots: int) -> "NodeRendezvous":
        """Make the meeting place ``path``, a folder that is not there, for ranks 0 to ``slots`` - 1.

        Leave a slot for each standby.  What dead owners left beside it is removed.

        Raises:
            BadInputError: too many slots, a folder in use, or no room in it.
        """
        if not 1 <= slots <= MAX_SLOTS:
            raise BadInputError(f"a rendezvous for {slots} ranks", f"give 1 to {MAX_SLOTS}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _sweep(path.parent)
            path.mkdir(mode=0o700)
        except OSError as error:
            raise _no_place(path, error) from error
        try:
            return cls(NodeTable.write(path, slots), None)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise _no_place(path, error) from error

    @classmethod
    def join(cls, path: Path, rank: int) -> "NodeRendezvous":
        """Be ``rank`` of the node that meets at ``path``, and beat from now on.

        Raises:
            BadInputError: no rendezvous there, its owner is gone, or another process is this rank.
        """
        rendezvous = cls(NodeTable(path), rank)
        rendezvous._require_free(rank)
        rendezvous._occupy(rank)
        return rendezvous

    @property
    def path(self) -> Path:
        """The folder."""
        return self.table.folder

    def take(self, rank: int) -> None:
        """Leave this process's slot for another, whose process is gone: how a standby takes its place.

        Raises:
            BadInputError: the process that was this rank lives.
        """
        self._require_free(rank)
        self.close()
        self._occupy(rank)

    def communicator(self, ranks: tuple[int, ...], generation: int) -> "SharedMemoryCommunicator":
        """The group ``ranks`` of ``generation`` from this rank's side; the same object while it is current.

        Bookkeeping: nothing is exchanged, and the others' memory is mapped when first read.

        Raises:
            BadInputError: ranks that cannot form a group here.
            GroupBrokenError: the generation was ended, or a member is gone or in a newer one.
        """
        # Here, since an owner needs no torch.
        from spotlight_core.parallel.shared_memory import SharedMemoryCommunicator

        current = self._current
        if current is None or current.ranks != ranks or current.generation != generation:
            membership = self.membership(ranks, generation)
            self._current = current = SharedMemoryCommunicator(
                membership, self._outbox, self._inboxes, former=current
            )
        return current

    def membership(self, ranks: tuple[int, ...], generation: int) -> Membership:
        """Enter a group, for a communicator of any kind; see ``communicator``."""
        if self.rank is None:
            raise BadInputError("the owner of a node is in no group", "join it as a rank")
        return Membership(self.table, self.rank, ranks, generation)

    def end_generation(
        self, generation: int, lost: Sequence[int] = (), ranks: Sequence[int] | None = None
    ) -> None:
        """End groups of ``generation`` from outside, as the owner: their members' calls raise.

        ``lost``: ranks whose processes count as gone from now on, with the groups that they are in.
        ``ranks``: further ranks whose groups end; when absent and nobody is lost, all that are in it.

        Raises:
            BadInputError: not the owner; a rank aborts its communicator.
        """
        if self.rank is not None:
            raise BadInputError(f"rank {self.rank} ends a generation", "abort the communicator instead")
        table, words = self.table, self.table.words
        if ranks is None and not lost:
            every = range(table.slots)
            ranks = [rank for rank in every if words[table.slot(rank) + GENERATION] == generation]
        with self._lock:
            for rank in lost:
                words[table.slot(rank) + LOST] = words[table.slot(rank) + BOOTS]
            for rank in (*lost, *(ranks or ())):
                ended = table.slot(rank) + ENDED
                words[ended] = max(words[ended], generation)

    def lose(self, rank: int, boots: int) -> None:
        """Count a process of a rank, its ``boots``-th, as gone, and end the groups that it is in."""
        words, slot = self.table.words, self.table.slot(rank)
        with self._lock:
            generation = words[slot + GENERATION]
            words[slot + LOST] = max(words[slot + LOST], boots)
            if words[slot + BOOTS] == boots:  # else these are the groups of the process after it
                words[slot + ENDED] = max(words[slot + ENDED], generation)

    def step_done(self, seconds: float) -> None:
        """Say that this rank finished a denoise step; silence is judged by how long they take."""
        words, slot = self.table.words, self._own_slot()
        words[slot + STEP_MICROSECONDS] = int(seconds * 1e6)
        words[slot + STEPS] += 1

    def pid_of(self, rank: int) -> int:
        """The process that is this rank, 0 when there is none."""
        return self.table.words[self.table.slot(rank) + PID]

    def pulses(self) -> dict[int, Pulse]:
        """What the process of every rank shows, by rank."""
        return self.table.pulses()

    def close(self) -> None:
        """Leave; as the owner, end everything and remove the folder."""
        if self.rank is None:
            self.table.words[CLOSED] = 1
            shutil.rmtree(self.path, ignore_errors=True)
        elif not self._closed.is_set():
            self._stop()
            self.table.words[self._own_slot() + PID] = 0

    def _own_slot(self) -> int:
        if self.rank is None:
            raise BadInputError("the owner of a node has no slot", "join it as a rank")
        return self.table.slot(self.rank)

    def _require_free(self, rank: int) -> None:
        table = self.table
        if not 0 <= rank < table.slots:
            raise BadInputError(f"rank {rank} of a node with {table.slots} slots", "give the node more slots")
        if not table.owner_lives():
            owner = table.words[OWNER_PID]
            raise BadInputError(
                f"the owner of {table.folder}, process {owner}, is gone", "start the node again"
            )
        if table.rank_lives(rank):
            holder = table.words[table.slot(rank) + PID]
            raise BadInputError(f"rank {rank} is process {holder}", "end it, or take another rank")

    def _occupy(self, rank: int) -> None:
        from spotlight_core.parallel.outbox import Inboxes, Outbox  # not for the owner, as above

        table = self.table
        self.rank = rank
        table.occupy(rank)
        self._outbox, self._inboxes, self._current = Outbox(table, rank), Inboxes(table), None
        self._closed = threading.Event()
        self._heart = threading.Thread(
            target=self._beat, args=(self._closed, table.slot(rank)), name="heartbeat", daemon=True
        )
        self._heart.start()

    def _beat(self, closed: threading.Event, slot: int) -> None:
        while not closed.wait(HEARTBEAT_SECONDS):
            self.table.words[slot + HEARTBEAT] += 1

    def _stop(self) -> None:
        self._closed.set()
        if self._heart is not None:
            self._heart.join()
        if self._current is not None:
            self._current.abort()
        self._outbox.remove()
