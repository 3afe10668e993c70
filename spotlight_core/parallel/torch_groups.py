"""Collectives over torch.distributed: gloo between CPUs, nccl between GPUs.

Process groups are made for sets of processes, not for generations: a set that has met once is used
again.  They are built directly over a store that the node's owner hosts, since ``new_group`` wants every
rank of the world to take part, the lost ones too.  Whether a group still stands is asked of the node's
rendezvous, never of a timeout, which a long healthy step would run into.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed

from spotlight_core.errors import BadInputError
from spotlight_core.parallel.communicator import GroupBrokenError
from spotlight_core.parallel.membership import Membership
from spotlight_core.parallel.rendezvous import NodeRendezvous

PORT_FILE = "store_port"
MEETING_SECONDS = timedelta(seconds=20)
OPERATION_SECONDS = timedelta(hours=1)  # never what ends a wait
ARRIVAL_SECONDS = 1.0  # for what a member sent before it went on to its next group
_HOST = "127.0.0.1"

TorchBackend = Literal["gloo", "nccl"]


def host_store(rendezvous: NodeRendezvous) -> distributed.TCPStore:
    """The store over which process groups meet; keep it as long as the node lives.

    In the owner's process, so that no rank takes it along when it dies.
    """
    store = distributed.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    temporary = rendezvous.path / f".{PORT_FILE}.tmp"
    temporary.write_text(str(store.port), encoding="utf-8")
    temporary.replace(rendezvous.path / PORT_FILE)
    return store


class TorchGroups:
    """One rank's process groups, by who is in them."""

    def __init__(self, rendezvous: NodeRendezvous, backend: TorchBackend, device: torch.device) -> None:
        """Over the store of the rank's node; ``device`` is this rank's.

        Raises:
            BadInputError: the node's owner hosts no store, or this torch lacks the back-end.
        """
        available = distributed.is_gloo_available() if backend == "gloo" else distributed.is_nccl_available()
        if not available:
            raise BadInputError(
                f"torch {torch.__version__} has no {backend}", 'use elastic.communicator = "shm"'
            )
        try:
            self._port = int((rendezvous.path / PORT_FILE).read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInputError(
                f"no store at {rendezvous.path} ({error})", "let the node's owner host it before ranks join"
            ) from error
        self._rendezvous, self._backend, self._device = rendezvous, backend, device
        self._groups: dict[str, Future[Any]] = {}
        self._lock = threading.Lock()
        self._current: TorchCommunicator | None = None

    def prepare(self, rank_sets: Sequence[tuple[int, ...]]) -> None:
        """Begin to build the groups of likely rank sets, in the background; all their ranks must do so."""
        for ranks in rank_sets:
            if self._rendezvous.rank in ranks:
                self._group(self._rendezvous.table.identity(ranks), ranks)

    def communicator(self, ranks: tuple[int, ...], generation: int) -> "TorchCommunicator":
        """The group ``ranks`` of ``generation`` from this rank's side; see ``NodeRendezvous.communicator``.

        Immediate for sets that have met; the first collective waits for one that has not.
        """
        current = self._current
        if current is None or current.ranks != ranks or current.generation != generation:
            membership = self._rendezvous.membership(ranks, generation)
            group = self._group(membership.table.identity(ranks), ranks)
            self._current = current = TorchCommunicator(membership, group, self._device)
        return current

    def _group(self, identity: str, ranks: tuple[int, ...]) -> "Future[Any]":
        with self._lock:
            future = self._groups.get(identity)
            if future is None:
                future = self._groups[identity] = Future()
                # A thread for each: ranks may begin their groups in different orders.
                work = threading.Thread(target=self._build, args=(future, identity, ranks), daemon=True)
                work.start()
        return future

    def _build(self, future: "Future[Any]", identity: str, ranks: tuple[int, ...]) -> None:
        try:
            future.set_result(self._connect(identity, ranks))
        except Exception as error:  # raised to whoever needs this group
            future.set_exception(error)

    def _connect(self, identity: str, ranks: tuple[int, ...]) -> Any:
        # A connection of its own: a client that waits for one group's members lets nobody else pass.
        client = distributed.TCPStore(
            _HOST, self._port, is_master=False, wait_for_workers=False, timeout=MEETING_SECONDS
        )
        store, rank = distributed.PrefixStore(identity, client), ranks.index(self._rendezvous.rank or 0)
        build = self._gloo if self._backend == "gloo" else self._nccl
        return build(store, rank, len(ranks))

    def _gloo(self, store: distributed.Store, rank: int, size: int) -> Any:
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=_HOST)]
        options._timeout = MEETING_SECONDS
        group = gloo(store, rank, size, options)
        group._set_default_timeout(OPERATION_SECONDS)
        return group

    def _nccl(self, store: distributed.Store, rank: int, size: int) -> Any:
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = OPERATION_SECONDS
        group = nccl(store, rank, size, options)
        # NCCL connects at the first collective: here, on a stream of this thread, instead of in a step.
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
            group.allreduce([torch.zeros(1, device=self._device)]).wait()
            torch.cuda.current_stream().synchronize()
        return group


class TorchCommunicator:
    """See ``Communicator``; made by ``TorchGroups.communicator``.

    Tensors are taken to the group's device and back.  Bytes are exchanged whatever the dtype, for gloo
    does not know all of them.
    """

    def __init__(self, membership: Membership, group: "Future[Any]", device: torch.device) -> None:
        self.rank, self.size, self.ranks = membership.rank, len(membership.ranks), membership.ranks
        self.generation = membership.generation
        self._membership, self._future, self._device = membership, group, device

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """See ``Communicator.all_to_all``."""
        with self._collective():
            if len(parts) != self.size or len(shapes) != self.size:
                raise ValueError(f"{len(parts)} parts and {len(shapes)} shapes for a group of {self.size}")
            return self._exchange(parts, shapes)

    def all_gather(self, part: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """See ``Communicator.all_gather``; by all-to-all, since neither back-end gathers uneven parts."""
        return self.all_to_all([part] * self.size, shapes)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Communicator.all_reduce``; gathers, for the back-ends' own sums have no fixed order."""
        parts = self.all_gather(tensor, [tensor.shape] * self.size)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """See ``Communicator.broadcast``."""
        with self._collective():
            if source == self.rank or not tensor.numel():
                self._membership.check()  # the others may still hear the last word of one who went on
            if not tensor.numel():
                return tensor.detach().clone()
            given = self._bytes(tensor).clone()
            self._run(lambda group: group.broadcast(given, source))
            return given.view(tensor.dtype).view(tensor.shape).to(tensor.device)

    def abort(self) -> None:
        """See ``Communicator.abort``."""
        self._membership.leave()
        if self._future.done() and self._future.exception() is None:
            # NCCL's kernels end; gloo has nothing to end, and what waits in it ends with the processes.
            self._future.result().abort()

    def _exchange(self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        self._membership.check()
        dtype, home = parts[0].dtype, parts[0].device
        # An empty part travels as one byte: gloo's exchange can wait for ever for none.
        nothing = torch.zeros(1, dtype=torch.uint8, device=self._device)
        sent = [self._bytes(part) if part.numel() else nothing for part in parts]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
        incoming = [max(size, 1) for size in sizes]
        received = torch.empty(sum(incoming), dtype=torch.uint8, device=self._device)
        outgoing, joined = [part.numel() for part in sent], torch.cat(sent)
        self._run(lambda group: group.alltoall_base(received, joined, incoming, outgoing))
        # A piece may begin anywhere in the buffer; its clone is aligned for its dtype.
        return [
            piece[:size].clone().view(dtype).view(tuple(shape)).to(home)
            for piece, size, shape in zip(received.split(incoming), sizes, shapes, strict=True)
        ]

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        """Whatever fails in a collective fails for all, since none could go on alone."""
        self._membership.check_ended()
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _bytes(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(self._device).contiguous().flatten().view(torch.uint8)

    def _run(self, begin: Callable[[Any], Any]) -> None:
        """One collective, given up as soon as the group is broken."""
        try:
            self._membership.wait_until(self._future.done)
            work = begin(self._future.result())
            self._membership.wait_until(work.is_completed, ARRIVAL_SECONDS)
            work.wait()
        except GroupBrokenError:
            raise
        except RuntimeError as error:  # of torch: a member's connection is gone, or it never connected
            raise self._membership.mourn(error) from error
