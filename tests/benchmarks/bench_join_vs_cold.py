"""How many times sooner a standby takes a lost rank's place than a cold worker could, each with 200 MB.

Standby: it is told to, takes the rank's slot, copies the weights that its neighbour has published in the
node's shared memory, checks their digest, and is through the first collective with the survivor.  Cold:
a process is started, imports, builds the model, pulls the weights from the run's folder (pages that are
cached, so no network), checks them, and is through the same collective.

Plain processes, without Ray's calls on either side.  The cold time is mostly imports, and on a real node
the network and the GPU's context would come to it.  Over shared memory: this says nothing about NCCL.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import quantiles

import torch

from spotlight_core.parallel.rendezvous import NodeRendezvous
from spotlight_core.weights.store import WeightStore
from tests.benchmarks import Measurement
from tests.benchmarks.workers import Worker, ask

MEGABYTES, TENSORS = 200, 100
TRIALS = 8
SHARED_MEMORY = Path("/dev/shm")
STANDBY = 2  # the slot beside those of the ranks


def measure() -> Measurement:
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="spotlight-bench-", dir=parent) as shared,
        tempfile.TemporaryDirectory() as folder,
    ):
        values = MEGABYTES * 1_000_000 // 4 // TENSORS
        weights = {f"layer.{number}": torch.randn(values) for number in range(TENSORS)}
        policy = WeightStore(Path(folder)).publish("old", 0, weights)
        node = NodeRendezvous.create(Path(shared) / "node", slots=3)
        shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
        given = (folder, json.dumps(asdict(policy)), json.dumps(shapes))
        survivor = Worker("holder", node.path, 0, *given)
        try:
            survivor.answer()
            ask([survivor], "load")  # it pulls, and publishes the node's copy
            colds, joined = [], []
            for trial in range(TRIALS):  # in turn, so that a busy moment falls on both
                colds.append(_cold(node, survivor, given, 10 + 2 * trial))
                joined.append(_joined(node, survivor, given, 11 + 2 * trial))
        finally:
            survivor.end()
            node.close()
    cold = [seconds for seconds, _ in colds]
    details: dict[str, float | str] = {
        "trials": str(TRIALS),
        "weights, MB": float(MEGABYTES),
        "cold worker, median s": statistics.median(cold),
        "cold worker, p95 s": _p95(cold),
        "cold worker, CPU s (much less: the machine is busy)": statistics.median(cpu for _, cpu in colds),
        "standby, median ms": 1e3 * statistics.median(joined),
        "standby, p95 ms": 1e3 * _p95(joined),
        "p95 over p95": _p95(cold) / _p95(joined),
    }
    ratio = statistics.median(cold) / statistics.median(joined)
    return Measurement(value=ratio, unit="times sooner than a cold worker", details=details)


def _cold(
    node: NodeRendezvous, survivor: Worker, given: Sequence[str], generation: int
) -> tuple[float, float]:
    """Seconds, and how many of these the worker computed."""
    began = time.perf_counter()
    worker = Worker("holder", node.path, 1, *given)
    try:
        worker.answer()
        ask([worker], "pull")
        ask([survivor, worker], str(generation))
        return time.perf_counter() - began, worker.cpu_seconds()
    finally:
        worker.end()


def _joined(node: NodeRendezvous, survivor: Worker, given: Sequence[str], generation: int) -> float:
    standby = Worker("holder", node.path, STANDBY, *given)
    try:
        standby.answer()
        began = time.perf_counter()
        ask([standby], "take")
        ask([standby], "load")
        ask([survivor, standby], str(generation))
        return time.perf_counter() - began
    finally:
        standby.end()


def _p95(seconds: Sequence[float]) -> float:
    return quantiles(seconds, n=20, method="inclusive")[-1]
