"""Collectives of CPU tensors over memory that the node's processes share.

Each rank lays its parts in its own outbox and says so by a stamp (generation and number of the
collective); the others wait for the stamp, copy what is theirs, look once more that it was not
overwritten meanwhile, and say that they have read.  A half of an outbox is written again when all have
read the message before the last, and by the next group when all who still stand in the former one have
read its last.  No message of another generation can be taken for one of this: no other has its stamp.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from spotlight_core.errors import BadInputError
from spotlight_core.parallel.communicator import GroupBrokenError
from spotlight_core.parallel.membership import Membership
from spotlight_core.parallel.outbox import Inboxes, Outbox, message_bytes
from spotlight_core.parallel.table import DONE, SENT, WRITING, fence

_SEQUENCES = 1 << 32


class SharedMemoryCommunicator:
    """See ``Communicator``; made by ``NodeRendezvous.communicator``."""

    def __init__(
        self,
        membership: Membership,
        outbox: Outbox,
        inboxes: Inboxes,
        former: "SharedMemoryCommunicator | None",
    ) -> None:
        """``former``: this rank's last one, from whose messages the outbox may still be read."""
        self.rank, self.size, self.ranks = membership.rank, len(membership.ranks), membership.ranks
        self.generation = membership.generation
        self._membership, self._outbox, self._inboxes = membership, outbox, inboxes
        self._words = membership.table.words
        self._slots = tuple(membership.table.slot(rank) for rank in membership.ranks)
        self._stamp = (self.generation + 1) * _SEQUENCES
        self._first = self._stamp + 1
        self._sent = 0
        self._former: SharedMemoryCommunicator | None = former
        if former is not None and not former._sent:
            self._former = former._former

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """See ``Communicator.all_to_all``."""
        with self._collective(*parts):
            self._require_one_each(len(parts), len(shapes))
            nothing = torch.empty(0, dtype=parts[0].dtype)
            self._send([nothing if to == self.rank else part for to, part in enumerate(parts)])
            return [
                parts[source].detach().clone()
                if source == self.rank
                else self._receive(source, self.rank, shape, parts[0].dtype)
                for source, shape in enumerate(shapes)
            ]

    def all_gather(self, part: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """See ``Communicator.all_gather``."""
        with self._collective(part):
            self._require_one_each(len(shapes))
            self._send([part])
            return [
                part.detach().clone() if source == self.rank else self._receive(source, 0, shape, part.dtype)
                for source, shape in enumerate(shapes)
            ]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Communicator.all_reduce``."""
        parts = self.all_gather(tensor, [tensor.shape] * self.size)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """See ``Communicator.broadcast``."""
        with self._collective(tensor):
            if source != self.rank:
                return self._receive(source, 0, tensor.shape, tensor.dtype)
            self._send([tensor])
            return tensor.detach().clone()

    def abort(self) -> None:
        """See ``Communicator.abort``."""
        self._membership.leave()

    @contextlib.contextmanager
    def _collective(self, *tensors: torch.Tensor) -> Iterator[None]:
        """Number one collective; whatever fails in it fails for all, since none could go on alone."""
        self._membership.check_ended()
        self._stamp += 1
        try:
            for tensor in tensors:
                if tensor.device.type != "cpu":
                    raise BadInputError(
                        f"a tensor on {tensor.device} in a group over shared memory",
                        'set elastic.communicator = "nccl" (or "auto")',
                    )
            yield
        except BaseException:
            self.abort()
            raise
        self._words[self._slots[self.rank] + DONE] = self._stamp

    def _require_one_each(self, *counts: int) -> None:
        if any(count != self.size for count in counts):
            raise ValueError(f"parts and shapes {counts} for a group of {self.size}: give one for each rank")

    def _send(self, parts: Sequence[torch.Tensor]) -> None:
        stamp, own = self._stamp, self._slots[self.rank]
        self._membership.check()
        if self._former is not None:
            self._membership.wait_until(self._former._is_read)
            self._former = None
        self._wait_until_read(stamp - 2)
        size = message_bytes(parts)
        if size > self._outbox.half_bytes:
            self._wait_until_read(stamp - 1)
            self._outbox.grow(size)
        self._words[own + WRITING] = stamp
        fence()
        self._outbox.write(stamp % 2, [part.detach() for part in parts])
        fence()
        self._words[own + SENT] = self._sent = stamp

    def _is_read(self) -> bool:
        """Whether everyone who still stands in this group has read its last message from this rank."""
        membership, words = self._membership, self._words
        return all(words[slot + DONE] >= self._sent or membership.is_out(slot) for slot in membership.others)

    def _wait_until_read(self, stamp: int) -> None:
        """Until all others are done with a collective of this group."""
        if stamp >= self._first:
            for slot in self._membership.others:
                self._membership.wait(slot + DONE, stamp)

    def _receive(self, source: int, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        stamp, slot = self._stamp, self._slots[source]
        self._membership.wait(slot + SENT, stamp)
        fence()
        try:
            found = self._inboxes.box(self._membership.ranks[source]).part(stamp % 2, index)
        except GroupBrokenError as error:
            raise self._membership.mourn(error) from error
        received = torch.empty(tuple(shape), dtype=dtype)
        size = received.numel() * received.element_size()
        agrees = found.numel() == size
        if agrees and size:
            received.copy_(found.view(dtype).view(received.shape))
        fence()
        if self._words[slot + WRITING] > stamp + 1:  # the sender is past this group, and has written over it
            raise self._membership.mourn(GroupBrokenError("its message was overwritten"))
        if not agrees:
            raise ValueError(
                f"rank {source} sent {found.numel()} bytes where {dtype} of shape {tuple(shape)} was expected"
            )
        return received
