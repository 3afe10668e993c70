"""Seconds of an RL iteration by phase, and what the machinery adds to the work itself.

The value is the median iteration of a real run (Prefect, Ray, MLflow, preemptions off) over the same
work done in one process, one thing after the other, with nothing between: below 1 means that what
runs in parallel outweighs everything the machinery costs.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

import numpy as np
import torch

from spotlight_core.arrays import Arrays
from spotlight_core.batches import BatchPlanner, explored_scores
from spotlight_core.config import RunConfig
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.policy import load_policy_weights
from spotlight_core.learning.trainer import PolicyTrainer
from spotlight_core.learning.updates import TrainingGroup
from spotlight_core.recipes import load_recipe
from spotlight_core.rewards.base import Reward, build_reward
from spotlight_core.types import GenerationRequest, PolicyVersion, RunState
from tests.benchmarks import Measurement

ITERATIONS, SKIPPED = 6, 1  # the first iteration has no explored batch and cold caches
OVERRIDES = (
    f"iterations={ITERATIONS}",
    "evaluation.every=100",
    "evaluation.images=16",
    "evaluation.final_images=16",
    "exploration.audit_every=0",
)


def _live(folder: Path) -> tuple[float, Mapping[str, float]]:
    """Median seconds of an iteration of a real run, in all and by phase."""
    overrides = [part for override in OVERRIDES for part in ("--override", override)]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "flows.cli",
            "train",
            "quickstart",
            "--trace",
            "none",
            "--runs",
            str(folder),
            *overrides,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = (folder / "quickstart/iterations.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines][1 + SKIPPED : -1]  # the last one evaluates
    phases = sorted(name for name in metrics[0] if name.startswith("seconds/"))
    middle = {name: median(m[name] for m in metrics if name in m) for name in phases}
    return middle.pop("seconds/iteration"), middle


class _OneProcess:
    """The same iteration without any machinery."""

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(config.services.torch_threads)
        prompts = read_prompts(config.data.prompts, "train")
        self.planner = BatchPlanner(
            config=config, sampler=GroupSampler(prompts=prompts, rng_seed=config.rng_seed)
        )
        self.engine = DenoiseEngine(build_model(config.model, "rollout"), config.sampler, config.rng_seed)
        self.trainer = PolicyTrainer(build_model(config.model, "training"), config)
        self.reward: Reward = build_reward(config.reward)
        self.policy = PolicyVersion(label="old", number=0, digest="")
        self.state = RunState(
            iteration=0, policy=self.policy, batch=self.planner.plain(0, 0), sampler_position=0
        )

    def _scored(
        self, requests: Iterable[GenerationRequest]
    ) -> tuple[dict[str, Arrays], dict[str, list[float]]]:
        arrays, scores = {}, {}
        for request in requests:
            outcome = self.engine.generate(request)
            assert isinstance(outcome, Generated)
            arrays[request.id] = outcome.arrays
            scores[request.id] = self.reward.score(outcome.arrays["images"], request.row_prompts)
        return arrays, scores

    def iterate(self) -> float:
        began = time.perf_counter()
        state = self.state
        rollouts = self.planner.rollout(state.batch, self.policy)
        arrays, scores = self._scored(rollouts)
        groups = [
            TrainingGroup(prompt=r.prompt.text, rewards=np.asarray(scores[r.id]), arrays=arrays[r.id])
            for r in rollouts
        ]
        self.trainer.train(groups, state.iteration)
        upcoming = self.planner.upcoming(state)
        explorations = self.planner.explore(upcoming, self.policy)
        _, seen = self._scored(explorations)
        batch, _ = self.planner.select(upcoming, explored_scores(explorations, seen))
        load_policy_weights(self.engine.model.transformer, self.trainer.rollout_weights())
        position = state.sampler_position + len(state.batch.prompts)
        self.state = RunState(
            iteration=state.iteration + 1, policy=self.policy, batch=batch, sampler_position=position
        )
        return time.perf_counter() - began


def measure() -> Measurement:
    with tempfile.TemporaryDirectory() as scratch:
        live, phases = _live(Path(scratch))
    alone = _OneProcess(load_recipe("quickstart", OVERRIDES))
    bare = median([alone.iterate() for _ in range(ITERATIONS - 1)][SKIPPED:])
    return Measurement(
        value=live / bare,
        unit="of the same work in one process",
        details={"seconds/iteration": live, **phases, "one process, seconds/iteration": bare},
    )
