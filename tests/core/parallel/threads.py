"""A group of threads in one process: the quickest way to see that a shared forward is the plain one."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from spotlight_core.parallel.communicator import GroupBrokenError

T = TypeVar("T")
WAIT_SECONDS = 60.0


class Ring:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_SECONDS)
        self.said: list[Any] = [None] * size


class ThreadCommunicator:
    """``Communicator`` between threads: all say something, then all have heard it."""

    generation = 0

    def __init__(self, ring: Ring, rank: int) -> None:
        self.rank, self.size = rank, len(ring.said)
        self._ring = ring
        self.calls = 0

    def _hear(self, words: Any) -> list[Any]:
        self.calls += 1
        try:
            self._ring.said[self.rank] = words
            self._ring.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise GroupBrokenError("the group of threads is broken") from error
        heard = list(self._ring.said)
        with contextlib.suppress(threading.BrokenBarrierError):  # it has heard them all
            self._ring.barrier.wait()
        return heard

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        assert all(part.is_contiguous() for part in parts)
        received = [sent[self.rank].clone() for sent in self._hear([part.detach() for part in parts])]
        assert [tuple(part.shape) for part in received] == [tuple(shape) for shape in shapes]
        return received

    def all_gather(self, part: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        received = [sent.clone() for sent in self._hear(part.detach())]
        assert [tuple(part.shape) for part in received] == [tuple(shape) for shape in shapes]
        return received

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._hear(tensor.detach())).sum(0)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        sent: torch.Tensor = self._hear(tensor.detach())[source].clone()
        assert sent.shape == tensor.shape
        return sent

    def abort(self) -> None:
        self._ring.barrier.abort()


def in_group(size: int, work: Callable[[ThreadCommunicator], T]) -> list[T]:
    """``work`` of each rank, all at once; an error of one ends the others."""
    ring = Ring(size)

    def of(rank: int) -> T:
        communicator = ThreadCommunicator(ring, rank)
        try:
            return work(communicator)
        except BaseException:
            communicator.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(of, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    first = [error for error in errors if not isinstance(error, GroupBrokenError)] or errors
    if first:
        raise first[0]
    return [future.result() for future in futures]
