"""Where each transformer's tokens are split over a group, and which of its attentions see all of them.

Diffusers says the first for most of its transformers (``_cp_plan``); ours for Stable Diffusion 3.
Modules are named as in ``named_modules``; ``*`` stands for each block of a list.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from spotlight_core.errors import BadInputError

Stream = Literal["text", "image"]
_TEXT = ("encoder_hidden_states", "encoder_hidden_states_mask", "txt_ids")


@dataclass(frozen=True, slots=True)
class Split:
    """Tokens of ``stream`` lie along ``dim`` of a tensor; one of another number of ``dims`` stays whole."""

    stream: Stream
    dim: int
    dims: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """Splits of modules' arguments by name, and of their outputs by place; outputs that are gathered along
    a dim; and attention modules, with the streams that their tokens are of, in that order."""

    inputs: Mapping[str, Mapping[str, Split]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, Split]] = field(default_factory=dict)
    gathers: Mapping[str, Split] = field(default_factory=dict)
    attention: Mapping[str, tuple[Stream, ...]]


_JOINT: tuple[Stream, ...] = ("text", "image")
_ATTENTION: Mapping[str, Mapping[str, tuple[Stream, ...]]] = {
    "QwenImageTransformer2DModel": {"transformer_blocks.*.attn": _JOINT},
    "FluxTransformer2DModel": {
        "transformer_blocks.*.attn": _JOINT,
        "single_transformer_blocks.*.attn": _JOINT,
    },
    "SD3Transformer2DModel": {
        "transformer_blocks.*.attn": _JOINT,
        "transformer_blocks.*.attn2": ("image",),  # dual attention, where a block has it
    },
    # Its attn2 asks the text, which every rank has whole.
    "WanTransformer3DModel": {"blocks.*.attn1": ("image",)},
}
_SD3 = SequencePlan(
    outputs={"pos_embed": {0: Split("image", 1, 3)}, "context_embedder": {0: Split("text", 1, 3)}},
    gathers={"proj_out": Split("image", 1, 3)},
    attention=_ATTENTION["SD3Transformer2DModel"],
)


def sequence_plan(transformer: nn.Module) -> SequencePlan:
    """The plan of a transformer's class.

    Raises:
        BadInputError: a class for which there is none.
    """
    name = type(transformer).__name__
    if name == "SD3Transformer2DModel":
        return _SD3
    theirs = getattr(transformer, "_cp_plan", None)
    if name not in _ATTENTION or not theirs:
        raise BadInputError(
            f"{name} has no plan for sequence parallelism",
            f"set elastic.sp_degree = 1; the transformers with one are {', '.join(sorted(_ATTENTION))}",
        )
    inputs: dict[str, dict[str, Split]] = {}
    outputs: dict[str, dict[int, Split]] = {}
    gathers: dict[str, Split] = {}
    for module, entry in theirs.items():
        if not isinstance(entry, Mapping):
            gathers[module] = Split("image", entry.gather_dim, entry.expected_dims)
            continue
        for key, split in entry.items():
            ours = Split(_stream(name, key), split.split_dim, split.expected_dims)
            if split.split_output:
                outputs.setdefault(module, {})[key] = ours
            else:
                inputs.setdefault(module, {})[key] = ours
    return SequencePlan(inputs=inputs, outputs=outputs, gathers=gathers, attention=_ATTENTION[name])


def modules_like(transformer: nn.Module, pattern: str) -> list[nn.Module]:
    """The modules of a name, in which ``*`` stands for any number."""
    name = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [module for path, module in transformer.named_modules() if name.fullmatch(path)]


def _stream(name: str, key: Any) -> Stream:
    """Qwen-Image's rotary embeddings come as a pair, the image's and then the text's."""
    if key in _TEXT or (name == "QwenImageTransformer2DModel" and key == 1):
        return "text"
    return "image"
