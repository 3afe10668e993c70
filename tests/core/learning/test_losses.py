"""Losses against scalar re-derivations in plain Python floats."""

from typing import Literal

import pytest
import torch

from spotlight_core.learning.losses.nft import nft_loss, old_policy_decay
from spotlight_core.learning.losses.policy_gradient import clipped_loss


def _scalar_nft(
    v: float, v_old: float, x_t: float, x0: float, t: float, advantage: float, beta: float, largest: float
) -> float:
    q = min(max(advantage / (2 * largest) + 0.5, 0.0), 1.0)
    positive = x_t - t * (beta * v + (1 - beta) * v_old) - x0
    negative = x_t - t * ((1 + beta) * v_old - beta * v) - x0
    terms = [error**2 / max(abs(error), 1e-5) for error in (positive, negative)]
    return largest * (q * terms[0] + (1 - q) * terms[1]) / beta


def _one(value: float) -> torch.Tensor:
    return torch.full((1, 1, 1), value)


@pytest.mark.parametrize("advantage", [-7.0, -1.0, 0.0, 0.4, 5.0])
def test_nft_of_one_pixel(advantage: float) -> None:
    numbers = {"v": 0.7, "v_old": 0.2, "x_t": 0.5, "x0": -0.3, "t": 0.6}
    loss = nft_loss(
        _one(0.7),
        _one(0.2),
        _one(0.5),
        _one(-0.3),
        torch.tensor([0.6]),
        torch.tensor([advantage]),
        beta=0.1,
        max_advantage=5.0,
    )
    assert loss.item() == pytest.approx(
        _scalar_nft(**numbers, advantage=advantage, beta=0.1, largest=5.0), rel=1e-5
    )


def test_nft_is_a_mean_over_rows_and_weights_each_row() -> None:
    v, v_old = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(2, 3, 4)
    x_t, x0 = torch.ones(2, 3, 4), torch.full((2, 3, 4), 0.25)
    t, advantages = torch.tensor([0.3, 0.9]), torch.tensor([1.0, -2.0])
    both = nft_loss(v, v_old, x_t, x0, t, advantages, beta=0.5, max_advantage=5.0)
    rows = [
        nft_loss(
            v[i : i + 1],
            v_old[i : i + 1],
            x_t[i : i + 1],
            x0[i : i + 1],
            t[i : i + 1],
            advantages[i : i + 1],
            beta=0.5,
            max_advantage=5.0,
        )
        for i in range(2)
    ]
    assert both.item() == pytest.approx(sum(row.item() for row in rows) / 2, rel=1e-6)
    errors = [1 - 0.3 * 0.5 * value - 0.25 for value in v[0].flatten().tolist()]
    mirrored = [1 + 0.3 * 0.5 * value - 0.25 for value in v[0].flatten().tolist()]
    terms = [sum(e * e for e in part) / sum(abs(e) for e in part) for part in (errors, mirrored)]
    assert rows[0].item() == pytest.approx(5 * (0.6 * terms[0] + 0.4 * terms[1]) / 0.5, rel=1e-5)


def test_nft_gradient_follows_the_sign_of_the_advantage() -> None:
    """Where both policies agree, the gradient pulls v towards the sample in proportion to A."""
    gradients = {}
    for advantage in (-2.0, 0.0, 2.0):
        v = _one(0.2).requires_grad_()
        nft_loss(
            v,
            _one(0.2),
            _one(0.5),
            _one(-0.3),
            torch.tensor([0.6]),
            torch.tensor([advantage]),
            beta=0.1,
            max_advantage=5.0,
        ).backward()
        assert v.grad is not None
        gradients[advantage] = v.grad.item()
    error = 0.5 - 0.6 * 0.2 + 0.3
    # 5 / beta * (q - (1 - q)) * beta * 2 * error * (-t) / |error|, and q - (1 - q) = A / 5
    assert gradients[2.0] == pytest.approx(2.0 * 2 * error * -0.6 / abs(error), rel=1e-5)
    assert gradients[-2.0] == pytest.approx(-gradients[2.0], rel=1e-5)
    assert gradients[0.0] == pytest.approx(0.0, abs=1e-6)


def test_nft_weight_is_floored() -> None:
    perfect = _one(0.0)
    loss = nft_loss(
        perfect,
        perfect,
        perfect,
        perfect,
        torch.tensor([0.5]),
        torch.tensor([1.0]),
        beta=0.1,
        max_advantage=5.0,
    )
    assert loss.item() == 0.0
    tiny = _one(1e-7)
    loss = nft_loss(
        perfect, perfect, tiny, perfect, torch.tensor([0.5]), torch.tensor([0.0]), beta=1.0, max_advantage=1.0
    )
    assert loss.item() == pytest.approx(1e-14 / 1e-5, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "steps", "expected"),
    [
        (0, 500, 0.0),
        (1, 0, 0.0),
        (1, 120, 0.12),
        (1, 900, 0.5),
        (2, 75, 0.0),
        (2, 95, 0.15),
        (2, 1000, 0.999),
    ],
)
def test_old_policy_decay(kind: Literal[0, 1, 2], steps: int, expected: float) -> None:
    assert old_policy_decay(kind, steps) == pytest.approx(expected, abs=1e-12)


def test_clipped_loss_is_pessimistic() -> None:
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert clipped_loss(ratio, advantages, 0.1, 0.2).tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.9])


def test_clipped_loss_has_no_gradient_beyond_the_clip() -> None:
    ratio = torch.tensor([1.5, 1.5, 1.05], requires_grad=True)
    clipped_loss(ratio, torch.tensor([1.0, -1.0, 1.0]), 0.1, 0.1).mean().backward()
    assert ratio.grad is not None
    assert ratio.grad.tolist() == pytest.approx([0.0, 1 / 3, -1 / 3])
