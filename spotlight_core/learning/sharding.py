"""The ranks of one trainer: weights sharded over them with FSDP2, and what they must agree on.

Every rank calls the same collectives in the same order, whatever its share of the data: a rank that
alone skips one leaves the others waiting.  Sums of gradients are reduced, not means, so that two ranks
take the step that one would.

One rank is no process group and no wrapper: the plain tensors of a plain module.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

# A dead rank is noticed by who started it; this only bounds a hang that nobody foresaw.
COLLECTIVE_SECONDS = 600.0


class Ranks:
    """This process's place among the ranks; the default is to be the only one."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self._mesh = mesh
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.size = 1 if mesh is None else mesh.size()

    @classmethod
    def joined(cls, *, rank: int, size: int, device_type: str, meeting: Path) -> "Ranks":
        """Meet the other ranks of this machine through the file ``meeting``, which must be new.

        nccl on cuda, gloo elsewhere.
        """
        for backend in ("GLOO", "NCCL"):  # the ranks are on one machine: nothing listens to the outside
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=dist.FileStore(str(meeting), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        return cls(init_device_mesh(device_type, (size,)))

    def leave(self) -> None:
        """End the process group."""
        if self._mesh is not None:
            dist.destroy_process_group()

    def shard(self, transformers: Iterable[nn.Module]) -> None:
        """Shard each transformer in place: block by block, then what is left in its root.

        A block's frozen base weights and its adapters are one FSDP group: what is gathered may be of
        several dtypes, only the trained ones must share theirs, and they are all fp32.  There is no
        mixed-precision policy: the model casts by itself, with one rank as with several.
        """
        if self._mesh is None:
            return
        for transformer in transformers:
            for module in [*_blocks(transformer), transformer]:
                # The root too: between two passes every weight is a shard.
                fully_shard(module, mesh=self._mesh, reshard_after_forward=True)
            for module in transformer.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """fp64 numbers ``[...]`` of every rank: ``[size, ...]``, the same on all of them."""
        if self._mesh is None:
            return values[None]
        mine = values.to(self._mesh.device_type)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine)
        return torch.stack(gathered).cpu()

    def norm(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """The norm of all tensors together, each counted whole: a scalar, the same on every rank."""
        norm = torch.nn.utils.get_total_norm([local(tensor) for tensor in tensors])
        if self._mesh is None:
            return norm
        return (self.gather(norm.double() ** 2).sum() ** 0.5).to(norm)

    def full(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole copies; empty on every rank but the first, which takes part all the same."""
        if self._mesh is None:
            return {name: tensor.detach().clone() for name, tensor in tensors.items()}
        copies = {}
        for name, tensor in tensors.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.rank == 0:
                copies[name] = whole.detach().cpu().clone()
        return copies

    def barrier(self) -> None:
        """Wait for the others."""
        self.gather(torch.zeros(1, dtype=torch.float64))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory; all of it where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _blocks(transformer: nn.Module) -> Iterator[nn.Module]:
    """The members of the lists directly below the root: the transformer blocks of every family."""
    for child in transformer.children():
        if isinstance(child, nn.ModuleList):
            yield from child
