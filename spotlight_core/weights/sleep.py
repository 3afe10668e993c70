"""A model that holds no weights on its device for a while, and has them back at once."""

from collections.abc import Iterable
from itertools import chain

import torch
from torch import nn


class SleepingModules:
    """Modules whose weights can leave their GPU: they wait in page-locked memory of the host.

    On a CPU nothing would be won by moving them: there only ``shared`` parameters, which somebody else has
    a copy of, are let go, and come back empty.
    """

    def __init__(self, modules: Iterable[nn.Module], shared: Iterable[nn.Parameter]) -> None:
        self._tensors = list({id(t): t for m in modules for t in chain(m.parameters(), m.buffers())}.values())
        self._shared = list(shared)
        self._kept: list[tuple[torch.Tensor, torch.device, torch.Tensor]] = []
        self._dropped: list[tuple[torch.Tensor, torch.Size]] = []

    @property
    def asleep(self) -> bool:
        """Whether weights are away."""
        return bool(self._kept or self._dropped)

    def sleep(self) -> None:
        """Let the weights go, and give the memory back to the device; nothing when asleep."""
        if self.asleep:
            return
        on_gpu = [tensor for tensor in self._tensors if tensor.is_cuda]
        for tensor in on_gpu:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor.data, non_blocking=True)
            self._kept.append((tensor, tensor.device, host))
        if on_gpu:
            torch.cuda.synchronize()
            for tensor in on_gpu:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            torch.cuda.empty_cache()
            return
        for parameter in self._shared:
            self._dropped.append((parameter, parameter.shape))
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def wake(self) -> bool:
        """Take the weights back; True when shared ones are empty now, to be loaded again."""
        for tensor, device, host in self._kept:
            tensor.data = host.to(device, non_blocking=True)
        if self._kept:
            torch.cuda.synchronize()
        for parameter, shape in self._dropped:
            parameter.data = torch.empty(shape, dtype=parameter.dtype)
        empty = bool(self._dropped)
        self._kept.clear()
        self._dropped.clear()
        return empty
