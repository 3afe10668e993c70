"""What is trained, in which precision, and the policies beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spotlight_core.config.model import TinyModelConfig
from spotlight_core.diffusion.model import DiffusionModel
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.models.precision import Role
from spotlight_core.diffusion.policy import (
    kept_policy,
    load_policy_weights,
    policy_parameters,
    policy_weights,
    reference_policy,
)
from spotlight_core.errors import BadInputError
from tests.core.diffusion.models.drawing import noise, perturb
from tests.core.diffusion.models.tiny_pipelines import FAMILIES, recipe

LORA = {"rank": 2, "alpha": 4.0}
PROMPTS = ['A "42"', 'A longer prompt with a "7"']
BLOCKS_ATTENTION = {"tiny": 4 * 8, "qwen_image": 2 * 8, "flux": 8 + 3, "sd3": 8 + 4 + 7, "wan": 2 * 8}
UNREAD = {
    "tiny": {"transformer_blocks.3.attn.add_q_proj", "transformer_blocks.3.attn.to_add_out"},
    "qwen_image": {"transformer_blocks.1.attn.add_q_proj", "transformer_blocks.1.attn.to_add_out"},
    "sd3": {"transformer_blocks.1.attn.add_q_proj"},
}

Build = Callable[..., DiffusionModel]


@pytest.fixture(params=("tiny", *FAMILIES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def build(folders: dict[str, Path], kind: str) -> Build:
    def built(
        role: Role = "training", gradient_checkpointing: bool = False, **overrides: Any
    ) -> DiffusionModel:
        config = (
            TinyModelConfig.model_validate(overrides)
            if kind == "tiny"
            else recipe(kind, folders[kind], **overrides)
        )
        return build_model(config, role, gradient_checkpointing)

    return built


def inputs(model: DiffusionModel) -> tuple[torch.Tensor, torch.Tensor, Any]:
    return noise(model), torch.tensor([0.9, 0.3]), model.encode(PROMPTS)


def velocity(model: DiffusionModel) -> torch.Tensor:
    with torch.no_grad():
        return model.velocity(*inputs(model))


def gradients(model: DiffusionModel) -> dict[str, torch.Tensor]:
    (model.velocity(*inputs(model)) ** 2).sum().backward()
    return {
        name: parameter.grad
        for name, parameter in policy_parameters(model.transformer).items()
        if parameter.grad is not None
    }


def test_lora_adapts_the_attention_and_starts_as_the_base_model(build: Build, kind: str) -> None:
    base, model, again = build(), build(lora=LORA), build(lora=LORA)
    weights = policy_weights(model.transformer)
    modules = {name.rsplit(".lora_", 1)[0] for name in weights}
    assert len(modules) == BLOCKS_ATTENTION[kind]
    assert len(weights) == 2 * len(modules)
    for module in modules:
        a, b = weights[f"{module}.lora_A.weight"], weights[f"{module}.lora_B.weight"]
        assert a.shape[0] == b.shape[1] == 2
        bound = 1 / np.sqrt(a.shape[1])
        assert bound / 2 < a.abs().max() <= bound
        assert not b.any()
    for name, value in policy_weights(again.transformer).items():
        assert torch.equal(value, weights[name]), name
    assert len({tensor.numpy().tobytes() for name, tensor in weights.items() if "lora_A" in name}) == len(
        modules
    )
    assert torch.equal(velocity(model), velocity(base))
    perturb(model)
    assert (velocity(model) - velocity(base)).abs().max() > 1e-3


def test_lora_weights_are_fp32_over_a_bf16_base(build: Build) -> None:
    for role, dtype in (("rollout", "rollout_dtype"), ("training", "training_dtype")):
        model = build(role, lora=LORA, **{dtype: "bf16"})
        trained = {parameter.dtype for parameter in policy_parameters(model.transformer).values()}
        assert trained == {torch.float32}
        frozen = [p.dtype for p in model.transformer.parameters() if not p.requires_grad]
        assert torch.bfloat16 in frozen
        kept = kept_policy(model)
        assert {value.dtype for value in kept.weights().values()} == {torch.float32}
        assert velocity(model).dtype == torch.float32
        assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}


def test_rollout_and_training_of_a_bf16_lora_are_the_same_bits(build: Build) -> None:
    dtypes = {"rollout_dtype": "bf16", "training_dtype": "bf16"}
    rollout, training = build("rollout", lora=LORA, **dtypes), build("training", lora=LORA, **dtypes)
    perturb(training)
    load_policy_weights(rollout.transformer, policy_weights(training.transformer))
    with_gradients = training.velocity(*inputs(training)).detach()
    assert torch.equal(velocity(rollout), with_gradients)


def test_the_base_of_a_lora_gets_no_gradient(build: Build, kind: str) -> None:
    model = build(lora=LORA)
    perturb(model)
    reached = gradients(model)
    for name, parameter in model.transformer.named_parameters():
        assert ("lora_" in name) == parameter.requires_grad, name
        assert "lora_" in name or parameter.grad is None, name
    # Behind the last block nobody reads the text: what only feeds it gets none, or exactly zero.
    moved = {name.rsplit(".lora_", 1)[0] for name, gradient in reached.items() if gradient.any()}
    adapted = {name.rsplit(".lora_", 1)[0] for name in policy_parameters(model.transformer)}
    assert adapted - moved == UNREAD.get(kind, set())


def test_policies_beside_a_lora(build: Build) -> None:
    base = velocity(build())
    model = build(lora=LORA)
    perturb(model)
    trained = velocity(model)
    kept, reference = kept_policy(model), reference_policy(model)
    assert kept.weights().keys() == policy_weights(model.transformer).keys()
    assert torch.equal(kept.velocity(*inputs(model)), trained)
    torch.testing.assert_close(reference.velocity(*inputs(model)), base, rtol=0, atol=0)
    before = gradients(model)
    before = {name: gradient.clone() for name, gradient in before.items()}
    perturb(model)
    moved = velocity(model)
    assert (moved - trained).abs().max() > 1e-3
    assert torch.equal(kept.velocity(*inputs(model)), trained)
    assert torch.equal(reference.velocity(*inputs(model)), base)
    assert torch.equal(velocity(model), moved)
    assert not kept.velocity(*inputs(model)).requires_grad
    after = policy_parameters(model.transformer)
    assert all(torch.equal(after[name].grad, before[name]) for name in before)  # type: ignore[arg-type]
    for name, parameter in model.transformer.named_parameters():
        assert parameter.requires_grad == (".default." in name), name
    for value in kept.weights().values():
        value.zero_()
    assert torch.equal(kept.velocity(*inputs(model)), base)
    assert torch.equal(velocity(model), moved)


def test_a_graph_survives_the_calls_of_other_policies(build: Build) -> None:
    """As in a loss: trained velocity first, then the others, then backward; with checkpointing too."""
    expected = build(lora=LORA)
    perturb(expected)
    wanted = gradients(expected)
    model = build(lora=LORA, gradient_checkpointing=True)
    perturb(model)
    kept, reference = kept_policy(model), reference_policy(model)
    loss = (model.velocity(*inputs(model)) ** 2).sum()
    kept.velocity(*inputs(model))
    reference.velocity(*inputs(model))
    loss.backward()
    parameters = policy_parameters(model.transformer)
    for name, gradient in wanted.items():
        torch.testing.assert_close(parameters[name].grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lora", [None, LORA])
def test_gradient_checkpointing_changes_no_gradient(build: Build, lora: dict[str, Any] | None) -> None:
    plain, checkpointed = build(lora=lora), build(lora=lora, gradient_checkpointing=True)
    if lora:
        perturb(plain)
        perturb(checkpointed)
    saved: list[int] = []
    for model in (plain, checkpointed):
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.velocity(*inputs(model))
        saved.append(count)
    assert saved[1] < saved[0]
    wanted, got = gradients(plain), gradients(checkpointed)
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name


def test_full_training_in_bf16_keeps_fp32_weights_and_rounds_as_the_rollout_does(build: Build) -> None:
    training, rollout = build(training_dtype="bf16"), build("rollout", rollout_dtype="bf16")
    exact = velocity(build())
    assert {parameter.dtype for parameter in policy_parameters(training.transformer).values()} == {
        torch.float32
    }
    rounded = velocity(training)
    assert 1e-5 < (rounded - exact).norm() / exact.norm() < 0.1
    # Both round the matrices alike; what is left are the norms' gains and the time embedding.
    assert (velocity(rollout) - rounded).norm() / exact.norm() < 0.05
    assert {gradient.dtype for gradient in gradients(training).values()} == {torch.float32}


def test_policies_beside_full_training(build: Build) -> None:
    model = build()
    base = velocity(model)
    kept, reference = kept_policy(model), reference_policy(model)
    perturb(model)
    assert (velocity(model) - base).abs().max() > 1e-3
    assert torch.equal(kept.velocity(*inputs(model)), base)
    assert torch.equal(reference.velocity(*inputs(model)), base)
    assert policy_weights(model.transformer).keys() == kept.weights().keys()


def test_other_layers_can_be_adapted_and_unknown_ones_are_refused(build: Build, kind: str) -> None:
    target = "net.2" if kind not in ("flux", "wan") else "proj_out"
    model = build(lora={**LORA, "target_modules": [target]})
    assert policy_weights(model.transformer)
    assert all(name.rsplit(".lora_", 1)[0].endswith(target) for name in policy_weights(model.transformer))
    with pytest.raises(
        BadInputError, match=r"target_modules: no linear layer .* ends in 'to_w': give endings"
    ):
        build(lora={**LORA, "target_modules": [target, "to_w"]})


def test_checkpointing_a_rollout_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="no backward pass"):
        build("rollout", gradient_checkpointing=True)


def test_dropout_never_runs(build: Build) -> None:
    model = build(lora=LORA)
    assert not any(module.training for module in model.transformer.modules())
    kept_policy(model)
    assert not any(module.training for module in model.transformer.modules())
    assert not [
        name for name, m in model.transformer.named_modules() if "lora" in name and isinstance(m, nn.Dropout)
    ]
