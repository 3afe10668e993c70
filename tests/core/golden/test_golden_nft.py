"""DiffusionNFT against the reference: loss, gradients, the base-model term, the old policy's decay."""

from typing import Literal

import numpy as np
import pytest
import torch

from spotlight_core.config import NftConfig
from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.policy import kept_policy, reference_policy
from spotlight_core.learning.losses.base import TrainingChunk
from spotlight_core.learning.losses.nft import NftLoss, old_policy_decay
from spotlight_core.philox import named_generator
from tests.core.golden import reference
from tests.core.golden.linear import (
    ADVANTAGES,
    PROMPTS,
    SHAPE_SC,
    LinearModel,
    distance,
    summed,
    text_of,
    weights_near,
)
from tests.core.golden.reference import Weights

BASE, OLD, NOW = weights_near(1, 0.1), weights_near(2, 0.1), weights_near(3, 0.1)
SCHEDULES = [(10, 1.0), (10, 3.0), (7, 1.0), (7, 3.0)]
LARGEST = 2.0  # below one of the advantages on either side, so that q is clipped too
X0 = np.random.default_rng(5).standard_normal((len(PROMPTS), *SHAPE_SC))


def _chunk(dtype: torch.dtype = torch.float64, rows: slice = slice(None)) -> TrainingChunk:
    return TrainingChunk(
        prompts=PROMPTS[rows],
        advantages_B=torch.tensor(ADVANTAGES[rows], dtype=dtype),
        arrays={"x0": torch.from_numpy(X0[rows]).to(dtype)},
    )


def _built(
    schedule: tuple[int, float],
    config: NftConfig,
    per_forward: int = 1,
    dtype: torch.dtype = torch.float64,
) -> tuple[LinearModel, NftLoss]:
    """The product's loss over three different policies: ``BASE``, ``OLD`` and, trained, ``NOW``."""
    model = LinearModel(BASE, dtype)
    loss = NftLoss(
        model,
        config,
        model.sigmas(*schedule),
        max_advantage=LARGEST,
        timesteps_per_forward=per_forward,
    )
    kept = loss.kept_weights()
    assert kept is not None
    for name, array in OLD.items():
        kept[name].copy_(torch.from_numpy(array))
    model.load(NOW)
    return model, loss


def _draws(schedule: tuple[int, float], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise levels ``[B, N]``, permuted in each row, then noise ``[N, B, S, C]``, one level after another."""
    generator, (steps, shift) = named_generator("golden"), schedule
    levels = np.array([reference.schedule(steps, shift)[:-1]] * len(PROMPTS), dtype=np.float32)
    levels = generator.permuted(levels, axis=1)[:, :count].astype(np.float64)
    noise = [generator.standard_normal((len(PROMPTS), *SHAPE_SC), dtype=np.float32) for _ in range(count)]
    return levels, np.array(noise, dtype=np.float64)


def _expected(schedule: tuple[int, float], config: NftConfig) -> tuple[float, Weights]:
    levels, noise = _draws(schedule, config.timesteps_per_sample)
    text = np.array([text_of(prompt) for prompt in PROMPTS])

    def of(weights: Weights) -> complex:
        return reference.nft_loss(
            weights,
            OLD,
            BASE,
            X0,
            text,
            levels,
            noise,
            ADVANTAGES,
            beta=config.beta,
            kl_weight=config.kl_weight,
            largest=LARGEST,
        )

    return of(NOW).real, reference.gradient(of, NOW)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("beta", "kl_weight"), [(0.1, 0.0), (1.0, 0.0), (0.1, 0.03)])
def test_loss_and_gradients(schedule: tuple[int, float], beta: float, kl_weight: float) -> None:
    config = NftConfig(beta=beta, kl_weight=kl_weight, timesteps_per_sample=5)
    value, slopes = _expected(schedule, config)
    for dtype, near in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model, loss = _built(schedule, config, dtype=dtype)
        got, gradients = summed(loss.parts(model, _chunk(dtype), named_generator("golden")), model)
        assert got == pytest.approx(value, rel=near)
        assert distance(gradients, slopes) < near


def test_stacking_timesteps_changes_neither_loss_nor_gradients() -> None:
    config = NftConfig(kl_weight=0.03, timesteps_per_sample=5)
    value, slopes = _expected((10, 3.0), config)
    alone = None
    for per_forward in (1, 2, 3, 5, 8):
        model, loss = _built((10, 3.0), config, per_forward)
        model.forwards = 0
        got, gradients = summed(loss.parts(model, _chunk(), named_generator("golden")), model)
        assert model.forwards == -(-5 // per_forward)
        alone = alone or (got, gradients)
        assert got == pytest.approx(alone[0], rel=1e-12)
        assert got == pytest.approx(value, rel=1e-10)
        assert distance(gradients, alone[1]) < 1e-12
        assert distance(gradients, slopes) < 1e-10


def test_a_kl_weight_changes_the_gradients_and_needs_no_reference_without() -> None:
    found = []
    for kl_weight in (0.0, 0.5):
        model, loss = _built((10, 1.0), NftConfig(kl_weight=kl_weight))
        parts = list(loss.parts(model, _chunk(), named_generator("golden")))
        assert all(("train/kl" in part.metrics) == (kl_weight > 0) for part in parts)
        found.append(summed(parts, model)[1])
    assert distance(found[1], found[0]) > 1e-2


def test_training_noise_levels_are_the_schedules_own_and_differ_within_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, loss = _built((10, 3.0), NftConfig(timesteps_per_sample=10))
    seen: list[list[float]] = []
    velocity = model.velocity

    def recording(x: torch.Tensor, sigma: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        seen.append(sigma.tolist())
        return velocity(x, sigma, text)

    monkeypatch.setattr(model, "velocity", recording)
    for _ in loss.parts(model, _chunk(), named_generator("levels")):
        pass
    schedule = sorted(reference.schedule(10, 3.0)[:-1])
    rows = [sorted(levels) for levels in zip(*seen, strict=True)]
    assert rows == [schedule] * len(PROMPTS)
    assert len(set(zip(*seen, strict=True))) > 1


def test_the_weight_keeps_the_models_precision() -> None:
    """It is taken in fp64; what leaves it is of the model's own type."""
    model, loss = _built((10, 3.0), NftConfig(), dtype=torch.float32)
    for part in loss.parts(model, _chunk(torch.float32), named_generator("golden")):
        assert part.loss.dtype == torch.float32
    model, loss = _built((10, 3.0), NftConfig())
    for part in loss.parts(model, _chunk(), named_generator("golden")):
        assert part.loss.dtype == torch.float64


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_decay_of_the_old_policy(kind: Literal[0, 1, 2]) -> None:
    for steps in (0, 1, 74, 75, 76, 95, 208, 209, 499, 500, 501, 5000):
        assert old_policy_decay(kind, steps) == pytest.approx(reference.old_decay(kind, steps), abs=1e-15)
        model, loss = _built((10, 1.0), NftConfig(old_decay=kind))
        loss.end_iteration(dict(model.transformer.named_parameters()), steps)
        eta, kept = reference.old_decay(kind, steps), loss.kept_weights()
        assert kept is not None
        for name in OLD:
            expected = eta * OLD[name] + (1 - eta) * NOW[name]
            np.testing.assert_allclose(kept[name], expected, rtol=1e-12, atol=1e-14)


def test_kept_and_reference_policies_stay_behind_and_have_no_gradients() -> None:
    model = LinearModel(BASE)
    kept, base = kept_policy(model), reference_policy(model)
    x, sigma = torch.from_numpy(X0), torch.full((len(PROMPTS),), 0.5)
    text = model.encode(PROMPTS)
    before = model.velocity(x, sigma, text).detach()
    model.load(NOW)
    assert not torch.equal(model.velocity(x, sigma, text), before)
    for policy in (kept, base):
        v = policy.velocity(x, sigma, text)
        assert torch.equal(v, before)
        assert not v.requires_grad
    assert set(kept.weights()) == set(BASE)
