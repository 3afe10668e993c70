"""Text embeddings: each prompt once, alone, whatever stands beside it in a batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.models.diffusers_model import DiffusersModel
from spotlight_core.diffusion.models.text_cache import PromptEmbedding, TextCache, stack
from tests.core.diffusion.models.tiny_pipelines import recipe

SHORT, LONG = 'A "9"', 'A long and winding road to a sign that says "7"'
ENCODERS = {"qwen_image": 1, "flux": 2, "sd3": 3, "wan": 1}


@pytest.fixture
def model(folders: dict[str, Path], family: str) -> DiffusersModel:
    built = build_model(recipe(family, folders[family]), "rollout")
    assert isinstance(built, DiffusersModel)
    return built


def test_a_prompt_goes_through_the_text_encoders_once(model: DiffusersModel, family: str) -> None:
    batches: list[int] = []

    def count(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        batches.append(ids.shape[0])

    for name, component in model.pipeline.components.items():
        if name.startswith("text_encoder") and component is not None:
            component.register_forward_pre_hook(count, with_kwargs=True)
    prompts = 2 if family == "flux" else 3  # and the negative one
    for _ in range(3):
        model.encode([SHORT, LONG, SHORT])
    assert batches == [1] * (prompts * ENCODERS[family])
    model.encode(["another"])
    assert len(batches) == (prompts + 1) * ENCODERS[family]


def test_an_embedding_does_not_depend_on_its_neighbours(model: DiffusersModel, family: str) -> None:
    alone, beside = model.encode([SHORT]), model.encode([LONG, SHORT, LONG])
    length = alone.tokens_BLD.shape[1]
    assert torch.equal(beside.tokens_BLD[1, :length], alone.tokens_BLD[0])
    assert not beside.tokens_BLD[1, length:].any()
    assert not torch.equal(beside.tokens_BLD[0], beside.tokens_BLD[1])
    if family == "qwen_image":
        assert alone.mask_BL is None
        assert beside.mask_BL is not None
        assert beside.mask_BL.sum(dim=1).tolist() == [
            beside.tokens_BLD.shape[1],
            length,
            beside.tokens_BLD.shape[1],
        ]
        assert length < beside.tokens_BLD.shape[1]
    else:  # padded to a fixed length, and not masked: as these models were trained
        assert beside.mask_BL is None
        assert length == {"flux": 64, "sd3": 77 + 64, "wan": 64}[family]
    if alone.pooled_BD is not None:
        assert beside.pooled_BD is not None
        assert torch.equal(beside.pooled_BD[1:2], alone.pooled_BD)
    assert (alone.pooled_BD is None) == (family in ("qwen_image", "wan"))
    if family == "flux":
        assert beside.negative is None
    else:
        assert beside.negative is not None
        assert beside.negative.tokens_BLD.shape[0] == 3
        assert torch.equal(beside.negative.tokens_BLD[0], model.encode([""]).tokens_BLD[0])


def test_long_prompts_are_cut_at_the_recipes_limit(folders: dict[str, Path], family: str) -> None:
    cut = build_model(recipe(family, folders[family], max_text_tokens=8), "rollout")
    longest = cut.encode([LONG]).tokens_BLD.shape[1]
    assert longest == (77 + 8 if family == "sd3" else 8)


def test_embeddings_made_in_inference_mode_take_part_in_training(model: DiffusersModel) -> None:
    with torch.inference_mode():
        text = model.encode([SHORT])
        v_BSC = model.velocity(torch.zeros(1, *model.latent_shape_SC), torch.ones(1), text)
    assert not text.tokens_BLD.is_inference()
    assert not v_BSC.is_inference()
    assert not v_BSC.requires_grad
    x_BSC = torch.ones(1, *model.latent_shape_SC)
    model.velocity(x_BSC, torch.ones(1), model.encode([SHORT])).sum().backward()
    assert any(parameter.grad is not None for parameter in model.transformer.parameters())


def test_the_cache_forgets_what_was_used_longest_ago() -> None:
    embedded: list[str] = []

    def embed(prompt: str) -> PromptEmbedding:
        embedded.append(prompt)
        return PromptEmbedding(tokens_LD=torch.full((1, 1), float(len(embedded))))

    cache = TextCache(embed, capacity=2)
    for prompt in ("a", "b", "a", "c", "a", "b"):
        cache.get(prompt)
    assert embedded == ["a", "b", "c", "b"]
    assert cache.get("a").tokens_LD.item() == 1.0


def test_a_batch_is_padded_to_its_longest_and_masked() -> None:
    rows = [PromptEmbedding(tokens_LD=torch.ones(length, 2)) for length in (1, 3)]
    text = stack(rows)
    assert text.tokens_BLD[..., 0].tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert text.mask_BL is not None
    assert text.mask_BL.tolist() == [[True, False, False], [True, True, True]]
    assert stack(rows[1:]).mask_BL is None
    assert text.rows(torch.tensor([1, 0, 1])).mask_BL is not None
