"""Collectives that gradients flow through.

Shape legend: B batch, H heads, S tokens (``S_r`` those of rank r), D channels of a head.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from spotlight_core.parallel.communicator import Communicator

Shape = Sequence[int]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, shapes: Sequence[Shape], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.communicator, ctx.shapes = communicator, [part.shape for part in parts]
        return tuple(communicator.all_to_all([part.contiguous() for part in parts], shapes))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        returned = ctx.communicator.all_to_all([part.contiguous() for part in gradients], ctx.shapes)
        return None, None, *returned


class _Gather(torch.autograd.Function):
    """All ranks compute the same of the whole: each takes its own part of the gradient, which they share."""

    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, sizes: Sequence[int], dim: int, part: torch.Tensor
    ) -> torch.Tensor:
        ctx.dim, ctx.start = dim, sum(sizes[: communicator.rank])
        ctx.length = sizes[communicator.rank]
        shapes = [(*part.shape[:dim], size, *part.shape[dim + 1 :]) for size in sizes]
        return torch.cat(communicator.all_gather(part.contiguous(), shapes), dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, None, None, gradient.narrow(ctx.dim, ctx.start, ctx.length)


def all_to_all(
    communicator: Communicator, parts: Sequence[torch.Tensor], shapes: Sequence[Shape]
) -> tuple[torch.Tensor, ...]:
    """``Communicator.all_to_all``, with gradients."""
    received: tuple[torch.Tensor, ...] = _AllToAll.apply(communicator, shapes, *parts)
    return received


def gather(communicator: Communicator, sizes: Sequence[int], dim: int, part: torch.Tensor) -> torch.Tensor:
    """Every rank's part along ``dim``, ``sizes`` long, as one tensor; gradients go back to their ranks."""
    whole: torch.Tensor = _Gather.apply(communicator, sizes, dim, part)
    return whole


def reduce_gradients(parameters: Iterable[nn.Parameter], communicator: Communicator) -> None:
    """Sum the parts that the ranks' tokens gave to the gradients; collective, for the same parameters in
    the same order on all ranks.  A parameter without a gradient on any rank has none afterwards either."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    # A zero is not the same as none: an optimizer would decay that weight.
    have = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
    moved = [p for p, ranks in zip(trained, communicator.all_reduce(have).tolist(), strict=True) if ranks]
    for dtype in dict.fromkeys(parameter.dtype for parameter in moved):
        same = [parameter for parameter in moved if parameter.dtype == dtype]
        # A rank without tokens of some kind has no gradient there.
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        whole = communicator.all_reduce(torch.cat([part.reshape(-1) for part in parts]))
        for parameter, summed in zip(same, whole.split([p.numel() for p in same]), strict=True):
            parameter.grad = summed.view_as(parameter).clone()
