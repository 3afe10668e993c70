"""Ulysses attention (arXiv 2309.14509): tokens are split between ranks everywhere but in attention, where
heads are.

Neither has to divide by the degree: ranks differ by a token of a stream or a head at most, a rank may even
have none (the text of an empty prompt is short), and nothing is padded.  The gathered order of tokens is
that of the ranks, which attention does not see.

Shape legend: B batch, H heads, S tokens (``S_r`` those of rank r), D channels of a head.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from spotlight_core.parallel.communicator import Communicator
from spotlight_core.parallel.exchange import all_to_all
from spotlight_core.parallel.reshard import shard_sizes


def ulysses_attention(
    communicator: Communicator,
    sizes: Sequence[int],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """Attention of this rank's tokens to those of all ranks: ``[B, H, S_r, D]`` in and out.

    ``sizes``: tokens of each rank.  ``key_mask``: of all tokens, ``[B, 1, 1, S]``.  ``options`` are those
    of ``scaled_dot_product_attention``.
    """
    rank, batch, channels = communicator.rank, query.shape[0], query.shape[-1]
    heads = shard_sizes(query.shape[1], communicator.size)
    stacked = torch.stack((query, key, value))
    parts = stacked.split(list(heads), dim=2)
    received = all_to_all(communicator, parts, [(3, batch, heads[rank], size, channels) for size in sizes])
    all_query, all_key, all_value = torch.cat(received, dim=3)
    if heads[rank]:
        attended = scaled_dot_product_attention(all_query, all_key, all_value, key_mask, **options)
    else:
        attended = all_query  # more ranks than heads: nothing, of the right shape
    back = all_to_all(
        communicator,
        attended.split(list(sizes), dim=2),
        [(batch, share, sizes[rank], channels) for share in heads],
    )
    return torch.cat(back, dim=1)


class AttentionOverGroup(TorchFunctionMode):
    """While it is entered, attention goes through ``attend(query, key, value, mask, options)``.

    Diffusers' processors come down to ``scaled_dot_product_attention`` with its native back-end, which
    is the one used unless another is asked for.  ``caught`` counts the calls.
    """

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.caught = 0
        self._attend = attend

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            self.caught += 1
            return self._attend(*args, **(kwargs or {}))
        if func is torch.Tensor.reshape and not kwargs and not args[0].numel():
            return func(args[0], _spelled_out(args[0], args[1:]))
        return func(*args, **(kwargs or {}))


def _spelled_out(empty: torch.Tensor, shape: Sequence[Any]) -> list[int]:
    """``shape`` with its -1 worked out, which torch refuses to do where there are no tokens.

    Diffusers' rotary embeddings ask for that.
    """
    sizes = list(shape[0] if isinstance(shape[0], Sequence) else shape)
    if -1 in sizes:
        known = math.prod(size for size in sizes if size > 0)
        sizes[sizes.index(-1)] = math.prod(size for size in empty.shape if size) // known
    return sizes
