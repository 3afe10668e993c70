"""A forward and a backward pass over 2, 3 and 4 ranks are those of one, for every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spotlight_core.errors import BadInputError
from spotlight_core.parallel.exchange import reduce_gradients
from spotlight_core.parallel.plans import SequencePlan, modules_like, sequence_plan
from spotlight_core.parallel.sequence import SequenceParallel
from tests.core.parallel.families import MODELS, copies, inputs, model_of
from tests.core.parallel.threads import ThreadCommunicator, in_group

TOLERANCE = 1e-5
DEGREES = (2, 3, 4)


def trained(model: Any) -> list[nn.Parameter]:
    return [parameter for parameter in model.transformer.parameters() if parameter.requires_grad]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, against the largest value where that is above 1."""
    return float((found - expected).abs().max() / max(1.0, float(expected.abs().max())))


def velocity_and_gradients(model: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    x, sigma, text = inputs(model)
    draws = torch.Generator().manual_seed(6)
    v = model.velocity(x, sigma, text)
    (v * torch.randn(v.shape, generator=draws)).sum().backward()
    return v.detach(), [p.grad for p in trained(model)]


def check(model: Any, degree: int) -> None:
    plain, gradients = velocity_and_gradients(copies(model, 1)[0])
    models = copies(model, degree)

    def work(communicator: ThreadCommunicator) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        own = models[communicator.rank]
        sequence = SequenceParallel(own.transformer)
        sequence.use(communicator)
        v, _ = velocity_and_gradients(own)
        reduce_gradients(trained(own), communicator)
        return v, [p.grad for p in trained(own)]

    for v, summed in in_group(degree, work):
        assert relative(v, plain) < TOLERANCE
        assert len(summed) == len(gradients) > 0
        for found, expected in zip(summed, gradients, strict=True):
            assert (found is None) == (expected is None)
            assert found is None or expected is None or relative(found, expected) < TOLERANCE


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_of_a_group_are_those_of_one_rank(
    name: str, degree: int, folders: dict[str, Path]
) -> None:
    check(model_of(name, folders), degree)


@pytest.mark.parametrize("degree", [6, 9])
def test_ranks_without_a_token_of_the_text_or_of_anything(degree: int, folders: dict[str, Path]) -> None:
    check(model_of("tiny", folders), degree)


@pytest.mark.parametrize("name", ["qwen_image", "wan"])
def test_also_with_adapters_and_activations_computed_again(name: str, folders: dict[str, Path]) -> None:
    check(model_of(name, folders, lora=True, checkpointing=True), 3)


@pytest.mark.parametrize("name", MODELS)
def test_without_gradients_too_and_after_another_prompt(name: str, folders: dict[str, Path]) -> None:
    model = model_of(name, folders)
    x, sigma, text = inputs(model)
    other = model.encode(['A very long way to the number "1"', 'A "2"'])
    with torch.inference_mode():
        plain = [model.velocity(x, sigma, text), model.velocity(x, sigma, other)]
    models = copies(model, 2)

    @torch.inference_mode()
    def work(communicator: ThreadCommunicator) -> list[torch.Tensor]:
        own = models[communicator.rank]
        sequence = SequenceParallel(own.transformer)
        shared = []
        for group in (communicator, None, communicator):
            sequence.use(group)
            shared.append(own.velocity(x, sigma, text))
        shared.append(own.velocity(x, sigma, other))
        sequence.detach()
        shared.append(own.velocity(x, sigma, text))
        return shared

    for first, alone, again, with_other, detached in in_group(2, work):
        assert relative(first, plain[0]) < TOLERANCE
        assert torch.equal(alone, plain[0]), "without a group it is the plain forward"
        assert torch.equal(again, first)
        assert relative(with_other, plain[1]) < TOLERANCE
        assert torch.equal(detached, plain[0])


def test_gradients_of_some_ranks_are_summed_and_those_of_none_stay_none() -> None:
    def work(communicator: ThreadCommunicator) -> list[torch.Tensor | None]:
        everywhere, second_only, unused, frozen = (nn.Parameter(torch.ones(2)) for _ in range(4))
        frozen.requires_grad_(False)
        half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        half.grad = torch.full_like(half, 2.0)
        everywhere.grad = torch.full((2,), 1.0 + communicator.rank)
        if communicator.rank == 1:
            second_only.grad = torch.full((2,), 5.0)
        parameters = [everywhere, half, second_only, unused, frozen]
        reduce_gradients(parameters, communicator)
        return [parameter.grad for parameter in parameters]

    for everywhere, half, second_only, unused, frozen in in_group(2, work):
        assert everywhere is not None
        assert torch.equal(everywhere, torch.full((2,), 3.0))
        assert half is not None
        assert torch.equal(half, torch.full((3,), 4.0, dtype=torch.bfloat16))
        assert second_only is not None
        assert torch.equal(second_only, torch.full((2,), 5.0))
        assert unused is None
        assert frozen is None


def test_a_group_of_one_exchanges_nothing(folders: dict[str, Path]) -> None:
    model = model_of("tiny", folders)
    x, sigma, text = inputs(model)
    plain = model.velocity(x, sigma, text)

    def work(communicator: ThreadCommunicator) -> int:
        sequence = SequenceParallel(model.transformer)
        sequence.use(communicator)
        assert torch.equal(model.velocity(x, sigma, text), plain)
        return communicator.calls

    assert in_group(1, work) == [0]


def test_an_attention_exchanges_twice_and_the_output_once(folders: dict[str, Path]) -> None:
    model = model_of("tiny", folders)
    models = copies(model, 2)
    x, sigma, text = inputs(model)

    @torch.inference_mode()
    def work(communicator: ThreadCommunicator) -> int:
        SequenceParallel(models[communicator.rank].transformer).use(communicator)
        models[communicator.rank].velocity(x, sigma, text)
        return communicator.calls

    assert in_group(2, work) == [2 * 4 + 1] * 2


def test_a_plan_names_modules_that_are_there(folders: dict[str, Path]) -> None:
    for name in MODELS:
        transformer = model_of(name, folders).transformer
        plan = sequence_plan(transformer)
        assert plan.gathers
        for module in (*plan.inputs, *plan.outputs, *plan.gathers):
            assert modules_like(transformer, module), f"{name}: {module}"
        assert sum(len(modules_like(transformer, pattern)) for pattern in plan.attention) >= 2


def test_a_transformer_without_a_plan_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"Linear has no plan .*: set elastic\.sp_degree = 1"):
        SequenceParallel(nn.Linear(1, 1))


def test_an_error_in_a_block_leaves_no_attention_behind(folders: dict[str, Path]) -> None:
    model = model_of("tiny", folders)
    models = copies(model, 2)
    x, sigma, text = inputs(model)

    def work(communicator: ThreadCommunicator) -> bool:
        own = models[communicator.rank]
        sequence = SequenceParallel(own.transformer)
        sequence.use(communicator)
        block = own.transformer.transformer_blocks[1].attn
        block.to_out[0].weight = nn.Parameter(torch.zeros(1, 1))
        with pytest.raises(RuntimeError, match="shape"):
            own.velocity(x, sigma, text)
        before, query = communicator.calls, torch.zeros(1, 1, 2, 2)
        nn.functional.scaled_dot_product_attention(query, query, query)
        return communicator.calls == before

    assert in_group(2, work) == [True, True]


class OtherMeans:
    """An attention processor with a kernel of its own, here a mean."""

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states.mean(1, keepdim=True) + hidden_states, encoder_hidden_states


def test_attention_that_the_group_would_not_see_is_refused(folders: dict[str, Path]) -> None:
    model = model_of("tiny", folders)
    models = copies(model, 2)
    x, sigma, text = inputs(model)

    def work(communicator: ThreadCommunicator) -> None:
        own = models[communicator.rank]
        own.transformer.transformer_blocks[0].attn.processor = OtherMeans()
        sequence = SequenceParallel(own.transformer)
        own.velocity(x, sigma, text)  # nothing is shared: any processor will do
        sequence.use(communicator)
        with pytest.raises(BadInputError, match="unset DIFFUSERS_ATTN_BACKEND"):
            own.velocity(x, sigma, text)

    in_group(2, work)


class Attention(nn.Module):
    """One attention over image tokens, with whatever options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, **self.options)


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"is_causal": True}, "only plain self-attention is shared"),
        ({"dropout_p": 0.5}, "only plain self-attention is shared"),
        ({"enable_gqa": True}, "only plain self-attention is shared"),
        ({"attn_mask": torch.zeros(2, 3, 4, 4)}, r"a mask of shape \(2, 3, 4, 4\): only one of keys"),
    ],
)
def test_attention_that_cannot_be_shared_is_refused(options: dict[str, Any], refused: str) -> None:
    plan = SequencePlan(attention={"0": ("image",)})

    def work(communicator: ThreadCommunicator) -> None:
        layers = nn.Sequential(Attention(**options))
        SequenceParallel(layers, plan).use(communicator)
        with pytest.raises(ValueError, match=refused):
            layers(torch.ones(2, 3, 4, 8))

    in_group(2, work)
