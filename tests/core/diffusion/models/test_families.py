"""Each family against its stock pipeline, at a random tiny size.

Shape legend: B batch, S latent tokens, C channels per token.
"""

from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from spotlight_core.config.sampling import OdeConfig
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.models.diffusers_model import DiffusersModel
from spotlight_core.diffusion.noise import INITIAL_NOISE, batch_noise
from spotlight_core.errors import BadInputError
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from tests.core.diffusion.models.drawing import noise
from tests.core.diffusion.models.tiny_pipelines import FamilyConfig, recipe, stock_pipeline, stock_pixels

PROMPTS = ['A door with the number "42"', 'A long and winding road to a sign that says "7"', 'A "9"']
STEPS = 4
SHAPES = {"qwen_image": (6, 16), "flux": (6, 16), "sd3": (24, 4), "wan": (48, 4)}
NEGATIVE = {"flux": ""}

Build = Callable[..., DiffusersModel]


@cache
def _built(config: FamilyConfig) -> DiffusersModel:
    """Nothing here changes a model's weights, so tests share them."""
    model = build_model(config, "rollout")
    assert isinstance(model, DiffusersModel)
    return model


@pytest.fixture
def build(folders: dict[str, Path], family: str) -> Build:
    """The family's model; keywords override its recipe."""
    return lambda **overrides: _built(recipe(family, folders[family], **overrides))


def test_an_ode_rollout_is_the_stock_pipelines_own_image(
    build: Build, folders: dict[str, Path], family: str
) -> None:
    config = recipe(family, folders[family], negative_prompt=NEGATIVE.get(family, "blurred"))
    model = build(negative_prompt=config.negative_prompt)
    prompts = tuple(Prompt(occurrence=f"p{row}", text=text) for row, text in enumerate(PROMPTS))
    request = GenerationRequest(
        id="r",
        kind="evaluate",
        prompts=prompts,
        seeds=(0, 1, 2),
        policy=PolicyVersion(label="old", number=0, digest=""),
        fidelity=Fidelity(denoise_steps=STEPS),
    )
    generated = DenoiseEngine(model, OdeConfig(denoise_steps=STEPS), rng_seed=5).generate(request)
    assert isinstance(generated, Generated)
    start = batch_noise(5, ["p0", "p1", "p2"], (0, 1, 2), INITIAL_NOISE, model.latent_shape_SC)
    stock = stock_pixels(
        stock_pipeline(family, folders[family]),
        config,
        prompt=PROMPTS,
        latents=model.native_latents(start),
        num_inference_steps=STEPS,
    )
    ours = model.pixels(torch.from_numpy(generated.arrays["x0"]))
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4)
    assert (ours - model.pixels(start)).abs().max() > 0.03  # and it is not the noise that was compared
    expected = (stock * 255).round().to(torch.uint8).movedim(1, -1).numpy()
    images = generated.arrays["images"]
    assert images.dtype == np.uint8
    assert images.shape == ((3, 5, 32, 48, 3) if family == "wan" else (3, 32, 48, 3))
    assert np.abs(images.astype(int) - expected.astype(int)).max() <= 1  # a half may round either way


def test_latents_are_tokens_and_go_back_to_the_familys_layout(build: Build, family: str) -> None:
    model = build()
    assert model.latent_shape_SC == SHAPES[family]
    x_BSC = torch.arange(2 * prod(SHAPES[family]), dtype=torch.float32).reshape(2, *SHAPES[family])
    native = model.native_latents(x_BSC)
    if family == "sd3":
        assert native.shape == (2, 4, 4, 6)
        assert native[1, 2, 3, 4] == x_BSC[1, 3 * 6 + 4, 2]
    elif family == "wan":
        assert native.shape == (2, 4, 2, 4, 6)
        assert native[1, 2, 1, 3, 4] == x_BSC[1, (1 * 4 + 3) * 6 + 4, 2]
    else:
        assert torch.equal(native, x_BSC)
        pipeline = model.pipeline
        unpacked = pipeline._unpack_latents(x_BSC, 32, 48, pipeline.vae_scale_factor).reshape(2, 4, 4, 6)
        assert torch.equal(pipeline._pack_latents(unpacked, 2, 4, 4, 6), x_BSC)


def test_rows_do_not_depend_on_their_batch(build: Build) -> None:
    model = build()
    x_BSC, sigma_B = noise(model, 4), torch.tensor([1.0, 0.7, 0.4, 0.1])
    prompts = [*PROMPTS, PROMPTS[0]]
    with torch.no_grad():
        whole = model.velocity(x_BSC, sigma_B, model.encode(prompts))
        three = model.velocity(x_BSC[:3], sigma_B[:3], model.encode(prompts[:3]))
        alone = [
            model.velocity(x_BSC[row : row + 1], sigma_B[row : row + 1], model.encode([prompts[row]]))
            for row in range(4)
        ]
    assert whole.dtype == torch.float32
    assert whole.shape == x_BSC.shape
    torch.testing.assert_close(whole[:3], three, rtol=0, atol=1e-5)
    torch.testing.assert_close(whole, torch.cat(alone), rtol=0, atol=1e-5)
    pixels = model.pixels(x_BSC)
    assert torch.equal(pixels[2:3], model.pixels(x_BSC[2:3]))


def test_guidance_is_computed_from_calls_of_the_transformer(build: Build, family: str) -> None:
    guidance = 3.0
    model = build(guidance=guidance)
    x_BSC, sigma_B = noise(model, 2), torch.tensor([0.9, 0.3])
    text = model.encode(PROMPTS[:2])
    with torch.no_grad():
        v = model.velocity(x_BSC, sigma_B, text)
        positive = stock_velocity(model, family, x_BSC, sigma_B, PROMPTS[:2], guidance)
        if family == "flux":
            torch.testing.assert_close(v, positive, rtol=0, atol=1e-5)
            other = build(guidance=1.0).velocity(x_BSC, sigma_B, text)
            assert (other - v).abs().max() > 1e-3
            return
        negative = stock_velocity(model, family, x_BSC, sigma_B, ["", ""], guidance)
        expected = negative + guidance * (positive - negative)
        if family == "qwen_image":
            expected *= positive.norm(dim=-1, keepdim=True) / expected.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(v, expected, rtol=0, atol=2e-5)
        unguided = build(guidance=1.0)
        assert unguided.encode(PROMPTS).negative is None
        plain = unguided.velocity(x_BSC, sigma_B, unguided.encode(PROMPTS[:2]))
        torch.testing.assert_close(plain, positive, rtol=0, atol=1e-5)
        assert (plain - v).abs().max() > 1e-3


def stock_velocity(
    model: DiffusersModel,
    family: str,
    x_BSC: torch.Tensor,
    sigma_B: torch.Tensor,
    prompts: list[str],
    guidance: float,
) -> torch.Tensor:
    """The transformer called row by row with what the stock pipeline's own ``encode_prompt`` gives."""
    pipeline, rows = model.pipeline, []
    for x_SC, sigma, prompt in zip(x_BSC, sigma_B, prompts, strict=True):
        latents = model.native_latents(x_SC[None])
        call: dict[str, Any] = {"hidden_states": latents, "return_dict": False}
        if family == "qwen_image":
            tokens, mask = pipeline.encode_prompt(prompt, max_sequence_length=64)
            call |= {"timestep": sigma[None], "encoder_hidden_states": tokens}
            call |= {"encoder_hidden_states_mask": mask, "img_shapes": [[(1, 2, 3)]]}
        elif family == "flux":
            tokens, pooled, text_ids = pipeline.encode_prompt(prompt, max_sequence_length=64)
            image_ids = torch.tensor([[0.0, row, column] for row in range(2) for column in range(3)])
            call |= {"timestep": sigma[None], "encoder_hidden_states": tokens, "pooled_projections": pooled}
            call |= {"guidance": torch.tensor([guidance]), "txt_ids": text_ids, "img_ids": image_ids}
        elif family == "sd3":
            tokens, _, pooled, _ = pipeline.encode_prompt(prompt, None, None, max_sequence_length=64)
            call |= {"timestep": sigma[None] * 1000, "encoder_hidden_states": tokens}
            call |= {"pooled_projections": pooled}
        else:
            tokens, _ = pipeline.encode_prompt(prompt, max_sequence_length=64)
            call |= {"timestep": sigma[None] * 1000, "encoder_hidden_states": tokens}
        rows.append(model.transformer(**call)[0])
    v = torch.cat(rows)
    return v if v.ndim == 3 else v.flatten(2).transpose(1, 2)


def test_sigmas_are_the_stock_schedules_or_shifted_ones(
    build: Build, folders: dict[str, Path], family: str
) -> None:
    model = build()
    stock = stock_pipeline(family, folders[family])
    config = recipe(family, folders[family])
    stock_pixels(
        stock, config, prompt=["x"], latents=model.native_latents(noise(model, 1)), num_inference_steps=7
    )
    sigmas = model.sigmas(7, None)
    assert sigmas.dtype == np.float32
    np.testing.assert_array_equal(sigmas, stock.scheduler.sigmas.numpy())
    assert (sigmas[0], sigmas[-1], len(sigmas)) == (1.0, 0.0, 8)
    assert (np.diff(sigmas) < 0).all()
    if family == "qwen_image":
        assert sigmas[-2] == pytest.approx(0.02, abs=1e-6)  # shift_terminal
    np.testing.assert_allclose(model.sigmas(2, 3.0), [1.0, 0.75, 0.0], rtol=1e-7)


def test_a_dynamic_shift_follows_the_resolution(folders: dict[str, Path]) -> None:
    sizes = ((32, 48), (64, 96))
    schedules = []
    for height, width in sizes:
        model = build_model(recipe("flux", folders["flux"], height=height, width=width), "rollout")
        schedules.append(model.sigmas(4, None))
    # exp(mu) is the shift, mu linear in the tokens: 0.5 at 256, 1.15 at 4096 (arXiv 2403.03206, 5.3.2).
    for sigmas, tokens in zip(schedules, (6, 24), strict=True):
        shift = np.exp(0.5 + (1.15 - 0.5) * (tokens - 256) / (4096 - 256))
        linear = np.array([1.0, 0.75, 0.5, 0.25, 0.0])
        np.testing.assert_allclose(sigmas, shift * linear / (1 + (shift - 1) * linear), rtol=1e-6)
    assert (schedules[0][1:-1] < schedules[1][1:-1]).all()


def test_a_schedule_starts_at_the_noise_where_unipc_stays_off_it(folders: dict[str, Path]) -> None:
    model = build_model(recipe("wan", folders["wan"]), "rollout")
    assert isinstance(model, DiffusersModel)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    model.pipeline.scheduler = UniPCMultistepScheduler(**flow)
    sigmas = model.sigmas(4, None)
    stock = model.pipeline.scheduler.sigmas.numpy()
    assert stock[0] == np.float32(1 - 1e-6)
    assert sigmas[0] == 1.0
    np.testing.assert_array_equal(sigmas[1:], stock[1:])
    model.pipeline.scheduler = UniPCMultistepScheduler()
    with pytest.raises(
        BadInputError, match=r"UniPCMultistepScheduler .* not from 1 to 0 in 4: set sampler\.shift"
    ):
        model.sigmas(4, None)
    model.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    with pytest.raises(BadInputError, match=r"goes from 0 to 1 in 4 steps"):
        model.sigmas(4, None)


def test_bf16_weights_give_an_fp32_velocity_near_the_fp32_one(build: Build) -> None:
    model, rounded = build(), build(rollout_dtype="bf16")
    x_BSC, sigma_B = noise(model, 2), torch.tensor([0.9, 0.3])
    weights = {parameter.dtype for parameter in rounded.transformer.parameters()}
    assert torch.bfloat16 in weights
    assert {parameter.dtype for parameter in rounded.pipeline.vae.parameters()} == {torch.float32}
    with torch.no_grad():
        exact = model.velocity(x_BSC, sigma_B, model.encode(PROMPTS[:2]))
        near = rounded.velocity(x_BSC, sigma_B, rounded.encode(PROMPTS[:2]))
    assert near.dtype == torch.float32
    assert 0 < (exact - near).norm() / exact.norm() < 0.1
    assert rounded.decode(x_BSC).dtype == np.uint8


def test_nothing_but_the_transformer_is_trained(build: Build) -> None:
    model = build()
    for name, component in model.pipeline.components.items():
        if isinstance(component, torch.nn.Module):
            assert not component.training, name
            wanted = component is model.transformer
            assert {parameter.requires_grad for parameter in component.parameters()} == {wanted}, name
