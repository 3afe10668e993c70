"""Exported weights: what stock diffusers makes of them, and their bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from spotlight_core.config.model import TinyModelConfig
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.models.diffusers_model import DiffusersModel
from spotlight_core.diffusion.models.export import export_adapter, export_transformer
from spotlight_core.diffusion.policy import policy_weights
from spotlight_core.errors import BadInputError, SpotlightError
from tests.core.diffusion.models.drawing import drawn, noise, perturb
from tests.core.diffusion.models.tiny_pipelines import recipe, stock_pipeline, stock_pixels

PROMPTS = ['A "42"', 'A longer prompt with a "7"']
STEPS = 3
LORA = {"rank": 3, "alpha": 12.0}


@pytest.fixture
def adapted(folders: dict[str, Path], family: str) -> DiffusersModel:
    model = build_model(recipe(family, folders[family], lora=LORA), "training")
    assert isinstance(model, DiffusersModel)
    return model


def test_a_stock_pipeline_draws_the_trained_adapters_images(
    adapted: DiffusersModel, folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    config = recipe(family, folders[family], lora=LORA)
    perturb(adapted, 0)
    export_adapter(config, policy_weights(adapted.transformer), tmp_path)
    stock = stock_pipeline(family, folders[family])
    call = {
        "prompt": PROMPTS,
        "num_inference_steps": STEPS,
        "latents": adapted.native_latents(noise(adapted)),
    }
    before = stock_pixels(stock, config, **call)
    stock.load_lora_weights(tmp_path)
    after = stock_pixels(stock, config, **call)
    assert (after - before).abs().max() > 5e-3
    torch.testing.assert_close(drawn(adapted, PROMPTS, STEPS), after, rtol=0, atol=1e-4)
    loaded = next(iter(stock.transformer.peft_config.values()))
    assert (loaded.r, loaded.lora_alpha) == (3, 12.0)


def test_the_file_holds_the_adapter_alone_and_its_bytes_follow_its_weights(
    adapted: DiffusersModel, folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    config = recipe(family, folders[family], lora=LORA)
    weights = policy_weights(adapted.transformer)
    first = export_adapter(config, weights, tmp_path / "a")
    shuffled = dict(reversed(list(weights.items())))
    second = export_adapter(config, shuffled, tmp_path / "b")
    assert first.name == "pytorch_lora_weights.safetensors"
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    assert first.read_bytes() == second.read_bytes()
    written = load_file(first)
    assert written.keys() == {f"transformer.{name}" for name in weights}
    assert all(torch.equal(written[f"transformer.{name}"], value) for name, value in weights.items())
    perturb(adapted, 1)
    third = export_adapter(config, policy_weights(adapted.transformer), tmp_path / "b")
    assert third == second
    assert third.read_bytes() != first.read_bytes()


def test_a_stock_pipeline_draws_the_fully_trained_transformers_images(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    config = recipe(family, folders[family])
    model = build_model(config, "training")
    assert isinstance(model, DiffusersModel)
    before = drawn(model, PROMPTS, STEPS)
    perturb(model, 0)
    folder = export_transformer(config, policy_weights(model.transformer), tmp_path / "transformer")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "diffusion_pytorch_model.safetensors",
    }
    stock = stock_pipeline(family, folders[family])
    transformer_class = getattr(diffusers, type(model.transformer).__name__)
    stock.transformer = transformer_class.from_pretrained(folder, use_safetensors=True)
    call = {"prompt": PROMPTS, "num_inference_steps": STEPS, "latents": model.native_latents(noise(model))}
    after = stock_pixels(stock, config, **call)
    assert (after - before).abs().max() > 5e-3
    torch.testing.assert_close(drawn(model, PROMPTS, STEPS), after, rtol=0, atol=1e-4)
    again = export_transformer(config, policy_weights(model.transformer), tmp_path / "again")
    for file in folder.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_the_embedded_models_adapter_loads_into_its_transformer(tmp_path: Path) -> None:
    config = TinyModelConfig.model_validate({"lora": LORA})
    weights = policy_weights(build_model(config, "training").transformer)
    weights = {name: value + 0.1 for name, value in weights.items()}
    export_adapter(config, weights, tmp_path)
    base: Any = build_model(TinyModelConfig(), "rollout").transformer
    base.load_lora_adapter(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    loaded = {name: value for name, value in base.state_dict().items() if "lora_" in name}
    assert len(loaded) == len(weights)
    for name, value in loaded.items():
        assert torch.equal(value, weights[name.replace(".default_0.", ".")]), name


def _without(part: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda weights: {**weights, "proj_out.weight": torch.zeros(2, 2)},
            "'proj_out.weight' .* is no part",
        ),
        (lambda weights: {name: torch.zeros(2, 2) for name in weights}, r"\[2, 2\] is no part .* of rank 3"),
        (_without("lora_B"), "has no '.lora_B.weight'"),
    ],
)
def test_what_is_no_adapter_of_the_recipe_is_refused(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], problem: str, tmp_path: Path
) -> None:
    config = TinyModelConfig.model_validate({"lora": LORA})
    weights = {
        "blocks.0.to_q.lora_A.weight": torch.zeros(3, 4),
        "blocks.0.to_q.lora_B.weight": torch.zeros(4, 3),
    }
    export_adapter(config, weights, tmp_path / "whole")
    with pytest.raises(SpotlightError, match=problem):
        export_adapter(config, change(weights), tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_an_adapter_needs_a_lora_section(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"model\.lora is absent"):
        export_adapter(TinyModelConfig(), {}, tmp_path)


def test_a_transformer_is_exported_under_its_own_recipe(folders: dict[str, Path], tmp_path: Path) -> None:
    config = recipe("flux", folders["sd3"])
    with pytest.raises(BadInputError, match="holds a StableDiffusion3Pipeline"):
        export_transformer(config, {"w": torch.zeros(1)}, tmp_path / "t")
    with pytest.raises(SpotlightError, match="these weights do not fit the policy"):
        export_transformer(recipe("sd3", folders["sd3"]), {"w": torch.zeros(1)}, tmp_path / "t")
    assert not (tmp_path / "t").exists()
