"""How near the copy of weights from the node's shared memory comes to a plain copy in memory.

200 MB, as a rank that takes another's place has them: map the file in ``/dev/shm``, copy every tensor
into the parameters.  Bytes a second over those of one copy between two tensors, measured in turn in the
same run.  What checking the digest adds, and pulling from the run's folder instead, is printed beside it.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spotlight_core.weights.aligned import map_aligned
from spotlight_core.weights.copy import NodeWeights
from spotlight_core.weights.store import WeightStore
from tests.benchmarks import Measurement

MEGABYTES, TENSORS, ROUNDS = 200, 100, 15
SHARED_MEMORY = Path("/dev/shm")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _fill(parameters: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def measure() -> Measurement:
    torch.set_num_threads(1)
    values = MEGABYTES * 1_000_000 // 4 // TENSORS
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="spotlight-bench-", dir=parent) as shared,
        tempfile.TemporaryDirectory() as folder,
    ):
        weights = {f"layer.{number}": torch.randn(values) for number in range(TENSORS)}
        parameters = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        store = WeightStore(Path(folder))
        policy = store.publish("old", 0, weights)
        copies = NodeWeights(Path(shared) / "weights", store)
        copies.load(policy)
        source, target = torch.randn(values * TENSORS), torch.zeros(values * TENSORS)
        plain, copied = [], []
        for _ in range(ROUNDS):
            plain.append(_seconds(lambda: target.copy_(source)))
            copied.append(_seconds(lambda: _fill(parameters, map_aligned(copies.path(policy)))))
        checked = [_seconds(lambda: _fill(parameters, copies.load(policy))) for _ in range(3)]
        pulled = [_seconds(lambda: _fill(parameters, store.load(policy))) for _ in range(3)]
        assert all(torch.equal(parameters[name], tensor) for name, tensor in weights.items())
    size = MEGABYTES / 1e3
    details: dict[str, float | str] = {
        "copies": f"{ROUNDS} of {MEGABYTES} MB in {TENSORS} tensors",
        "plain copy, GB/s": size / statistics.median(plain),
        "map and copy, GB/s": size / statistics.median(copied),
        "map and copy, ms": 1e3 * statistics.median(copied),
        "with its digest checked, ms": 1e3 * statistics.median(checked),
        "pulled from the run's folder (cached pages) and checked, ms": 1e3 * statistics.median(pulled),
    }
    ratio = statistics.median(plain) / statistics.median(copied)
    return Measurement(value=ratio, unit="of a plain copy's bytes a second", details=details)
