"""Samplers against the row-by-row reference: mean, std, next latents, log-probability."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from spotlight_core.config import SdeConfig
from spotlight_core.diffusion.noise_schedule import NoiseSchedule
from spotlight_core.diffusion.samplers import Sampler, build_sampler, build_sde
from spotlight_core.diffusion.samplers.ode import OdeSampler
from tests.core.golden import reference

LEVELS = [
    *(("flow_sde", level) for level in (0.3, 0.7, 1.2)),
    *(("dance_sde", level) for level in (0.3, 0.7, 1.2)),
    *(("cps", level) for level in (0.3, 0.7, 0.8)),
]
SCHEDULES = [(10, 1.0), (10, 3.0), (7, 1.0), (7, 3.0)]
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
ROUNDED: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def sde(kind: str, level: float, steps: int) -> SdeConfig:
    config: SdeConfig = TypeAdapter(SdeConfig).validate_python(
        {"type": kind, "noise_level": level, "denoise_steps": steps}
    )
    return config


def _rows(steps: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, v and noise ``[B, 2, 3]`` with one row for each scored step, last first; and those steps."""
    draws = np.random.default_rng(steps).standard_normal((3, steps - 1, 2, 3))
    x_BSC, v_BSC, noise_BSC = torch.from_numpy(draws).to(dtype)
    return x_BSC, v_BSC, noise_BSC, torch.arange(steps - 2, -1, -1)


@pytest.mark.parametrize(("steps", "shift"), SCHEDULES)
def test_schedules(steps: int, shift: float) -> None:
    assert NoiseSchedule(denoise_steps=steps, shift=shift).sigmas().tolist() == reference.schedule(
        steps, shift
    )


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, EXACT), (torch.float32, ROUNDED)])
@pytest.mark.parametrize(("steps", "shift"), SCHEDULES)
@pytest.mark.parametrize(("kind", "level"), LEVELS)
def test_every_step_of_every_sampler(
    kind: str, level: float, steps: int, shift: float, dtype: torch.dtype, near: dict[str, Any]
) -> None:
    """Rows of different denoise steps in one call, the first step (sigma = 1) among them."""
    sigmas = reference.schedule(steps, shift)
    sampler = build_sde(sde(kind, level, steps), NoiseSchedule(denoise_steps=steps, shift=shift).sigmas())
    x, v, noise, steps_B = _rows(steps, dtype)
    mean, std = sampler.mean(x, v, steps_B), sampler.std(steps_B, x)
    x_next = mean + std * noise
    log_prob = sampler.log_prob(x, v, x_next, steps_B)
    assert mean.dtype == std.dtype == log_prob.dtype == dtype
    for row, step in enumerate(steps_B.tolist()):
        x_row, v_row, noise_row = (part[row].double().numpy() for part in (x, v, noise))
        mu = reference.mean(kind, level, sigmas, step, x_row, v_row)
        deviation = reference.std(kind, level, sigmas, step)
        following = mu + deviation * noise_row
        expected = reference.log_prob(kind, following, mu, deviation).real
        np.testing.assert_allclose(mean[row], mu, **near)
        np.testing.assert_allclose(std[row].item(), deviation, **near)
        np.testing.assert_allclose(log_prob[row].item(), expected, **near)
        walked, scored = sampler.step(x[row : row + 1], v[row : row + 1], step, noise[row : row + 1])
        assert scored is not None
        np.testing.assert_allclose(walked[0], following, **near)
        np.testing.assert_allclose(scored.item(), expected, **near)


@pytest.mark.parametrize(("steps", "shift"), SCHEDULES)
def test_ode_steps_and_the_last_step_of_every_sampler(steps: int, shift: float) -> None:
    sigmas, schedule = (
        reference.schedule(steps, shift),
        NoiseSchedule(denoise_steps=steps, shift=shift).sigmas(),
    )
    x, v, _, _ = _rows(steps, torch.float64)
    samplers: list[Sampler] = [OdeSampler(schedule)]
    samplers += [build_sde(sde(kind, level, steps), schedule) for kind, level in LEVELS]
    for step in range(steps):
        expected = reference.mean("ode", 0.0, sigmas, step, x.numpy(), v.numpy())
        for sampler in samplers:
            walked, scored = sampler.step(x, v, step, None)
            assert scored is None
            np.testing.assert_allclose(walked, expected, **EXACT)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "cps"])
def test_a_level_of_zero_has_the_odes_bits_and_a_tiny_one_does_not(kind: str) -> None:
    schedule = NoiseSchedule(denoise_steps=10, shift=3.0).sigmas()
    x, v, noise, _ = _rows(10, torch.float32)
    zero = build_sampler(sde(kind, 0.0, 10), schedule)
    tiny = build_sampler(sde(kind, 1e-7, 10), schedule)
    for step in range(9):
        euler, _ = OdeSampler(schedule).step(x, v, step, None)
        assert torch.equal(zero.step(x, v, step, None)[0], euler)
        _, scored = tiny.step(x, v, step, noise)
        assert scored is not None
        assert torch.isfinite(scored).all()


@pytest.mark.parametrize(("kind", "level"), [("flow_sde", 0.7), ("dance_sde", 0.3)])
def test_the_log_prob_is_the_mean_of_torchs_own(kind: str, level: float) -> None:
    sampler = build_sde(sde(kind, level, 10), NoiseSchedule(denoise_steps=10, shift=3.0).sigmas())
    x, v, noise, steps_B = _rows(10, torch.float64)
    mean, std = sampler.mean(x, v, steps_B), sampler.std(steps_B, x)
    x_next = mean + std * noise
    torchs = torch.distributions.Normal(mean, std).log_prob(x_next).mean((1, 2))
    torch.testing.assert_close(sampler.log_prob(x, v, x_next, steps_B), torchs, rtol=1e-12, atol=1e-12)


def test_cps_is_scored_by_the_bare_squared_distance() -> None:
    sampler = build_sde(sde("cps", 0.8, 10), NoiseSchedule(denoise_steps=10).sigmas())
    x, v, noise, steps_B = _rows(10, torch.float64)
    x_next = sampler.mean(x, v, steps_B) + sampler.std(steps_B, x) * noise
    expected = -(sampler.std(steps_B, x)[:, 0, 0] ** 2) * (noise**2).mean((1, 2))
    torch.testing.assert_close(sampler.log_prob(x, v, x_next, steps_B), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("level", [0.3, 0.8, 1.0])
def test_cps_leaves_no_extra_noise(level: float) -> None:
    """From the true velocity its next latents have exactly the marginal ``(1 - s') x0 + s' eps``."""
    schedule = NoiseSchedule(denoise_steps=7, shift=3.0).sigmas()
    sampler = build_sde(sde("cps", level, 7), schedule)
    clean, noise = torch.tensor([[[2.0]]], dtype=torch.float64), torch.tensor([[[1.5]]], dtype=torch.float64)
    for step in range(6):
        s, after = float(schedule[step]), float(schedule[step + 1])
        steps_B = torch.tensor([step])
        mean = sampler.mean((1 - s) * clean + s * noise, noise - clean, steps_B)
        kept, renewed = (mean.item() - (1 - after) * 2.0) / 1.5, sampler.std(steps_B, mean).item()
        assert kept**2 + renewed**2 == pytest.approx(after**2, rel=1e-12)
        assert renewed / after == pytest.approx(math.sin(level * math.pi / 2), rel=1e-12)
