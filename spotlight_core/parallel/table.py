"""The page that a node's processes share: who is there, who beats, what each has sent and read.

A file of aligned 8-byte words, mapped by all.  A word has one writer, so that none needs a lock, which
a stopped process could hold for ever: a rank's words are its own process's, except ``ENDED`` and
``LOST``, which are the owner's.  All but pids and beats only grow as long as a process holds the slot.
"""

import mmap
import os
import platform
import threading
from dataclasses import dataclass
from pathlib import Path

from spotlight_core.errors import BadInputError
from spotlight_core.parallel.processes import is_alive, own_identity, pid_namespace

MAX_SLOTS = 32
FILE_NAME = "table"

_MAGIC, _VERSION = 0x53504F544C494748, 1
_BLOCK = 16  # words of the header, and of a slot
_BYTES_PER_WORD = 8

# Words of the header.
MAGIC, VERSION, SLOTS, OWNER_PID, OWNER_START, OWNER_NAMESPACE, CLOSED = range(7)

# Words of a slot.
(
    PID,  # 0: nobody is here
    START,
    BOOTS,  # how many processes have held this slot
    HEARTBEAT,
    STEPS,
    STEP_MICROSECONDS,
    GENERATION,  # the newest that this rank has entered
    LEFT,  # the newest that this rank has left as broken
    LEFT_LOST,  # bit mask of the ranks that it took for lost then
    ENDED,  # the newest that the owner has ended for this rank
    LOST,  # the owner holds the process of this many boots for lost
    SENT,  # stamp of the newest message that is whole in the outbox
    WRITING,  # stamp of the newest message that was begun
    DONE,  # stamp of the newest collective that this rank has read all of
    OUTBOX_VERSION,
) = range(15)

_X86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
_barrier_lock = threading.Lock()


def fence() -> None:
    """Keep the payload and the word that announces it in order for other processes.

    x86 never swaps two stores, nor two loads, so nothing is to be done; elsewhere a lock taken and
    released is a full barrier.
    """
    if not _X86:
        with _barrier_lock:
            pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What can be seen of a rank's process from outside.

    ``boots`` tells it from others that held its slot; ``step_seconds``: its last denoise step's.
    """

    boots: int
    heartbeat: int
    alive: bool
    steps: int
    step_seconds: float


class NodeTable:
    """The mapped words of one node; ``words[self.slot(rank) + PID]`` and so on."""

    def __init__(self, folder: Path) -> None:
        """Map the table in ``folder``.

        Raises:
            BadInputError: there is none, or it is not one of ours.
        """
        self.folder = folder
        try:
            with (folder / FILE_NAME).open("r+b") as file:
                # Never unmapped by hand: a thread may still look; it goes with the last reference.
                self.words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        except (OSError, TypeError, ValueError) as error:
            raise BadInputError(
                f"no rendezvous at {folder} ({error})", "let the node's owner create it before ranks join"
            ) from error
        if tuple(self.words[:2]) != (_MAGIC, _VERSION):
            raise BadInputError(f"{folder / FILE_NAME} is no rendezvous of this version", "remove the folder")
        self.slots = self.words[SLOTS]

    @classmethod
    def write(cls, folder: Path, slots: int) -> "NodeTable":
        """Make a table in ``folder``, owned by this process; it appears there whole.

        Raises:
            OSError: the folder cannot be written, or is full.
        """
        pid, ticks = own_identity()
        size = (1 + slots) * _BLOCK * _BYTES_PER_WORD
        temporary = folder / f".{FILE_NAME}.tmp"
        with temporary.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            words = memoryview(mmap.mmap(file.fileno(), size)).cast("q")
            for word, value in ((MAGIC, _MAGIC), (VERSION, _VERSION), (SLOTS, slots)):
                words[word] = value
            words[OWNER_PID], words[OWNER_START], words[OWNER_NAMESPACE] = pid, ticks, pid_namespace()
            for rank in range(slots):
                base = (1 + rank) * _BLOCK
                words[base + GENERATION] = words[base + LEFT] = words[base + ENDED] = -1
        temporary.replace(folder / FILE_NAME)
        return cls(folder)

    def slot(self, rank: int) -> int:
        """Where a rank's words begin."""
        return (1 + rank) * _BLOCK

    def owner_lives(self) -> bool:
        """Whether the node's owner is there and has not closed it."""
        return not self.words[CLOSED] and is_alive(self.words[OWNER_PID], self.words[OWNER_START])

    def is_abandoned(self) -> bool:
        """Whether the owner is known to be dead; containers that share memory cannot see each other's."""
        return self.words[OWNER_NAMESPACE] == pid_namespace() and not self.owner_lives()

    def rank_lives(self, rank: int) -> bool:
        """Whether the process that holds a rank's slot lives."""
        base = self.slot(rank)
        return self.words[base + PID] != 0 and is_alive(self.words[base + PID], self.words[base + START])

    def broken_generation(self, rank: int) -> int:
        """The newest generation that was ended for a rank or left by it; -1 when none was."""
        base = self.slot(rank)
        return max(self.words[base + LEFT], self.words[base + ENDED])

    def identity(self, ranks: tuple[int, ...]) -> str:
        """Names the processes that are these ranks, since the last break among them; equal on all."""
        boots = tuple(self.words[self.slot(rank) + BOOTS] for rank in ranks)
        return f"{ranks}/{boots}/{max(self.broken_generation(rank) for rank in ranks)}"

    def newest_generation(self) -> int:
        """The newest that any rank has entered, left or been ended; -1 before the first."""
        entered = (self.words[self.slot(rank) + GENERATION] for rank in range(self.slots))
        return max(max(entered), max(self.broken_generation(rank) for rank in range(self.slots)))

    def occupy(self, rank: int) -> None:
        """Make this process a rank's; generations that are known already are not open to a later one."""
        words, base = self.words, self.slot(rank)
        newest = self.newest_generation()
        words[base + PID] = 0  # or the process that is gone would be seen with what the next one shows
        fence()
        words[base + BOOTS] += 1  # whoever knew another process here learns that it is gone
        if words[base + BOOTS] > 1:
            words[base + LEFT_LOST] = 0
            words[base + LEFT] = newest
        words[base + GENERATION] = -1
        for word in (HEARTBEAT, STEPS, STEP_MICROSECONDS, SENT, WRITING, DONE, OUTBOX_VERSION):
            words[base + word] = 0
        pid, words[base + START] = own_identity()
        fence()
        words[base + PID] = pid

    def pulses(self) -> dict[int, Pulse]:
        """What every occupied slot shows; one that changes hands meanwhile is left out."""
        words, pulses = self.words, {}
        for rank in range(self.slots):
            base = self.slot(rank)
            pid = words[base + PID]
            if pid:
                pulse = Pulse(
                    boots=words[base + BOOTS],
                    heartbeat=words[base + HEARTBEAT],
                    alive=is_alive(pid, words[base + START]),
                    steps=words[base + STEPS],
                    step_seconds=words[base + STEP_MICROSECONDS] / 1e6,
                )
                fence()
                if words[base + PID] == pid:
                    pulses[rank] = pulse
        return pulses
