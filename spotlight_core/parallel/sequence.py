"""SequenceParallel: a transformer's forward over a group, which may be another one at the next step.

Hooks split the tokens where the plan says so and gather the output, so the transformer takes and gives
whole tensors on every rank.  They are attached once; another group is an assignment.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from spotlight_core.errors import BadInputError
from spotlight_core.parallel.communicator import Communicator
from spotlight_core.parallel.exchange import gather
from spotlight_core.parallel.plans import SequencePlan, Split, Stream, modules_like, sequence_plan
from spotlight_core.parallel.reshard import shard_sizes
from spotlight_core.parallel.ulysses import AttentionOverGroup, ulysses_attention


class SequenceParallel:
    """See the module's text.  Without a group, or in a group of one, the forward is the plain one."""

    def __init__(self, transformer: nn.Module, plan: SequencePlan | None = None) -> None:
        """Attach to ``transformer``.

        Raises:
            BadInputError: a transformer without a plan.
        """
        self._group: Communicator | None = None
        self._lengths: dict[Stream, int] = {}  # tokens of the forward under way
        self._masks: dict[tuple[Stream, ...], torch.Tensor] = {}
        self._handles: list[Any] = []
        plan = plan or sequence_plan(transformer)
        # First: a forward begins with nothing known of its tokens.
        self._handles.append(transformer.register_forward_pre_hook(self._begin))
        for name, arguments in plan.inputs.items():
            for module in modules_like(transformer, name):
                names = list(inspect.signature(module.forward).parameters)
                hook = partial(self._split_inputs, arguments, names)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for name, outputs in plan.outputs.items():
            for module in modules_like(transformer, name):
                self._handles.append(module.register_forward_hook(partial(self._split_outputs, outputs)))
        for name, split in plan.gathers.items():
            for module in modules_like(transformer, name):
                self._handles.append(module.register_forward_hook(partial(self._gather, split)))
        for name, streams in plan.attention.items():
            for module in modules_like(transformer, name):
                self._attach_attention(module, streams)

    def use(self, communicator: Communicator | None) -> None:
        """Share every forward from now on with the ranks of this group, or with none."""
        self._group = communicator if communicator is not None and communicator.size > 1 else None

    def detach(self) -> None:
        """Leave the transformer as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- hooks ----------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._lengths.clear()
        self._masks.clear()

    def _split_inputs(
        self, splits: Mapping[str, Split], names: list[str], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if self._group is None:
            return None
        positional, named = list(args), dict(kwargs)
        for name, split in splits.items():
            if named.get(name) is not None:
                named[name] = self._own(named[name], split)
            elif (place := names.index(name)) < len(positional) and positional[place] is not None:
                positional[place] = self._own(positional[place], split)
        return tuple(positional), named

    def _split_outputs(self, splits: Mapping[int, Split], module: nn.Module, args: Any, output: Any) -> Any:
        if self._group is None:
            return None
        if isinstance(output, torch.Tensor):
            return self._own(output, splits[0])
        return tuple(
            self._own(part, splits[place]) if place in splits else part for place, part in enumerate(output)
        )

    def _gather(self, split: Split, module: nn.Module, args: Any, output: torch.Tensor) -> Any:
        if self._group is None:
            return None
        sizes = shard_sizes(self._lengths[split.stream], self._group.size)
        return gather(self._group, sizes, split.dim, output)

    def _own(self, tensor: torch.Tensor, split: Split) -> torch.Tensor:
        """This rank's tokens."""
        group = self._group
        if group is None or (split.dims is not None and tensor.dim() != split.dims):
            return tensor
        length = tensor.shape[split.dim]
        known = self._lengths.setdefault(split.stream, length)
        if known != length and not torch.is_grad_enabled():  # see _sizes
            raise ValueError(f"{split.stream} tokens of one forward: {known} and {length}")
        return tensor.split(list(shard_sizes(length, group.size)), split.dim)[group.rank]

    def _attach_attention(self, module: nn.Module, streams: tuple[Stream, ...]) -> None:
        over_group = AttentionOverGroup(partial(self._attend, streams))
        entered: list[bool] = []

        def enter(module: nn.Module, args: Any) -> None:
            entered.append(self._group is not None)
            if entered[-1]:
                over_group.caught = 0
                over_group.__enter__()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if entered and entered.pop():
                over_group.__exit__(None, None, None)
                if not over_group.caught and output is not None:  # None: it raised
                    raise BadInputError(
                        f"{type(module).__name__} attends by other means than scaled_dot_product_attention, "
                        "so a group of ranks would each see their own tokens only",
                        "unset DIFFUSERS_ATTN_BACKEND, or set elastic.sp_degree = 1",
                    )

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    # -- attention ------------------------------------------------------------------------------------

    def _attend(
        self,
        streams: tuple[Stream, ...],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        group = self._group
        if group is None:
            raise ValueError("attention over a group that was left in mid forward")
        if is_causal or dropout_p or options.get("enable_gqa") or query.shape != key.shape:
            raise ValueError("only plain self-attention is shared: no causal mask, dropout, grouped heads")
        options.pop("enable_gqa", None)
        sizes = self._sizes(group, streams, query)
        mask = None if attn_mask is None else self._key_mask(group, streams, sizes, attn_mask)
        return ulysses_attention(group, sizes, query, key, value, mask, **options)

    def _sizes(self, group: Communicator, streams: tuple[Stream, ...], query: torch.Tensor) -> Sequence[int]:
        """Tokens of each rank in an attention over these streams."""
        if torch.is_grad_enabled():
            # A backward pass computes activations again after other forwards: the lengths may be theirs.
            own = torch.tensor([query.shape[2]], device=query.device)
            said = group.all_gather(own, [(1,)] * group.size)
            return [int(size) for size in said]
        shards = [shard_sizes(self._lengths[stream], group.size) for stream in streams]
        return [sum(sizes) for sizes in zip(*shards, strict=True)]

    def _key_mask(
        self,
        group: Communicator,
        streams: tuple[Stream, ...],
        sizes: Sequence[int],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """The masks of all ranks' tokens; asked for once in a forward, since all its blocks have the same."""
        if mask.dim() != 4 or mask.shape[1:3] != (1, 1):
            raise ValueError(
                f"a mask of shape {tuple(mask.shape)}: only one of keys, [B, 1, 1, S], is shared"
            )
        remembered = None if torch.is_grad_enabled() else self._masks.get(streams)
        if remembered is None:
            shapes = [(*mask.shape[:3], size) for size in sizes]
            remembered = torch.cat(group.all_gather(mask.contiguous(), shapes), dim=-1)
            self._masks[streams] = remembered
        return remembered
