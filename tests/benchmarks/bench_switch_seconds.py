"""From the communicator of one SP group to that of another, over a node's rendezvous.

One rank's side, the first barrier not counted: it goes between groups of 2 and 3 ranks, each time of a
generation that is new.  For comparison, printed only: the same over gloo, with process groups built
ahead and with ``new_group``; then what the first collective after a switch takes, and how long an
all-to-all takes.  Gloo's groups are cheap on a CPU: this says nothing about NCCL's.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from spotlight_core.parallel.communicator import Communicator
from spotlight_core.parallel.rendezvous import NodeRendezvous
from spotlight_core.parallel.torch_groups import TorchGroups, host_store
from tests.benchmarks import Measurement

RANKS, SETS = 3, ((0, 1), (0, 1, 2))
ROUNDS, WARM_UPS, NEW_GROUPS = 2000, 20, 40
SIZES = {"4 KiB": 4 << 10, "256 KiB": 256 << 10, "4 MiB": 4 << 20}
SHARED_MEMORY = Path("/dev/shm")

Make = Callable[[tuple[int, ...], int], Communicator]


def _barrier(communicator: Communicator) -> None:
    communicator.all_reduce(torch.zeros(1))


def _switches(rank: int, make: Make, first: int) -> tuple[list[float], list[float]]:
    """Seconds of each switch and of the collective after it, at this rank."""
    switching, collective = [], []
    for number in range(WARM_UPS + ROUNDS):
        ranks = SETS[number % 2]
        if rank in ranks:
            began = time.perf_counter()
            communicator = make(ranks, first + number)
            made = time.perf_counter()
            _barrier(communicator)
            if number >= WARM_UPS:
                switching.append(made - began)
                collective.append(time.perf_counter() - made)
    return switching, collective


def _all_to_all_seconds(communicator: Communicator, size: int) -> float:
    """Median of an all-to-all of two ranks, ``size`` bytes to each."""
    parts = [torch.zeros(size // 4)] * communicator.size
    seconds = []
    for number in range(210):
        began = time.perf_counter()
        communicator.all_to_all(parts, [part.shape for part in parts])
        if number >= 10:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _new_groups(rank: int, port: int) -> list[float]:
    """Seconds of torch's own new_group, which every rank of the world has to join."""
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    distributed.init_process_group(
        "gloo",
        store=distributed.PrefixStore("world", store),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    seconds = []
    for number in range(NEW_GROUPS):
        distributed.barrier()
        began = time.perf_counter()
        distributed.new_group(list(SETS[number % 2]))
        seconds.append(time.perf_counter() - began)
    return seconds


def _measure_rank(path: Path, rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    rendezvous = NodeRendezvous.join(path, rank)
    pipe.send(None)
    pipe.recv()  # all have joined
    gloo = TorchGroups(rendezvous, "gloo", torch.device("cpu"))
    gloo.prepare(SETS)
    figures: dict[str, Any] = {}
    generation = 1
    for kind, make in (("shm", rendezvous.communicator), ("gloo", gloo.communicator)):
        _barrier(make(SETS[1], generation))
        figures[kind] = _switches(rank, make, generation + 1)
        generation += WARM_UPS + ROUNDS + 2
        if rank in SETS[0]:
            pair = make(SETS[0], generation)
            figures[f"{kind} exchange"] = {
                name: _all_to_all_seconds(pair, size) for name, size in SIZES.items()
            }
        _barrier(make(SETS[1], generation + 1))
        generation += 2
    figures["new_group"] = _new_groups(rank, port)
    pipe.send(figures)
    pipe.recv()  # all are done
    os._exit(0)


def _figures(folder: Path) -> dict[str, Any]:
    """What rank 0 measured, among three processes."""
    node = NodeRendezvous.create(folder / "node", RANKS)
    store = host_store(node)
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_measure_rank, args=(node.path, rank, store.port, theirs), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(None)
        answers = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
        node.close()
    figures: dict[str, Any] = answers[0]
    return figures


def _percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def measure() -> Measurement:
    """Rank 0 of three."""
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="spotlight-bench-", dir=parent) as folder:
        figures = _figures(Path(folder))
    details: dict[str, float | str] = {"ranks, cores": f"{RANKS}, {os.cpu_count()}"}
    for kind, name in (("shm", "shared memory"), ("gloo", "gloo, groups built ahead")):
        switching, collective = figures[kind]
        details[f"{name}: switch, median µs"] = 1e6 * statistics.median(switching)
        details[f"{name}: switch, p95 µs"] = 1e6 * _percentile(switching, 95)
        details[f"{name}: first collective after it, median µs"] = 1e6 * statistics.median(collective)
    details["gloo, new_group: median µs"] = 1e6 * statistics.median(figures["new_group"])
    for size in SIZES:
        shm, gloo = (1e6 * figures[f"{kind} exchange"][size] for kind in ("shm", "gloo"))
        details[f"all_to_all of 2 ranks, {size} to each, µs"] = f"shared memory {shm:.0f}, gloo {gloo:.0f}"
    return Measurement(value=statistics.median(figures["shm"][0]), unit="s", details=details)
