"""Flow-GRPO and GRPO-Guard against the reference: losses, gradients, both KLs, importance weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spotlight_core.config import GrpoConfig, GrpoGuardConfig
from spotlight_core.diffusion.noise_schedule import NoiseSchedule
from spotlight_core.diffusion.samplers import build_sde
from spotlight_core.learning.losses.base import RATIO_DEVIATION, TrainingChunk
from spotlight_core.learning.losses.grpo import GrpoLoss
from spotlight_core.learning.losses.grpo_guard import GrpoGuardLoss
from spotlight_core.learning.losses.policy_gradient import PolicyGradientLoss
from tests.core.golden import reference
from tests.core.golden.linear import (
    ADVANTAGES,
    PROMPTS,
    TRAINED,
    LinearModel,
    Rollout,
    distance,
    rolled_out,
    summed,
    weights_near,
)
from tests.core.golden.reference import Weights
from tests.core.golden.test_golden_samplers import LEVELS, SCHEDULES, sde

BASE, NOW = weights_near(1, 0.1), weights_near(2, 0.05)
CLIPS = {"grpo": (0.004, 0.006), "grpo_guard": (0.0008, 0.0012)}
GENERATOR = np.random.default_rng(0)


def built(
    kind: str,
    level: float,
    schedule: tuple[int, float],
    loss: str = "grpo",
    *,
    dtype: torch.dtype = torch.float64,
    per_forward: int = 1,
    **options: Any,
) -> tuple[LinearModel, PolicyGradientLoss]:
    """The product's loss, with ``BASE`` as its reference policy and ``NOW`` trained."""
    steps, shift = schedule
    model = LinearModel(BASE, dtype)
    sampler = build_sde(sde(kind, level, steps), NoiseSchedule(denoise_steps=steps, shift=shift).sigmas())
    low, high = CLIPS[loss]
    values = {"type": loss, "clip_low": low, "clip_high": high, **options}
    product: PolicyGradientLoss
    if loss == "grpo":
        product = GrpoLoss(model, GrpoConfig.model_validate(values), sampler, per_forward)
    else:
        product = GrpoGuardLoss(model, GrpoGuardConfig.model_validate(values), sampler, per_forward)
    model.load(NOW)
    return model, product


def expected(rollout: Rollout, loss: str = "grpo", **options: Any) -> tuple[float, Weights]:
    low, high = CLIPS[loss]
    settings = {"clip_low": low, "clip_high": high, "kl_weight": 0.0, "kl_form": "per_time", **options}

    def of(weights: Weights) -> complex:
        return reference.policy_gradient_loss(
            rollout.seen, weights, rollout.old, BASE, ADVANTAGES, loss=loss, **settings
        )

    return of(NOW).real, reference.gradient(of, NOW)


CASES = [
    *((kind, level, (10, 3.0), "grpo") for kind, level in LEVELS),
    *(
        (kind, 0.7, schedule, "grpo")
        for kind in ("flow_sde", "cps")
        for schedule in SCHEDULES
        if schedule != (10, 3.0)
    ),
    *(("flow_sde", level, (7, 1.0), "grpo_guard") for level in (0.3, 0.7, 1.2)),
    ("flow_sde", 0.7, (10, 3.0), "grpo_guard"),
]


@pytest.mark.parametrize(("kind", "level", "schedule", "loss"), CASES)
def test_loss_and_gradients(kind: str, level: float, schedule: tuple[int, float], loss: str) -> None:
    """Windows of different groups in one chunk; KL in one form, then the other, then none; fp64 and fp32."""
    rollout = rolled_out(kind, level, *schedule)
    for kl_weight, kl_form in ((0.0, "per_time"), (0.04, "per_time"), (0.04, "per_step")):
        value, slopes = expected(rollout, loss, kl_weight=kl_weight, kl_form=kl_form)
        for dtype, near in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
            model, product = built(
                kind, level, schedule, loss, dtype=dtype, kl_weight=kl_weight, kl_form=kl_form
            )
            got, gradients = summed(product.parts(model, rollout.chunk(dtype), GENERATOR), model)
            assert got == pytest.approx(value, rel=near)
            assert distance(gradients, slopes) < near


@pytest.mark.parametrize("loss", ["grpo", "grpo_guard"])
def test_some_ratios_of_the_golden_chunk_are_clipped_and_some_are_not(loss: str) -> None:
    model, product = built("flow_sde", 0.7, (10, 3.0), loss)
    parts = list(product.parts(model, rolled_out("flow_sde", 0.7, 10, 3.0).chunk(), GENERATOR))
    assert 0.1 < np.mean([part.metrics["train/clip_fraction"] for part in parts]) < 0.9


@pytest.mark.parametrize(
    ("kind", "loss"), [("flow_sde", "grpo"), ("cps", "grpo"), ("flow_sde", "grpo_guard")]
)
def test_stacking_timesteps_changes_neither_loss_nor_gradients(kind: str, loss: str) -> None:
    chunk = rolled_out(kind, 0.7, 10, 3.0).chunk()
    results = {}
    for per_forward in (1, 2, 3, 5, 8):
        model, product = built(kind, 0.7, (10, 3.0), loss, per_forward=per_forward, kl_weight=0.04)
        model.forwards = 0
        results[per_forward] = summed(product.parts(model, chunk, GENERATOR), model)
        assert model.forwards == -(-TRAINED // per_forward)
    alone, slopes = results[1]
    for value, gradients in results.values():
        assert value == pytest.approx(alone, rel=1e-12)
        assert distance(gradients, slopes) < 1e-12


@pytest.mark.parametrize("loss", ["grpo", "grpo_guard"])
def test_chunks_of_other_sizes_give_the_mean_of_their_rows(loss: str) -> None:
    rollout = rolled_out("flow_sde", 0.7, 10, 3.0)
    model, product = built("flow_sde", 0.7, (10, 3.0), loss, per_forward=2, kl_weight=0.04)
    whole, slopes = summed(product.parts(model, rollout.chunk(), GENERATOR), model)
    total, gathered = 0.0, {name: np.zeros_like(slope) for name, slope in slopes.items()}
    for rows in (slice(0, 1), slice(1, 3), slice(3, 5)):
        share = len(PROMPTS[rows]) / len(PROMPTS)
        value, gradients = summed(product.parts(model, rollout.chunk(rows=rows), GENERATOR), model)
        total += share * value
        gathered = {name: gathered[name] + share * gradients[name] for name in slopes}
    assert total == pytest.approx(whole, rel=1e-12)
    assert distance(gathered, slopes) < 1e-12


def test_anchors_are_the_log_probs_and_means_of_the_present_weights() -> None:
    rollout = rolled_out("flow_sde", 0.7, 10, 3.0)
    model, product = built("flow_sde", 0.7, (10, 3.0), "grpo_guard", per_forward=2)
    model.load(rollout.old)
    anchors, chunk = product.anchors(model, rollout.chunk()), rollout.chunk()
    assert set(anchors) == {"logp_BT", "mean_BTSC"}
    for name, anchor in anchors.items():
        torch.testing.assert_close(anchor, chunk.arrays[name], rtol=1e-12, atol=1e-12)
    for part in product.parts(model, chunk, GENERATOR):
        assert part.metrics[RATIO_DEVIATION] < 1e-12
    plain = built("flow_sde", 0.7, (10, 3.0))[1]
    assert set(plain.anchors(model, chunk)) == {"logp_BT"}


# -- KL -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "level"), [("flow_sde", 0.7), ("dance_sde", 0.3), ("cps", 0.8)])
def test_both_kl_forms_are_torchs_own_kl(kind: str, level: float) -> None:
    rollout = rolled_out(kind, level, 10, 3.0)
    found: dict[str, list[float]] = {}
    for form in ("per_step", "per_time"):
        model, product = built(kind, level, (10, 3.0), kl_weight=0.04, kl_form=form)
        parts = product.parts(model, rollout.chunk(), GENERATOR)
        found[form] = [part.metrics["train/kl"] for part in parts]
    seen = rollout.seen
    for place in range(TRAINED):
        per_step, per_time = [], []
        for row in range(len(PROMPTS)):
            mu, mu_ref = (torch.from_numpy(seen.mean(w, row, place)) for w in (NOW, BASE))
            normal = torch.distributions.Normal
            exact = torch.distributions.kl_divergence(
                normal(mu, seen.std(row, place)), normal(mu_ref, seen.std(row, place))
            )
            per_step.append(exact.mean().item())
            per_time.append(per_step[-1] * (1.0 if kind == "cps" else seen.minus_dt(row, place)))
        assert found["per_step"][place] == pytest.approx(np.mean(per_step), rel=1e-10)
        assert found["per_time"][place] == pytest.approx(np.mean(per_time), rel=1e-10)
    assert (found["per_step"] == found["per_time"]) == (kind == "cps")


@pytest.mark.parametrize("loss", ["grpo", "grpo_guard"])
def test_a_kl_weight_changes_the_gradients(loss: str) -> None:
    chunk = rolled_out("flow_sde", 0.7, 10, 3.0).chunk()
    found = []
    for kl_weight in (0.0, 4.0):
        model, product = built("flow_sde", 0.7, (10, 3.0), loss, kl_weight=kl_weight)
        found.append(summed(product.parts(model, chunk, GENERATOR), model)[1])
    assert distance(found[1], found[0]) > 1e-3


# -- importance correction ------------------------------------------------------------------------------


def _with_rollout_log_probs(chunk: TrainingChunk) -> tuple[TrainingChunk, np.ndarray]:
    """A rollout whose log-probabilities were off, by up to ``e`` in either direction."""
    off = np.random.default_rng(3).uniform(-1, 1, chunk.arrays["logp_BT"].shape)
    rollout_BT = chunk.arrays["logp_BT"] - torch.from_numpy(off)
    arrays = {**chunk.arrays, "rollout_logp_BT": rollout_BT}
    return replace(chunk, arrays=arrays), np.minimum(np.exp(off), 1.5)


@pytest.mark.parametrize("loss", ["grpo", "grpo_guard"])
def test_truncated_importance_weights(loss: str) -> None:
    rollout = rolled_out("flow_sde", 0.7, 10, 3.0)
    chunk, importance = _with_rollout_log_probs(rollout.chunk())
    assert (importance == 1.5).any()
    options: dict[str, Any] = {"importance_correction": "truncated", "importance_cap": 1.5, "kl_weight": 0.04}
    model, product = built("flow_sde", 0.7, (10, 3.0), loss, per_forward=2, **options)
    value, slopes = expected(rollout, loss, kl_weight=0.04, importance=importance)
    got, gradients = summed(product.parts(model, chunk, GENERATOR), model)
    assert got == pytest.approx(value, rel=1e-10)
    assert distance(gradients, slopes) < 1e-10


def test_importance_acts_only_where_it_is_asked_for_and_there_is_something_to_correct() -> None:
    rollout = rolled_out("flow_sde", 0.7, 10, 3.0)
    chunk, _ = _with_rollout_log_probs(rollout.chunk())
    value, _ = expected(rollout)
    model, product = built("flow_sde", 0.7, (10, 3.0))
    assert summed(product.parts(model, chunk, GENERATOR), model)[0] == pytest.approx(value, rel=1e-10)
    model, product = built("flow_sde", 0.7, (10, 3.0), importance_correction="truncated")
    assert summed(product.parts(model, rollout.chunk(), GENERATOR), model)[0] == pytest.approx(
        value, rel=1e-10
    )
    assert abs(summed(product.parts(model, chunk, GENERATOR), model)[0] - value) > 1e-3


# -- GRPO-Guard -----------------------------------------------------------------------------------------


def test_guards_exponent_is_the_mean_of_the_means_shift_along_the_noise() -> None:
    rollout = rolled_out("flow_sde", 0.7, 10, 3.0)
    for row in range(len(PROMPTS)):
        for place in range(TRAINED):
            _, defined = reference.guard_ratio_as_defined(rollout.seen, NOW, rollout.old, row, place)
            _, computed = reference.guard_ratio_as_computed(rollout.seen, NOW, rollout.old, row, place)
            assert defined.real == pytest.approx(computed.real, rel=1e-9, abs=1e-14)


def test_guards_subtraction_in_fp32_loses_the_exponent() -> None:
    """A first update's shift at a real latent's size: exponents near 4e-7, under a clip range of 2e-6.

    The subtraction is off by 6e-8, a fifth of such an exponent; the form that is computed by 2e-10.
    """
    rng = np.random.default_rng(0)
    sampler = build_sde(sde("flow_sde", 0.7, 10), NoiseSchedule(denoise_steps=10, shift=3.0).sigmas())
    x, v, xi, shift = (torch.from_numpy(rng.standard_normal((8, 1024, 64))) for _ in range(4))
    now, steps_B = v + 1e-3 * shift, torch.arange(8)
    x_next = (sampler.mean(x, v, steps_B) + sampler.std(steps_B, x) * xi).float()

    def exponents(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        at = [part.to(dtype) for part in (x, v, now, x_next)]
        old, mean, std = (
            sampler.mean(at[0], at[1], steps_B),
            sampler.mean(at[0], at[2], steps_B),
            sampler.std(steps_B, at[0]),
        )
        b = ((mean - old) ** 2 / (2 * std**2)).mean((1, 2))
        logp, logp_old = (sampler.log_prob(at[0], velocity, at[3], steps_B) for velocity in (at[2], at[1]))
        return ((mean - old) * ((at[3] - old) / std)).mean((1, 2)), (logp - logp_old + b) * std.flatten()

    exact, also_exact = exponents(torch.float64)
    torch.testing.assert_close(also_exact, exact, rtol=1e-6, atol=1e-14)
    computed, subtracted = (form.double() for form in exponents(torch.float32))
    typical = exact.abs().median().item()
    assert 1e-7 < typical < 2e-6
    assert (computed - exact).abs().max().item() < 1e-3 * typical
    assert (subtracted - exact).abs().max().item() > 0.1 * typical
