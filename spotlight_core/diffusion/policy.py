"""The policies inside a model: the trained one, one kept beside it, and the base model.

Under LoRA all three share the base weights: the kept policy is a second adapter, the reference has
its adapters switched off.  When all weights are trained, the others are frozen copies.

Shape legend: B batch, S latent tokens, C channels per token.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from spotlight_core.diffusion.model import DiffusionModel, TextEmbeddings
from spotlight_core.errors import SpotlightError

Weights = dict[str, torch.Tensor]

TRAINED, KEPT = "default", "old"  # names of PEFT adapters


def policy_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by published name; an adapter's own name is no part of it."""
    return {
        _published(name): parameter
        for name, parameter in transformer.named_parameters()
        if parameter.requires_grad
    }


def policy_weights(transformer: nn.Module) -> Weights:
    """The trained weights by published name, not copied."""
    return {name: parameter.detach() for name, parameter in policy_parameters(transformer).items()}


@torch.no_grad()
def load_policy_weights(transformer: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Replace the trained weights in place.

    Raises:
        SpotlightError: other names or shapes than the policy's.
    """
    _copy_into(policy_parameters(transformer), weights)


class OtherPolicy(Protocol):
    """A policy beside the trained one; without gradients."""

    copied: nn.Module | None
    """Its own transformer, None where it shares the trained one's: sharded as that one is."""

    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor: ...


class KeptPolicy(OtherPolicy, Protocol):
    """One that has weights of its own, named as the trained ones are."""

    def weights(self) -> Weights: ...


def kept_policy(model: DiffusionModel) -> KeptPolicy:
    """A copy of the trained policy that stays behind: DiffusionNFT's old policy."""
    return _KeptAdapter(model) if has_adapter(model.transformer) else _FrozenCopy(model)


def reference_policy(model: DiffusionModel) -> OtherPolicy:
    """The base model."""
    return _BaseWeights(model) if has_adapter(model.transformer) else _FrozenCopy(model)


def has_adapter(transformer: nn.Module) -> bool:
    """Whether a PEFT adapter is trained, and not all weights."""
    return bool(getattr(transformer, "peft_config", None))


class _FrozenCopy:
    def __init__(self, model: DiffusionModel) -> None:
        self._model = copy.copy(model)
        self._model.transformer = copy.deepcopy(model.transformer).requires_grad_(False)
        self.copied: nn.Module | None = self._model.transformer

    @torch.no_grad()
    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        return self._model.velocity(x_BSC, sigma_B, text)

    def weights(self) -> Weights:
        return {name: parameter.data for name, parameter in self._model.transformer.named_parameters()}


class _KeptAdapter:
    copied: nn.Module | None = None

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        transformer: Any = model.transformer
        trained = policy_weights(transformer)
        training = transformer.training
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two are meant
            transformer.add_adapter(copy.deepcopy(transformer.peft_config[TRAINED]), adapter_name=KEPT)
        transformer.train(training)
        for name, parameter in self._parameters().items():
            # A new adapter has the base layer's dtype, and this one must hold the trained weights' bits.
            parameter.data = trained[name].clone()
        transformer.set_adapter(TRAINED)

    @torch.no_grad()
    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        with _active(self._model.transformer, KEPT):
            return self._model.velocity(x_BSC, sigma_B, text)

    def weights(self) -> Weights:
        return {name: parameter.data for name, parameter in self._parameters().items()}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {
            _published(name): parameter
            for name, parameter in self._model.transformer.named_parameters()
            if f".{KEPT}." in name
        }


class _BaseWeights:
    copied: nn.Module | None = None

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model

    @torch.no_grad()
    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        transformer: Any = self._model.transformer
        transformer.disable_adapters()
        try:
            return self._model.velocity(x_BSC, sigma_B, text)
        finally:
            transformer.enable_adapters()


@contextlib.contextmanager
def _active(transformer: Any, adapter: str) -> Iterator[None]:
    """PEFT gives gradients to the active adapter only, so the trained one must be active again at once."""
    transformer.set_adapter(adapter)
    try:
        yield
    finally:
        transformer.set_adapter(TRAINED)


def _published(name: str) -> str:
    for adapter in (TRAINED, KEPT):
        name = name.replace(f".lora_A.{adapter}.", ".lora_A.").replace(f".lora_B.{adapter}.", ".lora_B.")
    return name


def _copy_into(parameters: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    if parameters.keys() != weights.keys():
        differing = sorted(parameters.keys() ^ weights.keys())[0]
        raise SpotlightError(
            f"these weights do not fit the policy (tensor {differing!r} on one side only)",
            "use weights that were published under the same model and lora sections",
        )
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise SpotlightError(
                f"weights {name!r} are {list(weights[name].shape)}, the policy's are {list(parameter.shape)}",
                "use weights that were published under the same model and lora sections",
            )
        parameter.copy_(weights[name])
