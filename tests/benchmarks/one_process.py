"""A run's iterations in one process, one thing after the other, without any machinery."""

import time
from collections.abc import Iterable, Sequence

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
from spotlight_core.rewards.base import Reward, build_reward
from spotlight_core.types import Batch, GenerationRequest, PolicyVersion, RunState

POLICY = PolicyVersion(label="old", number=0, digest="")


class OneProcess:
    """The same iteration as a real run's.  ``serial``: exploration with the new weights, after training."""

    def __init__(self, config: RunConfig, *, serial: bool = False) -> None:
        torch.set_num_threads(config.services.torch_threads)
        prompts = read_prompts(config.data.prompts, "train")
        self.config, self.serial = config, serial
        self.planner = BatchPlanner(
            config=config, sampler=GroupSampler(prompts=prompts, rng_seed=config.rng_seed)
        )
        self.engine = DenoiseEngine(build_model(config.model, "rollout"), config.sampler, config.rng_seed)
        self.trainer = PolicyTrainer(build_model(config.model, "training"), config)
        self.reward: Reward = build_reward(config.reward)
        self.held_out = read_prompts(config.data.prompts, "test")
        self.state = RunState(iteration=0, policy=POLICY, batch=self.planner.plain(0, 0), sampler_position=0)
        self.group_std = 0.0

    def scored(
        self, requests: Iterable[GenerationRequest]
    ) -> tuple[dict[str, Arrays], dict[str, list[float]]]:
        """Arrays and rewards of requests, by request."""
        arrays, scores = {}, {}
        for request in requests:
            outcome = self.engine.generate(request)
            assert isinstance(outcome, Generated)
            arrays[request.id] = outcome.arrays
            scores[request.id] = self.reward.score(outcome.arrays["images"], request.row_prompts)
        return arrays, scores

    def iterate(self) -> float:
        """One iteration; its seconds."""
        began = time.perf_counter()
        state = self.state
        rollouts = [r for r in self.planner.rollout(state.batch, POLICY) if r.kind == "rollout"]
        arrays, scores = self.scored(rollouts)
        self.group_std = float(np.mean([np.std(scores[r.id]) for r in rollouts]))
        groups = [
            TrainingGroup(
                prompt=r.prompt.text,
                rewards=np.asarray(scores[r.id]),
                sde_steps=r.fidelity.sde_steps,
                arrays=arrays[r.id],
            )
            for r in rollouts
        ]
        self.trainer.train(groups, state.iteration)
        upcoming = self.planner.upcoming(state)
        batch = None if self.serial else self._explored(upcoming)
        load_policy_weights(self.engine.model.transformer, self.trainer.rollout_weights())
        position = state.sampler_position + len(state.batch.prompts)
        self.state = RunState(
            iteration=state.iteration + 1,
            policy=POLICY,
            batch=batch or self._explored(upcoming),
            sampler_position=position,
        )
        return time.perf_counter() - began

    def _explored(self, upcoming: Batch) -> Batch:
        explorations = self.planner.explore(upcoming, POLICY)
        _, seen = self.scored(explorations)
        batch, _ = self.planner.select(upcoming, explored_scores(explorations, seen))
        return batch

    def evaluate(self, images: int) -> Sequence[float]:
        """Rewards of the EMA weights on the first held-out prompts."""
        transformer = self.engine.model.transformer
        load_policy_weights(transformer, self.trainer.ema_weights())
        _, scores = self.scored(self.planner.evaluate(self.held_out[:images], POLICY, self.state.iteration))
        load_policy_weights(transformer, self.trainer.rollout_weights())
        return [score for part in scores.values() for score in part]
