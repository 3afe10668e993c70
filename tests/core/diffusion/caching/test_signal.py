"""Each family's modulated input, read by a hook that leaves no trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from spotlight_core.config import OdeConfig
from spotlight_core.diffusion.caching.calibrate import calibrate
from spotlight_core.diffusion.caching.signal import ModulatedInput, relative_l1, signal
from spotlight_core.diffusion.model import DiffusionModel, TextEmbeddings
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.tiny.model import TinyQwenImage
from spotlight_core.errors import BadInputError
from spotlight_core.types import Fidelity
from tests.core.diffusion.models.tiny_pipelines import FAMILIES, recipe

PROMPTS = ['A "407"', 'A door that says "9"']
STEPS = 6


@pytest.fixture(scope="module", params=["tiny", *FAMILIES])
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> DiffusionModel:
    if request.param == "tiny":
        return TinyQwenImage.from_pretrained()
    return build_model(recipe(request.param, folders[request.param]), "rollout")


def _inputs(model: DiffusionModel) -> tuple[torch.Tensor, torch.Tensor, TextEmbeddings]:
    x_BSC = torch.randn((2, *model.latent_shape_SC), generator=torch.Generator().manual_seed(5))
    return x_BSC, torch.tensor([0.9, 0.4]), model.encode(PROMPTS)


def _velocity(model: DiffusionModel) -> torch.Tensor:
    with torch.no_grad():
        return model.velocity(*_inputs(model))


def _hooks(transformer: nn.Module) -> list[Any]:
    return [
        hook
        for module in transformer.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]


def _expected(model: DiffusionModel) -> torch.Tensor:
    """From the arguments of the first block (Wan: from the timesteps), by diffusers' own layers."""
    caught: dict[str, torch.Tensor] = {}

    def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not caught:
            caught.update(kwargs)

    transformer: Any = model.transformer
    if type(transformer).__name__ == "WanTransformer3DModel":
        embedder = transformer.condition_embedder
        return embedder.time_embedder(embedder.timesteps_proj(torch.tensor([900.0, 400.0])))
    block = transformer.transformer_blocks[0]
    handle = block.register_forward_pre_hook(catch, with_kwargs=True)
    _velocity(model)
    handle.remove()
    hidden, temb = caught["hidden_states"], caught["temb"]
    modulation = (
        block.img_mod(temb) if hasattr(block, "img_mod") else block.norm1.linear(temb * temb.sigmoid())
    )
    width = hidden.shape[-1]
    shift, scale = modulation[:, None, :width], modulation[:, None, width : 2 * width]
    return nn.functional.layer_norm(hidden, (width,), eps=1e-6) * (1 + scale) + shift


def test_what_is_read_is_the_modulated_input_of_the_prompt(model: DiffusionModel) -> None:
    expected = _expected(model)
    with signal(model) as modulated:
        _velocity(model)
        taken = modulated.take()
        with pytest.raises(ValueError, match="no forward has gone through"):
            modulated.take()
    torch.testing.assert_close(taken, expected.detach(), rtol=1e-4, atol=1e-5)
    assert len(taken) == 2


def test_the_forward_is_bit_equal_while_attached_and_after(model: DiffusionModel) -> None:
    hooks, before = _hooks(model.transformer), _velocity(model)
    with signal(model) as modulated:
        assert len(_hooks(model.transformer)) == len(hooks) + 1
        assert torch.equal(_velocity(model), before)
    assert _hooks(model.transformer) == hooks
    assert torch.equal(_velocity(model), before)
    with pytest.raises(ValueError, match="no forward"):
        modulated.take()


def test_an_error_leaves_no_hook(model: DiffusionModel) -> None:
    hooks = _hooks(model.transformer)
    with pytest.raises(IndexError):
        _fail_inside(model)
    assert _hooks(model.transformer) == hooks


def _fail_inside(model: DiffusionModel) -> None:
    with signal(model):
        raise IndexError


def test_a_signal_has_one_value_for_each_step_from_the_second(model: DiffusionModel) -> None:
    fidelity = Fidelity(denoise_steps=STEPS)
    table = calibrate(model, PROMPTS, OdeConfig(denoise_steps=STEPS), fidelity)
    assert len(table.signal) == len(table.velocity_change) == STEPS - 1
    assert all(0 < value < float("inf") for value in (*table.signal, *table.velocity_change))
    assert table.effective_steps[-1] == STEPS
    table.check(type(model.transformer).__name__, [float(sigma) for sigma in model.sigmas(STEPS, None)])


def test_a_transformer_of_no_family_is_refused() -> None:
    with pytest.raises(
        BadInputError, match=r"Linear has no known modulated input: .* FluxTransformer2DModel"
    ):
        ModulatedInput(nn.Linear(1, 1))


def test_a_rows_change_is_relative_to_its_own_mean() -> None:
    before = torch.tensor([[[1.0, -1.0]], [[4.0, 4.0]]])
    now = torch.tensor([[[1.5, -1.0]], [[4.0, 0.0]]])
    assert relative_l1(now, before).tolist() == [0.25, 0.5]
    assert torch.equal(relative_l1(now[1:], before[1:]), relative_l1(now, before)[1:])
