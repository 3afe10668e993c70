"""What of a transformer is trained: all weights, or LoRA adapters that start the same in every process."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spotlight_core.config.model import LoraConfig, ModelSection
from spotlight_core.diffusion.models.precision import Role
from spotlight_core.diffusion.policy import TRAINED, policy_parameters
from spotlight_core.errors import BadInputError
from spotlight_core.philox import named_generator


def prepare_policy(
    transformer: Any,
    config: ModelSection,
    role: Role,
    default_targets: Sequence[str],
    gradient_checkpointing: bool = False,
) -> None:
    """Freeze all but the policy, add its LoRA where the recipe has one, and go to eval mode.

    ``transformer`` is a diffusers transformer.

    Raises:
        BadInputError: a target module that the transformer does not have.
        ValueError: gradient checkpointing of a rollout.
    """
    if gradient_checkpointing and role != "training":
        raise ValueError("a rollout has no backward pass: gradient checkpointing is for training")
    transformer.requires_grad_(config.lora is None)
    if config.lora is not None:
        _add_lora(transformer, config.lora, config.lora.target_modules or tuple(default_targets))
    transformer.eval()  # no dropout anywhere: rollout and replay must agree
    if gradient_checkpointing:
        transformer.enable_gradient_checkpointing()  # diffusers' default is use_reentrant=False


def _add_lora(transformer: Any, config: LoraConfig, targets: Sequence[str]) -> None:
    import peft

    check_targets(transformer, targets)
    transformer.add_adapter(
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type]  # declared int, divided by r as it is
            target_modules=list(targets),
            lora_dropout=0.0,
        ),
        adapter_name=TRAINED,
    )
    _initialise(transformer)


def check_targets(transformer: nn.Module, targets: Sequence[str]) -> None:
    """BadInputError where a target names no linear layer: PEFT would leave it out in silence."""
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            endings = sorted({".".join(name.split(".")[-2:]) for name in linear})
            raise BadInputError(
                f"model.lora.target_modules: no linear layer of the transformer ends in {target!r}",
                f"give endings such as {', '.join(endings[:8])}",
            )


@torch.no_grad()
def _initialise(transformer: nn.Module) -> None:
    """A uniform in ±1/sqrt(columns) as in PEFT, B zero; fp32, and the same in every process.

    PEFT itself draws from torch's global generator and takes the base layer's dtype.
    """
    for name, parameter in policy_parameters(transformer).items():
        parameter.data = parameter.data.float()
        if ".lora_B." in name:
            parameter.zero_()
            continue
        bound = 1.0 / math.sqrt(parameter.shape[1])
        drawn = named_generator("lora", name).uniform(-bound, bound, tuple(parameter.shape))
        parameter.copy_(torch.from_numpy(drawn))
