"""Samplers against values worked out by hand from the formulas, in plain Python floats."""

import math

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from spotlight_core.config import CpsConfig, DanceSdeConfig, FlowSdeConfig, OdeConfig, SdeConfig
from spotlight_core.diffusion.noise_schedule import NoiseSchedule
from spotlight_core.diffusion.samplers import build_sampler, build_sde
from spotlight_core.diffusion.samplers.flow_sde import FlowSdeRule
from spotlight_core.diffusion.samplers.ode import OdeSampler
from spotlight_core.diffusion.samplers.sde import SdeSampler

SDE = FlowSdeConfig(type="flow_sde", noise_level=0.7)
TEN = NoiseSchedule(denoise_steps=10).sigmas()


def _latents(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(len(values), 1, 1)


def _rows(*steps: int) -> torch.Tensor:
    return torch.tensor(steps, dtype=torch.int64)


def _diffusion(sigmas: np.ndarray, denoise_step: int) -> float:
    """``g``, from the step's std."""
    step = FlowSdeRule(0.7).step(sigmas.tolist(), denoise_step)
    return step.std / math.sqrt(step.time)


def test_ode_step_is_euler_and_unscored() -> None:
    sampler = build_sampler(OdeConfig(denoise_steps=4), NoiseSchedule(denoise_steps=4).sigmas())
    x, log_prob = sampler.step(_latents(1.0, -2.0), _latents(2.0, 4.0), 1, None)
    assert x.flatten().tolist() == [0.5, -3.0]
    assert log_prob is None
    with pytest.raises(ValueError, match="takes no noise"):
        sampler.step(x, x, 1, x)


def test_first_diffusion_uses_the_second_sigma_in_its_denominator() -> None:
    assert _diffusion(TEN, 0) == pytest.approx(0.7 * math.sqrt(1 / 0.1), rel=1e-6)
    assert _diffusion(TEN, 0) == pytest.approx(2.2136, abs=5e-5)
    assert _diffusion(TEN, 5) == pytest.approx(0.7, rel=1e-6)  # sigma 0.5


@pytest.mark.parametrize(("shift", "expected"), [(1.0, 2.101), (3.0, 3.506)])
def test_first_diffusion_on_the_stock_schedules(shift: float, expected: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(10)
    assert _diffusion(scheduler.sigmas.numpy(), 0) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("denoise_step", [0, 3, 8])
def test_sde_mean_std_and_log_prob(denoise_step: int) -> None:
    s, after = 1 - denoise_step / 10, 0.9 - denoise_step / 10
    dt, below = after - s, 0.1 if denoise_step == 0 else 1 - s
    g = 0.7 * math.sqrt(s / below)
    x, v, xi = 0.8, -1.3, 0.6
    mean = x * (1 + g**2 * dt / (2 * s)) + v * (1 + g**2 * (1 - s) / (2 * s)) * dt
    std = g * math.sqrt(-dt)
    expected = -((std * xi) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)

    sampler = build_sde(SDE, TEN)
    following, log_prob = sampler.step(_latents(x), _latents(v), denoise_step, _latents(xi))

    assert following.item() == pytest.approx(mean + std * xi, rel=1e-5)
    assert log_prob is not None
    assert log_prob.item() == pytest.approx(expected, rel=1e-4)
    steps_B = _rows(denoise_step)
    assert torch.equal(log_prob, sampler.log_prob(_latents(x), _latents(v), following, steps_B))


def test_log_prob_is_a_mean_over_dimensions() -> None:
    sampler = build_sde(SDE, TEN)
    x = torch.zeros(2, 8, 64)
    once, _ = sampler.step(x[:, :1, :1], x[:, :1, :1], 4, torch.ones(2, 1, 1))
    single = sampler.log_prob(x[:, :1, :1], x[:, :1, :1], once, _rows(4, 4))
    many = sampler.log_prob(x, x, once.expand(2, 8, 64), _rows(4, 4))
    torch.testing.assert_close(single, many)


def test_log_prob_is_differentiable_in_the_velocity() -> None:
    sampler = build_sde(SDE, TEN)
    v = _latents(0.5).requires_grad_()
    sampler.log_prob(_latents(1.0), v, _latents(0.9), _rows(3)).sum().backward()
    s, dt, g2 = 0.7, -0.1, 0.49 * 0.7 / 0.3
    slope = (1 + g2 * (1 - s) / (2 * s)) * dt
    mean = 1.0 * (1 + g2 * dt / (2 * s)) + 0.5 * slope
    assert v.grad is not None
    assert v.grad.item() == pytest.approx((0.9 - mean) * slope / (g2 * -dt), rel=1e-4)


def test_without_noise_a_step_is_an_ode_step_and_the_last_one_always() -> None:
    sampler = build_sde(SDE, TEN)
    for denoise_step in range(10):
        x, log_prob = sampler.step(_latents(1.0), _latents(2.0), denoise_step, None)
        assert log_prob is None
        assert x.item() == pytest.approx(1.0 - 0.1 * 2.0, rel=1e-6)
    x = _latents(1.0)
    with pytest.raises(ValueError, match="denoise step 9 is the last"):
        sampler.step(x, x, 9, x)
    with pytest.raises(ValueError, match="denoise step 9 is the last"):
        sampler.log_prob(x, x, x, _rows(9))


CONFIGS = [
    FlowSdeConfig(type="flow_sde", noise_level=0.0),
    DanceSdeConfig(type="dance_sde", noise_level=0.0),
    CpsConfig(type="cps", noise_level=0.0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.type)
def test_a_noise_level_of_zero_is_the_ode_bit_for_bit_and_unscored(config: SdeConfig) -> None:
    sampler = build_sampler(config, TEN)
    assert isinstance(sampler, OdeSampler)
    assert config.trained_per_sample == 0
    x, v = torch.randn(2, 3, 8, 64, generator=torch.Generator().manual_seed(0))
    for denoise_step in range(10):
        following, log_prob = sampler.step(x, v, denoise_step, None)
        assert log_prob is None
        assert torch.equal(following, OdeSampler(TEN).step(x, v, denoise_step, None)[0])
    with pytest.raises(ValueError, match="never scored"):
        build_sde(config, TEN)


def test_cps_at_a_tiny_level_is_cps_and_not_the_ode() -> None:
    """At a level near 0 it is Euler up to rounding: only the level itself may decide."""
    sampler = build_sampler(CpsConfig(type="cps", noise_level=1e-6), TEN)
    assert isinstance(sampler, SdeSampler)
    x, v, noise = torch.randn(3, 3, 8, 64, generator=torch.Generator().manual_seed(0))
    following, log_prob = sampler.step(x, v, 4, noise)
    euler, _ = OdeSampler(TEN).step(x, v, 4, None)
    assert log_prob is not None
    assert not torch.equal(following, euler)
    torch.testing.assert_close(following, euler, rtol=0, atol=1e-5)
