"""What the last bits of a run depend on besides its recipe."""

import torch


def cpu_capability() -> str:
    """The instruction set that torch's kernels use here (``AVX2``, ``AVX512``...): recorded with a run,
    since sums differ in their last bits between two of them."""
    return torch.backends.cpu.get_cpu_capability()


def use_threads(count: int) -> None:
    """Compute with ``count`` torch threads from now on: sums depend on how many."""
    torch.set_num_threads(count)
