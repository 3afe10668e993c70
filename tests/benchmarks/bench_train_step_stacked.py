"""Stacked training timesteps against one at a time: forward and backward of one micro-batch.

The embedded model with the quickstart's loss and micro-batch, one torch thread; repetitions alternate in one
process, so that a busy moment falls on both.  The gradients must agree, or the figure means nothing.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from spotlight_core.config import NftConfig, RunConfig
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.policy import policy_parameters
from spotlight_core.learning.losses import build_loss
from spotlight_core.learning.losses.base import TrainingChunk
from spotlight_core.philox import named_generator
from spotlight_core.recipes import load_recipe
from tests.benchmarks import Measurement

STACKED, WARM_UPS, ROUNDS = 4, 3, 25
AGREEMENT = 1e-6  # norm of the gradients' difference over their norm

Step = Callable[[], tuple[float, torch.Tensor]]


def _chunk(rows: int, shape_SC: tuple[int, int]) -> TrainingChunk:
    rng = np.random.default_rng(0)
    x0_BSC = rng.uniform(-1, 1, (rows, *shape_SC)).astype(np.float32)
    advantages_B = rng.standard_normal(rows).astype(np.float32)
    return TrainingChunk(
        prompts=tuple(f'A sign "{row:03d}"' for row in range(rows)),
        advantages_B=torch.from_numpy(advantages_B),
        arrays={"x0": torch.from_numpy(x0_BSC)},
    )


def _step(config: RunConfig, per_forward: int) -> Step:
    """A forward and backward of one micro-batch: its seconds and its gradients, flat."""
    optimizer = config.optimizer.model_copy(update={"timesteps_per_forward": per_forward})
    config = config.model_copy(update={"optimizer": optimizer})
    model = build_model(config.model, "training")
    sampler = config.sampler
    loss = build_loss(model, config, model.sigmas(sampler.denoise_steps, sampler.shift))
    parameters = policy_parameters(model.transformer).values()
    # Away from the policy that the loss keeps, as in a run after its first update.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator))
    chunk = _chunk(config.optimizer.samples_per_forward, model.latent_shape_SC)

    def step() -> tuple[float, torch.Tensor]:
        for parameter in parameters:
            parameter.grad = None
        began = time.perf_counter()
        for part in loss.parts(model, chunk, named_generator("bench")):
            (part.loss * part.weight).backward()
        seconds = time.perf_counter() - began
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return seconds, torch.cat([gradient.flatten() for gradient in gradients])

    return step


def compare(config: RunConfig, rounds: int = ROUNDS) -> tuple[float, float, float]:
    """Median seconds one at a time and stacked, and how far their gradients are apart.

    Raises:
        ValueError: the gradients do not agree.
    """
    torch.set_num_threads(config.services.torch_threads)
    steps = {per_forward: _step(config, per_forward) for per_forward in (1, STACKED)}
    gradients = {}
    for per_forward, step in steps.items():
        for _ in range(WARM_UPS):
            _, gradients[per_forward] = step()
    apart = ((gradients[STACKED] - gradients[1]).norm() / gradients[1].norm()).item()
    if not apart <= AGREEMENT:
        raise ValueError(f"gradients of stacked timesteps are {apart:.2e} apart (limit {AGREEMENT:.0e})")
    seconds: dict[int, list[float]] = {1: [], STACKED: []}
    for _ in range(rounds):
        for per_forward, step in steps.items():
            seconds[per_forward].append(step()[0])
    return statistics.median(seconds[1]), statistics.median(seconds[STACKED]), apart


def measure() -> Measurement:
    """At the quickstart's micro-batch."""
    config = load_recipe("quickstart")
    if not isinstance(config.loss, NftConfig):
        raise ValueError(f"the quickstart's loss is {config.loss.type}: this figure is about nft")
    alone, stacked, apart = compare(config)
    return Measurement(
        value=alone / stacked,
        unit="times as fast",
        details={
            "micro-batch (samples_per_forward), trajectories": str(config.optimizer.samples_per_forward),
            "loss, timesteps per sample": f"{config.loss.type}, {config.loss.timesteps_per_sample}",
            "one timestep per forward, ms": 1e3 * alone,
            f"{STACKED} timesteps per forward, ms": 1e3 * stacked,
            "gradients apart, norm over norm": apart,
        },
    )
