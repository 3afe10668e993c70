"""In which precision a transformer keeps its weights and computes.

| trained | role | frozen weights | trained weights | forward in bf16 |
|---|---|---|---|---|
| LoRA | both | the role's dtype | fp32 | as the weights are; PEFT casts around its adapters |
| all | training | none | fp32 | autocast |
| all | rollout | none | the role's dtype | autocast, as in training |

So under LoRA rollout and training run the same arithmetic, and when all weights are trained only the
few weights that autocast leaves in fp32 (norms) differ by their rounding to bf16.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from spotlight_core.config.model import ModelSection

Role = Literal["rollout", "training"]
"""What a model is for; each has its own precision in the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """``weights``: what the transformer is loaded in; ``inputs``: what latents and embeddings are cast
    to before it; ``autocast``: the dtype of autocast around it, None for none; ``compute``: the recipe's."""

    compute: torch.dtype
    weights: torch.dtype
    inputs: torch.dtype
    autocast: torch.dtype | None

    def around(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.autocast)


def precision(config: ModelSection, role: Role) -> Precision:
    """What the recipe's model section asks for in this role; see the module's table."""
    name = config.rollout_dtype if role == "rollout" else config.training_dtype
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    autocast = compute if config.lora is None and compute is not torch.float32 else None
    return Precision(
        compute=compute,
        weights=torch.float32 if config.lora is None and role == "training" else compute,
        inputs=torch.float32 if autocast else compute,  # autocast decides for itself what to round
        autocast=autocast,
    )


@contextlib.contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Leave inference mode, keeping whether gradients are on.

    Rotary tables and embeddings are kept from one call to the next, and a tensor that was made in
    inference mode cannot take part in a later backward pass.
    """
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield
