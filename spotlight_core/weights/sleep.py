"""A model whose weights leave their GPU for a while, and come back bit for bit."""

from collections.abc import Iterable
from itertools import chain

import torch
from torch import nn


class SleepingModules:
    """Modules whose weights can wait in page-locked memory of the host, so that the GPU is free for others.

    On a CPU they stay where they are, since nothing would be won, and cannot be used meanwhile either.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        self._away: list[tuple[torch.Tensor, torch.device, torch.Tensor]] = []

    @property
    def asleep(self) -> bool:
        """Whether the weights are away."""
        return bool(self._away)

    def sleep(self) -> None:
        """Let the weights go, and give their memory back to the device; nothing when asleep."""
        if self._away:
            return
        tensors = {
            id(tensor): tensor
            for module in self._modules
            for tensor in chain(module.parameters(), module.buffers())
        }
        for tensor in tensors.values():
            self._away.append((tensor, tensor.device, _on_host(tensor.data)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for tensor in tensors.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the weights back; nothing when awake."""
        for tensor, device, host in self._away:
            tensor.data = host.to(device, non_blocking=True)
        if self._away and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._away.clear()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
