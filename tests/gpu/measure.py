"""One short call on a machine with a GPU: ``python -m tests.gpu.measure`` prints JSON.

- A denoise step through blocks of Qwen-Image's size, with our hooks for sequence parallelism attached and
  no group in use, against stock diffusers; both have the same weights.
- Weights from shared memory to the GPU, from pageable and from registered pages, and sleep and wake.
- With two GPUs: what a new NCCL group costs between two processes, against one that has met before.

Without a GPU it says so and ends well.
"""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.events import SPGroup
from spotlight_core.parallel.mesh import Mesh
from spotlight_core.parallel.rendezvous import NodeRendezvous, meeting_place
from spotlight_core.parallel.sequence import SequenceParallel
from spotlight_core.parallel.torch_groups import host_store
from spotlight_core.weights.aligned import map_aligned, write_aligned
from spotlight_core.weights.sleep import SleepingModules

BLOCKS, TEXT_TOKENS = 8, 128  # of Qwen-Image's 60 blocks, so that the call is short
GRIDS = {"512": 32, "1024": 64}  # tokens of a side: 8 pixels a latent, 2 latents a token
WEIGHT_BYTES = 4_000_000_000
SWITCHES = 10


def build_stack(
    device: torch.device, dtype: torch.dtype, blocks: int, heads: int = 24, channels: int = 128
) -> QwenImageTransformer2DModel:
    """Qwen-Image's transformer with fewer blocks and random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        stack = QwenImageTransformer2DModel(
            num_layers=blocks, attention_head_dim=channels, num_attention_heads=heads
        )
    return stack.to(dtype).eval()


def step_inputs(stack: QwenImageTransformer2DModel, grid: int) -> dict[str, Any]:
    """What one forward of a row takes, for a picture of ``grid`` x ``grid`` tokens."""
    parameter = next(stack.parameters())
    place = {"device": parameter.device, "dtype": parameter.dtype}
    return {
        "hidden_states": torch.randn(1, grid * grid, stack.config.in_channels, **place),
        "timestep": torch.full((1,), 0.5, **place),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, stack.config.joint_attention_dim, **place),
        "encoder_hidden_states_mask": torch.ones(1, TEXT_TOKENS, device=parameter.device, dtype=torch.bool),
        "img_shapes": [[(1, grid, grid)]],
        "return_dict": False,
    }


def seconds(work: Callable[[], object], rounds: int = 12, warm_ups: int = 3) -> float:
    """Median of a call's seconds, until the GPU is done with it."""
    took = []
    for number in range(warm_ups + rounds):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number >= warm_ups:
            took.append(time.perf_counter() - began)
    return statistics.median(took)


@torch.inference_mode()
def step_times(
    stack: QwenImageTransformer2DModel, grids: dict[str, int], rounds: int = 12
) -> dict[str, dict[str, float]]:
    """Milliseconds of a step by size: stock, ours, and their ratio; RuntimeError when they differ."""
    found = {}
    for name, grid in grids.items():
        inputs = step_inputs(stack, grid)
        expected = stack(**inputs)[0]
        stock = seconds(lambda: stack(**inputs), rounds)  # noqa: B023  # called here alone
        sequence = SequenceParallel(stack)
        try:
            sequence.use(None)
            if not torch.equal(stack(**inputs)[0], expected):
                raise RuntimeError(f"the hooked forward of {name} is another one")
            ours = seconds(lambda: stack(**inputs), rounds)  # noqa: B023
        finally:
            sequence.detach()
        found[name] = {"stock_ms": 1e3 * stock, "ours_ms": 1e3 * ours, "ours_over_stock": ours / stock}
    return found


def copy_rates(size: int) -> dict[str, float]:
    """GB/s from a mapped file in shared memory to the GPU, and of a plain copy from pinned memory."""
    cudart = torch.cuda.cudart()
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        path = Path(folder) / "weights"
        write_aligned({f"layer.{n}": torch.randn(size // 4 // 20) for n in range(20)}, path)
        mapped = map_aligned(path)
        targets = {name: torch.empty_like(tensor, device="cuda") for name, tensor in mapped.items()}

        def fill() -> None:
            for name, target in targets.items():
                target.copy_(mapped[name], non_blocking=True)

        total = sum(tensor.nbytes for tensor in mapped.values())
        pageable = seconds(fill, rounds=5)
        first = min(tensor.data_ptr() for tensor in mapped.values())
        last = max(tensor.data_ptr() + tensor.nbytes for tensor in mapped.values())
        begin = first // os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PAGE_SIZE")
        registering = time.perf_counter()
        code = int(cudart.cudaHostRegister(begin, last - begin, 0))
        registering = time.perf_counter() - registering
        rates = {"pageable_gb_s": total / pageable / 1e9, "register_seconds": registering}
        if code == 0:
            rates["registered_gb_s"] = total / seconds(fill, rounds=5) / 1e9
            cudart.cudaHostUnregister(begin)
        pinned, target = (
            torch.empty(total, dtype=torch.uint8, pin_memory=True),
            torch.empty(total, dtype=torch.uint8, device="cuda"),
        )
        plain = seconds(lambda: target.copy_(pinned, non_blocking=True), rounds=5)
    return rates | {"pinned_gb_s": total / plain / 1e9}


def sleep_times(stack: QwenImageTransformer2DModel) -> dict[str, float]:
    """Seconds to let a model's weights go and to have them back, and the GPU memory that this frees."""
    sleeping = SleepingModules([stack])
    before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    sleeping.sleep()
    asleep = time.perf_counter()
    freed = before - torch.cuda.memory_allocated()
    sleeping.wake()
    woke = time.perf_counter() - asleep
    return {"sleep_seconds": asleep - began, "wake_seconds": woke, "freed_gb": freed / 1e9}


def nccl_groups() -> dict[str, float]:
    """Milliseconds to the end of the first collective, of processes that meet first and that have met."""
    with tempfile.TemporaryDirectory() as folder:
        node = NodeRendezvous.create(meeting_place(Path(folder)) / "node", slots=2)
        store = host_store(node)
        context = multiprocessing.get_context("spawn")
        pipes, processes = [], []
        for rank in (0, 1):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_nccl_rank, args=(node.path, rank, theirs), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        try:
            for pipe in pipes:
                pipe.recv()  # all have joined
            for pipe in pipes:
                pipe.send(None)
            answers: list[dict[str, float]] = [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
            node.close()
            del store  # kept as long as the ranks lived
    return answers[0]


def _nccl_rank(path: Path, rank: int, pipe: Connection) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    rendezvous = NodeRendezvous.join(path, rank)
    mesh = Mesh(rendezvous, ElasticConfig(communicator="nccl"), device)
    pipe.send(None)
    pipe.recv()
    took = []
    for generation in range(1, SWITCHES + 2):
        began = time.perf_counter()
        group = SPGroup(node="node", incarnation=1, ranks=(0, 1), generation=generation)
        mesh.communicator(group).all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - began))
    pipe.send({"new_group_ms": took[0], "met_before_ms": statistics.median(took[1:])})
    pipe.recv()


def _memory() -> Path | None:
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else None


def measure() -> dict[str, Any]:
    """All of it, on this machine's first GPU."""
    if not torch.cuda.is_available():
        return {"skipped": "no GPU"}
    stack = build_stack(torch.device("cuda"), torch.bfloat16, BLOCKS)
    gpus = torch.cuda.device_count()
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": gpus,
        "torch": torch.__version__,
        "blocks": BLOCKS,
        "step": step_times(stack, GRIDS),
        "sleep": sleep_times(stack),
        "copy": copy_rates(WEIGHT_BYTES),
        "nccl": nccl_groups() if gpus > 1 else {"skipped": "one GPU"},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(), indent=2) + "\n")
