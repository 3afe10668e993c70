"""Scoring one policy version on held-out prompts, as a Prefect flow, without a fleet."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from prefect import flow

from flows.targets import Weights
from spotlight_core.batches import BatchPlanner
from spotlight_core.config import RunConfig
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.diffusion.cpu import use_threads
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.policy import load_policy_weights
from spotlight_core.rewards.base import grey_share
from spotlight_core.rewards.scored import Scored
from spotlight_core.rewards.scorer import ScorerPool
from spotlight_core.types import Evaluation, PolicyVersion, PromptRow
from tasks.artifacts import save_grid
from tasks.gallery import Gallery


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The scores, where the first images can be seen, and with several rewards the mean of each."""

    evaluation: Evaluation
    grid: Path
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOrder:
    """What to evaluate on which prompts; the grid is written to ``grid``."""

    config: RunConfig
    policy: PolicyVersion
    weights: Weights
    rows: Sequence[PromptRow]
    grid: Path


async def evaluate_policy(order: EvaluationOrder, advance: Callable[[int], None]) -> Evaluated:
    """Score the policy; a flow run of its own.  ``advance`` hears of every few images that are done."""

    @flow(name="evaluate", flow_run_name="evaluate {run} {version}", persist_result=False)
    async def evaluate(run: str, version: str) -> Evaluated:
        return await asyncio.to_thread(_score, order, advance)

    return await evaluate(order.config.name, order.policy.name)


def _score(order: EvaluationOrder, advance: Callable[[int], None]) -> Evaluated:
    config = order.config
    scorer = ScorerPool(config.reward, config.evaluation.held_out_reward)
    try:
        use_threads(config.services.torch_threads)  # as the run's own actors
        model = build_model(config.model, "rollout")
        load_policy_weights(model.transformer, order.weights)
        engine = DenoiseEngine(model, config.sampler, config.rng_seed)
        planner = BatchPlanner(
            config=config, sampler=GroupSampler(prompts=order.rows, rng_seed=config.rng_seed)
        )
        scorer.check()
        pixels: list[np.ndarray] = []
        trained: list[Future[Scored]] = []
        held_out: list[Future[Scored]] = []
        # The very requests of the run's own evaluations: a batch of another make-up differs in the last bits.
        for request in planner.evaluate(order.rows, order.policy, order.policy.number):
            generated = engine.generate(request)
            assert isinstance(generated, Generated)  # nothing asks it to pause
            drawn = generated.arrays["images"]
            pixels.append(drawn)
            trained.append(scorer.submit(drawn, request.row_prompts))
            held_out.append(scorer.submit_held_out(drawn, request.row_prompts))
            advance(len(drawn))
        images = np.concatenate(pixels)
        return _summed_up(order, images, [f.result() for f in trained], [f.result() for f in held_out])
    finally:
        scorer.close()


def _summed_up(
    order: EvaluationOrder, images: np.ndarray, trained: Sequence[Scored], held_out: Sequence[Scored]
) -> Evaluated:
    scores = [score for scored in trained for score in scored.scores]
    texts = [row.text for row in order.rows]
    order.grid.parent.mkdir(parents=True, exist_ok=True)
    save_grid(Gallery.of(images, texts, scores), order.grid)
    return Evaluated(
        evaluation=Evaluation(
            policy=order.policy,
            images=len(scores),
            score=float(np.mean(scores)),
            held_out=float(np.mean([score for scored in held_out for score in scored.scores])),
            grey_share=grey_share(images),
        ),
        grid=order.grid,
        parts={
            name: float(np.mean([score for scored in trained for score in scored.parts[name]]))
            for name in trained[0].parts
        },
    )
