"""Does a seed's reward under older weights, at fewer steps, predict its reward under the new ones?

The embedded model learns by Flow-GRPO on plain seeds; its weights of each iteration are kept.  Then 12
prompts are rolled out in full on 32 seeds under the last weights, and previewed under those some iterations
before, and at fewer effective steps.  Spearman within each prompt, the mean over prompts whose rewards are
not all equal; the paper has .838 on OCR at a lag of 1.
"""

from collections.abc import Mapping
from statistics import fmean

import torch

from spotlight_core.diffusion.policy import load_policy_weights
from spotlight_core.exploration.audit import spearman
from spotlight_core.exploration.fidelity import reused_steps
from spotlight_core.recipes import load_recipe
from spotlight_core.types import GenerationRequest, PlannedPrompt
from tests.benchmarks import Measurement
from tests.benchmarks.one_process import POLICY, OneProcess

ITERATIONS, SEEDS, PROMPTS, ROWS = 12, 32, 12, 16
LAGS, EFFECTIVE_STEPS = (0, 1, 2, 5, 10), (10, 9, 8, 7, 6, 5)


def rewards(run: OneProcess, prompts: tuple[PlannedPrompt, ...], steps: int) -> list[list[float]]:
    """Of each prompt's seeds, at so many effective steps, under the weights that the engine has."""
    denoise_steps = run.config.sampler.denoise_steps
    found = []
    for planned in prompts:
        fidelity = run.planner.fidelity(ITERATIONS, planned.prompt, reused_steps(denoise_steps, steps))
        requests = [
            GenerationRequest(
                id=f"{planned.prompt.occurrence}/{first}",
                kind="audit",
                prompts=(planned.prompt,),
                seeds=tuple(range(first, first + ROWS)),
                policy=POLICY,
                fidelity=fidelity,
            )
            for first in range(0, SEEDS, ROWS)
        ]
        _, scores = run.scored(requests)
        found.append([score for request in requests for score in scores[request.id]])
    return found


def mean_correlation(previews: list[list[float]], rollouts: list[list[float]]) -> float:
    """The mean of what each prompt gives, of those that have an order."""
    each = [spearman(preview, rollout) for preview, rollout in zip(previews, rollouts, strict=True)]
    return fmean(correlation for correlation in each if correlation is not None)


def measure() -> Measurement:
    config = load_recipe("quickstart_grpo", [f"iterations={ITERATIONS + 1}", "exploration.type=none"])
    run = OneProcess(config)
    kept: list[Mapping[str, torch.Tensor]] = []
    for _ in range(ITERATIONS):
        kept.append({name: tensor.clone() for name, tensor in run.trainer.rollout_weights().items()})
        run.iterate()
    kept.append({name: tensor.clone() for name, tensor in run.trainer.rollout_weights().items()})
    prompts = run.planner.plain(ITERATIONS, 0).prompts + run.planner.plain(ITERATIONS, 8).prompts
    transformer, full = run.engine.model.transformer, config.sampler.denoise_steps
    previews = {}
    for lag in LAGS:
        load_policy_weights(transformer, kept[-1 - lag])
        for steps in EFFECTIVE_STEPS if lag == 1 else (full,):
            previews[lag, steps] = rewards(run, prompts[:PROMPTS], steps)
    rollouts = previews[0, full]
    found = {
        key: mean_correlation(preview, rollouts) for key, preview in previews.items() if key != (0, full)
    }
    details: dict[str, float | str] = {
        f"lag {lag}, {steps} of {full} steps": correlation for (lag, steps), correlation in found.items()
    }
    return Measurement(value=found[1, full], unit="Spearman at a lag of 1", details=details)
