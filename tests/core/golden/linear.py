"""A linear model behind the ``DiffusionModel`` protocol, and chunks for it: tiny, in fp64 or fp32.

Shape legend: B batch, S sequence (2), C channel (3), D text channels (2), T trained denoise steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from spotlight_core.diffusion.model import TextEmbeddings
from spotlight_core.diffusion.noise_schedule import NoiseSchedule
from spotlight_core.learning.losses.base import LossPart, TrainingChunk
from tests.core.golden import reference
from tests.core.golden.reference import Recorded, Weights

SHAPE_SC = (2, 3)
PROMPTS: tuple[str, ...] = ('A "1"', 'A "1"', 'A "2"', 'A "2"', 'A "7"')  # texts repeat, groups do not
ADVANTAGES: tuple[float, ...] = (1.3, -0.8, 2.4, -1.9, 0.6)
PLACES = {10: (0, 0, 2, 2, 4), 7: (0, 0, 1, 1, 1)}  # where each row's window of five steps begins
TRAINED = 5


def text_of(prompt: str) -> list[float]:
    number = int(prompt.split('"')[1])
    return [float(np.cos(number)), float(np.sin(number))]


def weights_near(rng_seed: int, spread: float = 0.0) -> Weights:
    """Always the same weights, and ``spread`` times noise of ``rng_seed`` around them."""
    base, moved = np.random.default_rng(0), np.random.default_rng(rng_seed)
    shapes = {"on_x": (3, 3), "on_sigma": (3,), "on_text": (2, 3)}
    return {
        name: 0.5 * base.standard_normal(shape) + spread * moved.standard_normal(shape)
        for name, shape in shapes.items()
    }


class Linear(nn.Module):
    """``v = x W + sigma b + t U``."""

    on_x: nn.Parameter
    on_sigma: nn.Parameter
    on_text: nn.Parameter

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        for name, array in weights.items():
            setattr(self, name, nn.Parameter(torch.from_numpy(array.copy()).to(dtype)))


class LinearModel:
    latent_shape_SC = SHAPE_SC

    def __init__(self, weights: Weights, dtype: torch.dtype = torch.float64) -> None:
        self.transformer: nn.Module = Linear(weights, dtype)
        self.forwards = 0
        self._dtype = dtype

    def encode(self, prompts: Sequence[str]) -> TextEmbeddings:
        rows = [[text_of(prompt)] for prompt in prompts]
        return TextEmbeddings(tokens_BLD=torch.tensor(rows, dtype=self._dtype))

    def velocity(self, x_BSC: torch.Tensor, sigma_B: torch.Tensor, text: TextEmbeddings) -> torch.Tensor:
        self.forwards += 1
        linear = self.transformer
        assert isinstance(linear, Linear)
        on_sigma_BSC = sigma_B.to(x_BSC)[:, None, None] * linear.on_sigma
        return x_BSC @ linear.on_x + on_sigma_BSC + text.tokens_BLD @ linear.on_text

    def decode(self, x_BSC: torch.Tensor) -> np.ndarray:
        raise NotImplementedError("a linear model draws nothing")

    def sigmas(self, denoise_steps: int, shift: float | None) -> np.ndarray:
        return NoiseSchedule(denoise_steps=denoise_steps, shift=shift or 1.0).sigmas()

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        for name, parameter in self.transformer.named_parameters():
            parameter.copy_(torch.from_numpy(weights[name]))

    def gradients(self) -> Weights:
        found = {}
        for name, parameter in self.transformer.named_parameters():
            assert parameter.grad is not None
            found[name] = parameter.grad.double().numpy().copy()
            parameter.grad = None
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What the rollout policy ``old`` recorded of five rows, whose windows lie in different places."""

    seen: Recorded
    old: Weights

    def chunk(self, dtype: torch.dtype = torch.float64, rows: slice = slice(None)) -> TrainingChunk:
        means = [[self.seen.mean(self.old, row, t).real for t in range(TRAINED)] for row in range(5)]
        arrays = {"x_BTSC": self.seen.x, "logp_BT": self.seen.log_probs(self.old)}
        arrays |= {"mean_BTSC": np.array(means), "x0": self.seen.x[:, -1]}
        tensors = {name: torch.from_numpy(array[rows].copy()).to(dtype) for name, array in arrays.items()}
        return TrainingChunk(
            prompts=PROMPTS[rows],
            advantages_B=torch.tensor(ADVANTAGES[rows], dtype=dtype),
            arrays=tensors | {"steps_BT": torch.from_numpy(self.seen.steps[rows])},
        )


def rolled_out(kind: str, level: float, denoise_steps: int, shift: float) -> Rollout:
    """Five rows, by the reference's own sampler."""
    rng = np.random.default_rng(7)
    sigmas, old = reference.schedule(denoise_steps, shift), weights_near(2, 0.02)
    x = np.zeros((5, TRAINED + 1, *SHAPE_SC))
    steps = np.zeros((5, TRAINED), dtype=np.int64)
    text = np.array([text_of(prompt) for prompt in PROMPTS])
    for row, first in enumerate(PLACES[denoise_steps]):
        x[row, 0] = rng.standard_normal(SHAPE_SC)
        for place in range(TRAINED):
            step = first + place
            steps[row, place] = step
            v = reference.velocity(old, x[row, place], sigmas[step], text[row])
            mu = reference.mean(kind, level, sigmas, step, x[row, place], v)
            noise = rng.standard_normal(SHAPE_SC)
            x[row, place + 1] = mu + reference.std(kind, level, sigmas, step) * noise
    return Rollout(seen=Recorded(kind, level, sigmas, x, steps, text), old=old)


def summed(parts: Iterable[LossPart], model: LinearModel) -> tuple[float, Weights]:
    """The chunk's loss and its gradients, part by part as the trainer does it."""
    total = 0.0
    for part in parts:
        weighted = part.loss * part.weight
        weighted.backward()
        total += weighted.item()
    return total, model.gradients()


def distance(found: Weights, expected: Weights) -> float:
    """Norm of the difference over the norm of what is expected."""
    difference = np.concatenate([(found[name] - expected[name]).ravel() for name in expected])
    return float(
        np.linalg.norm(difference) / np.linalg.norm(np.concatenate([a.ravel() for a in expected.values()]))
    )
