"""Scoring one policy version on held-out prompts, as a Prefect flow, without a fleet."""

import asyncio
from collections.abc import Sequence

import numpy as np
from prefect import flow

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import RunConfig
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.errors import BadInputError
from spotlight_core.rewards.base import grey_share
from spotlight_core.rewards.scorer import ScorerPool
from spotlight_core.types import Evaluation, PolicyVersion
from spotlight_core.weights.store import WeightStore
from tasks.run_folder import RunFolder, read_records


def newest_evaluated(folder: RunFolder) -> PolicyVersion:
    """The policy version that the run evaluated last, whose weights are kept.

    Raises:
        BadInputError: the run was not evaluated yet.
    """
    evaluations = [record["evaluation"] for record in read_records(folder.iterations) if record["evaluation"]]
    if not evaluations:
        raise BadInputError(
            f"run {folder.name} has no evaluated weights yet", "continue it with `spotlight train --resume`"
        )
    return PolicyVersion(**evaluations[-1]["policy"])


async def evaluate_policy(
    config: RunConfig, folder: RunFolder, policy: PolicyVersion, images: int
) -> Evaluation:
    """Score ``policy`` on the first ``images`` held-out prompts; a flow run of its own."""

    @flow(name="evaluate", flow_run_name="evaluate {run} {version}", persist_result=False)
    async def evaluate(run: str, version: str) -> Evaluation:
        return await asyncio.to_thread(_score, config, folder, policy, images)

    return await evaluate(config.name, policy.name)


def _score(config: RunConfig, folder: RunFolder, policy: PolicyVersion, images: int) -> Evaluation:
    test = read_prompts(config.data.prompts / "test.txt")
    if images > len(test):
        raise BadInputError(
            f"{images} images exceed the {len(test)} held-out prompts", "lower --images or add prompts"
        )
    model = build_model(config.model)
    model.transformer.load_state_dict(WeightStore(folder.weights).load(policy), strict=True)
    engine = DenoiseEngine(model, config.sampler, config.rng_seed)
    planner = BatchPlanner(config=config, sampler=GroupSampler(prompts=test, rng_seed=config.rng_seed))
    scorer = ScorerPool(config.reward, config.evaluation.held_out_reward)
    try:
        scorer.check()
        pixels, scores, held_out = [], [], []
        for request in planner.evaluate(test[:images], policy, policy.number):
            generated = engine.generate(request)
            assert isinstance(generated, Generated)  # nothing asks it to pause
            drawn = generated.arrays["images"]
            texts = [prompt.text for prompt in request.row_prompts]
            pixels.append(drawn)
            scores.append(scorer.submit(drawn, texts))
            held_out.append(scorer.submit_held_out(drawn, texts))
        return Evaluation(
            policy=policy,
            images=images,
            score=_mean([future.result() for future in scores]),
            held_out=_mean([future.result() for future in held_out]),
            grey_share=grey_share(np.concatenate(pixels)),
        )
    finally:
        scorer.close()


def _mean(parts: Sequence[Sequence[float]]) -> float:
    return float(np.mean([score for part in parts for score in part]))
