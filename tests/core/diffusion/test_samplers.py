"""Samplers against values worked out by hand from the formulas, in plain Python floats."""

import math

import numpy as np
import pytest
import torch

from spotlight_core.config import FlowSdeConfig, OdeConfig
from spotlight_core.diffusion.samplers import build_flow_sde, build_sampler, ode_like

SDE = FlowSdeConfig(type="flow_sde", noise_level=0.7)


def _latents(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(len(values), 1, 1)


def test_ode_step_is_euler_and_unscored() -> None:
    sampler = build_sampler(OdeConfig(denoise_steps=4))
    x, log_prob = sampler.step(_latents(1.0, -2.0), _latents(2.0, 4.0), 1, None)
    assert x.flatten().tolist() == [0.5, -3.0]
    assert log_prob is None
    assert list(sampler.trained_steps) == []
    with pytest.raises(ValueError, match="no log-probability"):
        sampler.log_prob(x, x, x, 0)


def test_first_diffusion_uses_the_second_sigma_in_its_denominator() -> None:
    sampler = build_flow_sde(SDE)
    assert sampler.diffusion(0) == pytest.approx(0.7 * math.sqrt(1 / 0.1), rel=1e-6)
    assert sampler.diffusion(0) == pytest.approx(2.2136, abs=5e-5)
    assert sampler.diffusion(5) == pytest.approx(0.7, rel=1e-6)  # sigma 0.5


def test_stock_shift_of_three_gives_a_larger_first_diffusion() -> None:
    sampler = build_flow_sde(SDE.model_copy(update={"shift": 3.0}))
    second = 3 * 0.9 / (1 + 2 * 0.9)
    assert sampler.diffusion(0) == pytest.approx(0.7 * math.sqrt(1 / (1 - second)), rel=1e-6)


@pytest.mark.parametrize("denoise_step", [0, 3, 8])
def test_sde_mean_std_and_log_prob(denoise_step: int) -> None:
    s, after = 1 - denoise_step / 10, 0.9 - denoise_step / 10
    dt, below = after - s, 0.1 if denoise_step == 0 else 1 - s
    g = 0.7 * math.sqrt(s / below)
    x, v, xi = 0.8, -1.3, 0.6
    mean = x * (1 + g**2 * dt / (2 * s)) + v * (1 + g**2 * (1 - s) / (2 * s)) * dt
    std = g * math.sqrt(-dt)
    expected = -((std * xi) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)

    sampler = build_flow_sde(SDE)
    following, log_prob = sampler.step(_latents(x), _latents(v), denoise_step, _latents(xi))

    assert following.item() == pytest.approx(mean + std * xi, rel=1e-5)
    assert log_prob is not None
    assert log_prob.item() == pytest.approx(expected, rel=1e-4)
    assert torch.equal(log_prob, sampler.log_prob(_latents(x), _latents(v), following, denoise_step))


def test_log_prob_is_a_mean_over_dimensions() -> None:
    sampler = build_flow_sde(SDE)
    x = torch.zeros(2, 8, 64)
    once, _ = sampler.step(x[:, :1, :1], x[:, :1, :1], 4, torch.ones(2, 1, 1))
    single = sampler.log_prob(x[:, :1, :1], x[:, :1, :1], once, 4)
    many = sampler.log_prob(x, x, once.expand(2, 8, 64), 4)
    torch.testing.assert_close(single, many)


def test_log_prob_is_differentiable_in_the_velocity() -> None:
    sampler = build_flow_sde(SDE)
    v = _latents(0.5).requires_grad_()
    sampler.log_prob(_latents(1.0), v, _latents(0.9), 3).sum().backward()
    s, dt, g2 = 0.7, -0.1, 0.49 * 0.7 / 0.3
    slope = (1 + g2 * (1 - s) / (2 * s)) * dt
    mean = 1.0 * (1 + g2 * dt / (2 * s)) + 0.5 * slope
    assert v.grad is not None
    assert v.grad.item() == pytest.approx((0.9 - mean) * slope / (g2 * -dt), rel=1e-4)


def test_window_is_half_open_and_the_last_step_is_an_ode_step() -> None:
    sampler = build_flow_sde(SDE.model_copy(update={"window": (2, 5)}))
    assert [step for step in range(10) if sampler.needs_noise(step)] == [2, 3, 4]
    everything = build_flow_sde(SDE)
    assert list(everything.trained_steps) == list(range(9))
    x, log_prob = everything.step(_latents(1.0), _latents(2.0), 9, None)
    assert x.item() == pytest.approx(1.0 - 0.1 * 2.0, rel=1e-6)
    assert log_prob is None
    with pytest.raises(ValueError, match="needs noise"):
        everything.step(_latents(1.0), _latents(2.0), 0, None)
    with pytest.raises(ValueError, match="no log-probability"):
        everything.log_prob(x, x, x, 9)


def test_ode_like_keeps_the_shift() -> None:
    sampler = ode_like(SDE.model_copy(update={"shift": 3.0}), 2)
    assert sampler.sigmas.tolist() == [1.0, 0.75, 0.0]
    assert sampler.sigmas.dtype == np.float32
