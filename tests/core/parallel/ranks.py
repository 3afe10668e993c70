"""Rank processes that do as they are told over a pipe, and the owner of the node that they meet at."""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.events import SPGroup
from spotlight_core.parallel.communicator import Communicator, GroupBrokenError
from spotlight_core.parallel.mesh import Mesh
from spotlight_core.parallel.rendezvous import NodeRendezvous
from spotlight_core.parallel.torch_groups import host_store
from tests.core.parallel.exercises import exercise

ANSWER_SECONDS = 15.0


class RankState:
    """What a rank's process keeps between two questions."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rendezvous = NodeRendezvous.join(path, rank)
        self._meshes: dict[str, Mesh] = {}

    def mesh(self, kind: str) -> Mesh:
        if kind not in self._meshes:
            elastic = ElasticConfig.model_validate({"communicator": kind})
            self._meshes[kind] = Mesh(self.rendezvous, elastic, torch.device("cpu"))
        return self._meshes[kind]

    def communicator(self, kind: str, ranks: tuple[int, ...], generation: int) -> Communicator:
        group = SPGroup(node="node", incarnation=1, ranks=ranks, generation=generation)
        return self.mesh(kind).communicator(group)


def rounds(
    state: RankState, kind: str, ranks: tuple[int, ...], generation: int, seed: int, count: int
) -> str:
    """Random collectives against expected values; what differs, or nothing."""
    communicator = state.communicator(kind, ranks, generation)
    for number in range(count):
        difference = exercise(communicator, seed, number)
        if difference:
            return f"round {number}: {difference}"
    return ""


def until_broken(
    state: RankState, kind: str, ranks: tuple[int, ...], generation: int, seed: int
) -> dict[str, Any]:
    """Random collectives until the group breaks: when (monotonic), who is lost, and the rounds before."""
    number = 0
    try:
        communicator = state.communicator(kind, ranks, generation)
        while True:
            difference = exercise(communicator, seed, number)
            if difference:
                return {"difference": difference}
            number += 1
    except GroupBrokenError as broken:
        return {"at": time.monotonic(), "lost": broken.lost, "rounds": number, "message": str(broken)}


def take(state: RankState, rank: int) -> None:
    """A standby becomes a rank; its groups over other back-ends are made anew."""
    state.rendezvous.take(rank)
    state._meshes.clear()


def prepare(state: RankState, kind: str, rank_sets: Sequence[tuple[int, ...]]) -> None:
    """Have groups built ahead."""
    state.mesh(kind).prepare(rank_sets)


def abort_soon(state: RankState, kind: str, ranks: tuple[int, ...], generation: int, seconds: float) -> None:
    """Abort from another thread while this one goes on."""
    threading.Timer(seconds, state.communicator(kind, ranks, generation).abort).start()


def serve(path: Path, rank: int, pipe: Connection) -> None:
    """A rank's process: questions in, answers out, until told to leave."""
    torch.set_num_threads(1)
    state = RankState(path, rank)
    pipe.send(None)
    while (question := pipe.recv()) is not None:
        function, arguments = question
        try:
            pipe.send((function(state, *arguments), ""))
        except Exception:  # the test shows it
            pipe.send((None, traceback.format_exc()))
    state.rendezvous.close()
    os._exit(0)  # gloo would wait for operations that nobody will finish


class RankProcess:
    """The test's side of one rank."""

    def __init__(self, path: Path, slot: int) -> None:
        # Forks of a server that has loaded torch once: a boot takes milliseconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.core.parallel.ranks"])
        self._pipe, theirs = context.Pipe()
        self.slot = slot
        self.process = context.Process(target=serve, args=(path, slot, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def wait_until_joined(self) -> None:
        """Return when it is in its slot; once, before the first question."""
        self._receive()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Ask for a function of this module to be called."""
        self._pipe.send((function, arguments))

    def answer(self) -> Any:
        """What it returned."""
        value, error = self._receive()
        if error:
            raise AssertionError(f"rank {self.slot}: {error}")
        return value

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Begin, and wait for the answer."""
        self.begin(function, *arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Send this process a signal."""
        os.kill(self.process.pid or 0, number)

    def end(self) -> None:
        """Kill it, whatever it does."""
        self.process.kill()
        self.process.join()

    def _receive(self) -> Any:
        if not self._pipe.poll(ANSWER_SECONDS):
            raise AssertionError(f"rank {self.slot} gave no answer in {ANSWER_SECONDS} s")
        return self._pipe.recv()


class Node:
    """The owner, here, and its rank processes."""

    def __init__(self, folder: Path, ranks: int, slots: int) -> None:
        self.rendezvous = NodeRendezvous.create(folder / "node", slots)
        self._store = host_store(self.rendezvous)
        self.ranks = {rank: self.boot(rank) for rank in range(ranks)}
        for process in self.ranks.values():
            process.wait_until_joined()

    def boot(self, slot: int) -> RankProcess:
        """A process in a slot."""
        return RankProcess(self.rendezvous.path, slot)

    def ask(self, ranks: Sequence[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Ask several ranks at once."""
        for rank in ranks:
            self.ranks[rank].begin(function, *arguments)
        return [self.ranks[rank].answer() for rank in ranks]


def shared_folder() -> Path:
    """Memory where the system has some that is shared, else the temporary folder."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def running_node(ranks: int, slots: int) -> Iterator[Node]:
    """A node whose processes and files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="spotlight-test-", dir=shared_folder()) as folder:
        node = Node(Path(folder), ranks, slots)
        try:
            yield node
        finally:
            for process in node.ranks.values():
                process.end()
            node.rendezvous.close()
