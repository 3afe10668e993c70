"""What TeaCache watches in each family's transformer, read by a hook that changes nothing.

| transformer | taken | as in |
|---|---|---|
| Qwen-Image, embedded | image tokens of block 0, normed and modulated: its attention's input | vLLM-Omni |
| FLUX | image tokens of block 0, normed and modulated: the first output of its norm1 | TeaCache4FLUX |
| SD3 | the same | as FLUX: one MMDiT block |
| Wan | the time embedding, of the timestep alone | TeaCache4Wan2.1, without retained steps |

Public sources: github.com/ali-vilab/TeaCache at 7c10efc (FLUX, Wan), github.com/vllm-project/vllm-omni at
0131cb5 (Qwen-Image).

Shape legend: B batch, S image tokens, D channels of the transformer.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spotlight_core.diffusion.model import DiffusionModel
from spotlight_core.errors import BadInputError

_Read = Callable[[Any, Mapping[str, Any], Any], torch.Tensor]
"""From a module's positional and named arguments and its output."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A module by its name in the transformer, and how to read what is watched off a call of it."""

    module: str
    read: _Read


def _first_output(args: Any, kwargs: Mapping[str, Any], output: Any) -> torch.Tensor:
    return output[0]


def _image_tokens(args: Any, kwargs: Mapping[str, Any], output: Any) -> torch.Tensor:
    return kwargs["hidden_states"]


_PLACES: Mapping[str, _Place] = {
    "QwenImageTransformer2DModel": _Place("transformer_blocks.0.attn", _image_tokens),
    "FluxTransformer2DModel": _Place("transformer_blocks.0.norm1", _first_output),
    "SD3Transformer2DModel": _Place("transformer_blocks.0.norm1", _first_output),
    "WanTransformer3DModel": _Place("condition_embedder", _first_output),
}


class ModulatedInput:
    """Reads the modulated input of every forward of a transformer until it is detached."""

    def __init__(self, transformer: nn.Module) -> None:
        """Attach.

        Raises:
            BadInputError: a transformer of no known family.
        """
        name = type(transformer).__name__
        if name not in _PLACES:
            raise BadInputError(
                f"{name} has no known modulated input",
                f"leave its velocities uncached; those with one are {', '.join(sorted(_PLACES))}",
            )
        self._place = _PLACES[name]
        self._first: torch.Tensor | None = None
        watched = transformer.get_submodule(self._place.module)
        self._handle = watched.register_forward_hook(self._watch, with_kwargs=True)

    def take(self) -> torch.Tensor:
        """``[B, S, D]`` (Wan ``[B, D]``) of the first forward since the last call, on its device.

        The first, since a guided velocity takes two forwards: that of the prompt, then the negative one.

        Raises:
            ValueError: no forward since.
        """
        if self._first is None:
            raise ValueError("no forward has gone through the transformer since the last one was taken")
        taken, self._first = self._first, None
        return taken

    def detach(self) -> None:
        """Leave the transformer as it was."""
        self._handle.remove()
        self._first = None

    def _watch(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if self._first is None:
            # A copy: the tensor may be written to in place further down.
            self._first = self._place.read(args, kwargs, output).detach().clone()


@contextlib.contextmanager
def signal(model: DiffusionModel) -> Iterator[ModulatedInput]:
    """The modulated input of the model's forwards, attached inside the context.

    Raises:
        BadInputError: a transformer of no known family.
    """
    modulated = ModulatedInput(model.transformer)
    try:
        yield modulated
    finally:
        modulated.detach()


def relative_l1(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """``mean |now - before| / mean |before|`` of each row, fp32 ``[B]`` on the CPU.

    Row by row, so that it does not depend on how a batch is split.
    """
    now, before = now.flatten(1).float(), before.flatten(1).float()
    return ((now - before).abs().mean(dim=1) / before.abs().mean(dim=1)).cpu()
