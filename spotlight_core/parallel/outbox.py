"""Where a rank lays what it sends: a file that the others of its node map and read.

Two halves, used in turn, so that a rank may write its next message while others read the last one.  A
half begins with the place and size of each part, in bytes; parts are aligned to 64.  A message that does
not fit moves the outbox to a new, larger file.
"""

import contextlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from spotlight_core.errors import BadInputError
from spotlight_core.parallel.communicator import GroupBrokenError
from spotlight_core.parallel.table import BOOTS, MAX_SLOTS, OUTBOX_VERSION, NodeTable, fence

FIRST_HALF_BYTES = 256 * 1024
_ALIGNMENT = 64
_PREAMBLE = MAX_SLOTS * 2 * 8  # place and size of each part


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def message_bytes(parts: Sequence[torch.Tensor]) -> int:
    """What a half must hold to carry ``parts``."""
    return _PREAMBLE + sum(_aligned(part.numel() * part.element_size()) for part in parts)


class Box:
    """One mapped file of two halves."""

    def __init__(self, path: Path, flags: int = os.O_RDWR, half_bytes: int = 0) -> None:
        """Map ``path``; ``half_bytes`` reserves that much for a new one, so that a full disk is an error
        here and not a fault on a later write."""
        handle = os.open(path, flags, 0o600)
        try:
            if half_bytes:
                os.posix_fallocate(handle, 0, 2 * half_bytes)
            self.half_bytes = os.fstat(handle).st_size // 2
            mapped = mmap.mmap(handle, 2 * self.half_bytes)
        finally:
            os.close(handle)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._words = memoryview(mapped).cast("q")

    def write(self, half: int, parts: Sequence[torch.Tensor]) -> None:
        """Lay ``parts`` down in half 0 or 1, which is large enough."""
        place, word = half * self.half_bytes + _PREAMBLE, half * self.half_bytes // 8
        for index, part in enumerate(parts):
            size = part.numel() * part.element_size()
            self._words[word + 2 * index], self._words[word + 2 * index + 1] = place, size
            if size:
                self._bytes[place : place + size].view(part.dtype).view(part.shape).copy_(part)
            place += _aligned(size)

    def part(self, half: int, index: int) -> torch.Tensor:
        """The bytes of one part, a view."""
        word = half * self.half_bytes // 8 + 2 * index
        place, size = self._words[word], self._words[word + 1]
        return self._bytes[place : place + size]


def _path(table: NodeTable, rank: int, boots: int, version: int) -> Path:
    return table.folder / f"outbox.{rank}.{boots}.{version}"


class Outbox:
    """This process's own file."""

    def __init__(self, table: NodeTable, rank: int) -> None:
        """The first file of a rank that has just occupied its slot.

        Raises:
            BadInputError: no room for it.
        """
        self._table, self._rank = table, rank
        self._slot = table.slot(rank)
        for left in table.folder.glob(f"outbox.{rank}.*"):  # by processes that held the slot before
            left.unlink(missing_ok=True)
        self._box = self._next(FIRST_HALF_BYTES)

    @property
    def half_bytes(self) -> int:
        """The largest message that needs no growing."""
        return self._box.half_bytes

    def grow(self, size: int) -> None:
        """Move to a file whose halves hold ``size`` bytes; nobody may still have to read from this one.

        Raises:
            BadInputError: no room for it.
        """
        old = self._table.words[self._slot + OUTBOX_VERSION]
        self._box = self._next(1 << (size - 1).bit_length())
        self._own_path(old).unlink(missing_ok=True)

    def write(self, half: int, parts: Sequence[torch.Tensor]) -> None:
        """See ``Box.write``."""
        self._box.write(half, parts)

    def remove(self) -> None:
        """Take the file away; those who have mapped it may still read."""
        self._own_path(self._table.words[self._slot + OUTBOX_VERSION]).unlink(missing_ok=True)

    def _own_path(self, version: int) -> Path:
        return _path(self._table, self._rank, self._table.words[self._slot + BOOTS], version)

    def _next(self, half_bytes: int) -> Box:
        version = self._table.words[self._slot + OUTBOX_VERSION] + 1
        path = self._own_path(version)
        try:
            box = Box(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, half_bytes)
        except FileNotFoundError as error:
            raise GroupBrokenError(f"the node at {self._table.folder} was closed") from error
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise BadInputError(
                f"no room for {2 * half_bytes / 2**20:.3g} MiB of messages in {path.parent} ({error})",
                "free memory there (in a container: raise the size of /dev/shm), or use another folder",
            ) from error
        fence()
        self._table.words[self._slot + OUTBOX_VERSION] = version
        return box


class Inboxes:
    """The outboxes of the others, mapped when first read from."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._boxes: dict[int, tuple[tuple[int, int], Box]] = {}

    def box(self, rank: int) -> Box:
        """The file that a rank writes to now.

        Raises:
            GroupBrokenError: it is gone, with its process.
        """
        slot = self._table.slot(rank)
        key = (self._table.words[slot + BOOTS], self._table.words[slot + OUTBOX_VERSION])
        known = self._boxes.get(rank)
        if known is not None and known[0] == key:
            return known[1]
        try:
            box = Box(_path(self._table, rank, *key))
        except OSError as error:
            raise GroupBrokenError(f"the outbox of rank {rank} is gone", (rank,)) from error
        self._boxes[rank] = (key, box)
        return box
