"""This machine's GPUs, and which of them a node of the fleet has: found without loading torch."""

import os
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")


def local_gpus() -> tuple[str, ...]:
    """The NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(each.strip() for each in visible.split(",") if each.strip() not in ("", "-1"))
    count = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
    return tuple(map(str, range(count)))


def gpu_of(node: str, reserved_nodes: int, gpus: tuple[str, ...]) -> str | None:
    """The GPU of ``reserved-<i>`` or ``spot-<i>``: reserved nodes first, in order; where there are more
    nodes than GPUs some share one.  None on a machine without."""
    if not gpus:
        return None
    pool, _, index = node.rpartition("-")
    place = int(index) + (0 if pool == "reserved" else reserved_nodes)
    return gpus[place % len(gpus)]


def gpus_of(node: str, reserved_nodes: int, gpus: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The ``count`` GPUs of a node, as ``gpu_of`` gives them out; fewer where the machine has not so many."""
    if not gpus:
        return ()
    pool, _, index = node.rpartition("-")
    first = (int(index) + (0 if pool == "reserved" else reserved_nodes)) * count
    return tuple(dict.fromkeys(gpus[(first + place) % len(gpus)] for place in range(count)))
