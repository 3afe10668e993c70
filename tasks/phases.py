"""The live phases of an iteration: each one a Prefect task over the coordinator, scorer, trainer and fleet.

    rollout ─► results ─► scorer ─► groups ─► trainer ─► weight store ─► nodes
                                       explore ─► results ─► scorer ─► seeds of the next batch

Nothing here decides: prompts, requests, seeds come from ``BatchPlanner``, placement from the
coordinator's scheduler.  What the phases measured of themselves is left in ``measured``.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from spotlight_core.arrays import Arrays
from spotlight_core.batches import BatchPlanner, explored_scores, trajectory_groups
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Phase
from spotlight_core.executor.inbox import Clock
from spotlight_core.exploration.planner import Supply
from spotlight_core.types import (
    Batch,
    Decision,
    Evaluation,
    GenerationRequest,
    PolicyVersion,
    PromptRow,
    RunState,
    SeedScore,
    TrajectoryGroup,
    VersionLabel,
)
from tasks.gallery import Gallery
from tasks.generation import Generation, Requests
from tasks.metrics import diversity_metrics, exploration_metrics, part_metrics

if TYPE_CHECKING:
    from spotlight_core.learning.ranks import Trainer
    from spotlight_core.rewards.scorer import ScorerPool
    from spotlight_core.weights.store import WeightStore

LOG = logging.getLogger(__name__)
T = TypeVar("T")
TRAINED = ("x0", "x_TBSC", "logp_TB", "mean_TBSC")


# A phase is not safe to run twice (its requests are queued, the optimizer has moved), so no retries:
# the coordinator retries requests, the scorer scores, and a run resumes from its last checkpoint.
@task(retries=0, persist_result=False, cache_policy=NO_CACHE)
async def _phase(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


async def as_task(name: str, run_name: str, work: Callable[[], Awaitable[T]]) -> T:
    """Run ``work`` as the Prefect task ``name`` under a readable run name."""
    return await _phase.with_options(name=name, task_run_name=run_name)(work)


class LivePhases:
    """``spotlight_core.iteration.Phases`` on a real fleet."""

    def __init__(
        self,
        *,
        planner: BatchPlanner,
        coordinator: Requests,
        scorer: "ScorerPool",
        trainer: "Trainer",
        store: "WeightStore",
        held_out: Sequence[PromptRow],
        clock: Clock,
        supply: Callable[[], Supply | None] = lambda: None,
    ) -> None:
        """``supply``: what exploration may count on, as far as it is known."""
        self._planner = planner
        self._supply = supply
        self._config = planner.config
        self._coordinator = coordinator
        self._scorer = scorer
        self._trainer = trainer
        self._store = store
        self._held_out = held_out
        self._clock = clock
        self._iteration = 0
        self._batch: Batch | None = None
        self._arrays: dict[str, Arrays] = {}
        self._exploration: Generation | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self.measured: dict[str, float] = {}
        self.windows: dict[str, tuple[float, float]] = {}
        self.scores: dict[str, list[float]] = {}
        self.gallery: Gallery | None = None
        self.explored_by: PolicyVersion | None = None

    # -- rollout and reward ---------------------------------------------------------------------------

    def rollout(self, state: RunState) -> "Generation":
        """Queue the batch and begin to collect it; ``reward`` waits for the scores."""
        self._iteration, self._batch = state.iteration, state.batch
        self.measured, self.windows, self.scores = {}, {}, {}
        self._enter("rollout", state.iteration)
        requests = self._planner.rollout(state.batch, state.policy)
        generation = self._generate(requests, keep=(*TRAINED, "images"))
        batch, data = state.batch, self._config.data
        name = f"rollout {len(batch.prompts)}×{data.seeds_per_prompt}"
        generation.collecting = self._spawn(
            as_task("rollout", name, self._timed("rollout", generation.collect))
        )
        return generation

    async def reward(self, rollout: "Generation") -> tuple[TrajectoryGroup, ...]:
        """The scored groups in the batch's order."""
        images = sum(len(request.seeds) for request in rollout.requests)

        async def work() -> tuple[TrajectoryGroup, ...]:
            assert self._batch is not None
            assert rollout.collecting is not None
            await rollout.collecting
            scores = await rollout.scores()
            self.scores |= scores
            groups = trajectory_groups(self._batch, rollout.requests, scores, rollout.parts())
            if self._scorer.seconds_per_image is not None:
                self.measured["seconds/score_per_image"] = self._scorer.seconds_per_image
            self._learn(rollout.requests, groups, scores)
            self._arrays = {group.request_id: rollout.arrays[group.request_id] for group in groups}
            images = {name: arrays["images"] for name, arrays in self._arrays.items()}
            self.measured |= diversity_metrics(groups, images)
            self.measured |= part_metrics(groups)
            self.gallery = Gallery.of(
                np.concatenate([self._arrays[group.request_id]["images"] for group in groups]),
                [group.prompt.text for group in groups for _ in group.seeds],
                [reward for group in groups for reward in group.rewards],
            )
            return groups

        return await as_task("reward", f"reward {images} images", self._timed("reward", work))

    def _learn(
        self,
        requests: Sequence[GenerationRequest],
        groups: Sequence[TrajectoryGroup],
        scores: Mapping[str, Sequence[float]],
    ) -> None:
        """What this batch's seeds say of the exploration that chose them."""
        assert self._batch is not None
        found = exploration_metrics(self._batch, requests, groups, scores)
        self.measured |= found
        explorer = self._planner.explorer
        why_not = explorer.rolled_out(self._batch, groups)
        if why_not:
            LOG.info("nothing is learnt from iteration %d's exploration: %s", self._iteration, why_not)
        if "explore/rank_correlation" in found:
            explorer.audited(self._batch.iteration, found["explore/rank_correlation"])

    # -- exploration, beside training -----------------------------------------------------------------

    @property
    def explores_beside_training(self) -> bool:
        return self._planner.explores_beside_training

    def upcoming(self, state: RunState) -> Batch:
        return self._planner.upcoming(state)

    def explore(
        self, upcoming: Batch, policy: PolicyVersion
    ) -> Awaitable[Mapping[str, tuple[SeedScore, ...]]]:
        """Started at once: the returned task may run while ``train`` does.  Only scores are kept."""
        requests = self._planner.explore(upcoming, policy, self._supply())
        self.measured |= self._planner.explorer.metrics(upcoming.iteration)
        if not requests:
            nothing: asyncio.Future[Mapping[str, tuple[SeedScore, ...]]] = asyncio.Future()
            nothing.set_result({})
            return nothing
        self.explored_by = policy
        live = self._config.decisions == "live"
        # How long training takes is not known yet: it may have longer than this, and never less.
        deadline_seconds = self._config.exploration_deadline_seconds if live else None
        if not self.explores_beside_training:
            self._enter("remainder", self._iteration)  # all nodes explore, and nothing else goes on
        generation = self._exploration = self._generate(requests, deadline_seconds=deadline_seconds)

        async def work() -> Mapping[str, tuple[SeedScore, ...]]:
            try:
                await generation.collect(allow_cancelled=live)
                scores = await generation.scores()
            except SpotlightError as error:
                # Exploration is worth a better batch, and no run.
                LOG.warning("exploration failed, and the next batch has plain seeds: %s", error)
                self.measured["explore/failed"] = 1.0
                self._coordinator.cancel(generation.unfinished, "exploration failed")
                return {}
            self.scores |= scores
            return explored_scores(generation.requests, scores)

        arm = self._planner.arm(upcoming.iteration)
        assert arm is not None
        prompts = len({request.prompt.occurrence for request in requests})
        name = f"explore {prompts}×{arm.seeds_per_prompt} @ {arm.effective_steps} steps"
        return self._spawn(as_task("explore", name, self._timed("explore", work)))

    async def train(self, groups: tuple[TrajectoryGroup, ...]) -> Mapping[str, float]:
        """One iteration's updates, in a thread of their own; exploration has the spot nodes meanwhile."""
        # Before Prefect makes the task run: exploration is queued already and waits for this word.
        self._enter("train", self._iteration)
        name = f"train {len(groups)}×{self._config.data.seeds_per_prompt}"
        try:
            metrics = await as_task("train", name, self._timed("train", lambda: self._updates(groups)))
            self._planner.explorer.trained(self.measured["seconds/train"])
            return metrics
        finally:
            self._arrays = {}
            self._enter("remainder", self._iteration)
            if self._config.decisions == "live":
                loop = asyncio.get_running_loop()
                seconds = self._config.exploration_deadline_seconds
                loop.call_later(seconds, self._end_exploration, self._exploration)

    async def _updates(self, groups: tuple[TrajectoryGroup, ...]) -> Mapping[str, float]:
        from spotlight_core.learning.updates import TrainingGroup

        training = [
            TrainingGroup(
                prompt=group.prompt.text,
                rewards=np.asarray(group.rewards),
                parts={name: np.asarray(scores) for name, scores in group.parts.items()},
                sde_steps=group.sde_steps,
                arrays={k: v for k, v in self._arrays[group.request_id].items() if k in TRAINED},
            )
            for group in groups
        ]
        if self._config.elastic.sleep:
            await asyncio.to_thread(self._coordinator.wait_alone, self._iteration)
        return await asyncio.to_thread(self._trainer.train, training, self._iteration)

    def _end_exploration(self, generation: Generation | None) -> None:
        if generation is not None and generation.unfinished:
            self._coordinator.cancel(generation.unfinished, "exploration passed its deadline")

    def select(
        self, upcoming: Batch, explored: Mapping[str, tuple[SeedScore, ...]]
    ) -> tuple[Batch, Decision]:
        self._exploration = None
        return self._planner.select(upcoming, explored)

    # -- publish and evaluate -------------------------------------------------------------------------

    async def publish(self, iteration: int) -> PolicyVersion:
        """The updated rollout policy as version ``iteration``; nodes pull it with their next request."""
        self._enter("publish", self._iteration)
        label = self._trainer.rollout_label
        work = self._timed("publish", lambda: self.publish_now(iteration))
        return await as_task("publish", f"publish {label}-{iteration}", work)

    async def publish_now(self, number: int) -> PolicyVersion:
        """Write the rollout policy as version ``number``."""
        return await self._written(self._trainer.rollout_label, number, self._trainer.rollout_weights)

    async def _written(
        self, label: VersionLabel, number: int, weights: Callable[[], Mapping[str, Any]]
    ) -> PolicyVersion:
        return await asyncio.to_thread(lambda: self._store.publish(label, number, weights()))

    async def evaluate(self, iteration: int) -> Evaluation | None:
        """Every ``evaluation.every`` updates, and after the last on ``final_images``."""
        evaluation, last = self._config.evaluation, iteration == self._config.iterations
        if not last and iteration % evaluation.every:
            return None
        return await self.evaluate_now(
            "ema", iteration, evaluation.final_images if last else evaluation.images
        )

    async def evaluate_now(self, label: VersionLabel, number: int, images: int) -> Evaluation:
        """Score the EMA weights, published as ``label`` and ``number``, on the first held-out prompts."""

        async def work() -> Evaluation:
            policy = await self._written(label, number, self._trainer.ema_weights)
            requests = self._planner.evaluate(self._held_out[:images], policy, number)
            generation = self._generate(requests, keep=("images",), held_out=True)
            await generation.collect()
            return await self._evaluation(policy, generation)

        self._enter("evaluate", max(self._iteration, 0))
        return await as_task("evaluate", f"evaluate {images} images", self._timed("evaluate", work))

    async def _evaluation(self, policy: PolicyVersion, generation: Generation) -> Evaluation:
        from spotlight_core.rewards.base import grey_share

        pixels = np.concatenate([generation.arrays[request.id]["images"] for request in generation.requests])
        scores = [score for part in (await generation.scores()).values() for score in part]
        held_out = [score for part in (await generation.scores("held_out")).values() for score in part]
        prompts = [prompt.text for request in generation.requests for prompt in request.row_prompts]
        self.gallery = Gallery.of(pixels, prompts, scores)
        return Evaluation(
            policy=policy,
            images=len(scores),
            score=float(np.mean(scores)),
            held_out=float(np.mean(held_out)),
            grey_share=grey_share(pixels),
        )

    # -- shared ---------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel what still runs, after a failure or an interrupt."""
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        running = asyncio.get_running_loop().create_task(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return running

    def _timed(self, name: str, work: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        began = self._clock.now()

        async def timed() -> T:
            try:
                return await work()
            finally:
                self.windows[name] = (began, self._clock.now())
                self.measured[f"seconds/{name}"] = self._clock.now() - began

        return timed

    def _enter(self, phase: Phase, iteration: int) -> None:
        self._coordinator.change_phase(phase, iteration)

    def _generate(
        self,
        requests: Sequence[GenerationRequest],
        keep: Sequence[str] = (),
        held_out: bool = False,
        deadline_seconds: float | None = None,
    ) -> Generation:
        scorers = {"score": self._scorer.submit}
        if held_out:
            scorers["held_out"] = self._scorer.submit_held_out
        submission = self._coordinator.submit(requests, deadline_seconds)
        return Generation(submission, self._coordinator, scorers, keep)
