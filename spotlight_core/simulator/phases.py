"""The phases of an iteration in virtual time: same requests, same decisions, no tensors.

Rewards come from outside: recorded ones make a simulated run repeat a live run's decisions,
constant ones are enough to ask what a run will cost.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from spotlight_core.batches import BatchPlanner, explored_scores, trajectory_groups
from spotlight_core.costs import CostModel
from spotlight_core.drive import Decider, Journal, drive
from spotlight_core.errors import FleetError
from spotlight_core.exploration.planner import Supply
from spotlight_core.iteration import Explored, iterate
from spotlight_core.simulator.executor import SimExecutor
from spotlight_core.simulator.running import Submission
from spotlight_core.simulator.virtual_time import Occasion, Process
from spotlight_core.types import (
    Batch,
    Decision,
    Evaluation,
    GenerationRequest,
    IterationReport,
    PolicyVersion,
    RunState,
    TrajectoryGroup,
)

Rewards = Callable[[GenerationRequest], Sequence[float]]


class SimPhases:
    """``Phases`` over a ``SimExecutor``.  One scorer works through results in order of arrival."""

    def __init__(
        self, planner: BatchPlanner, executor: SimExecutor, costs: CostModel, rewards: Rewards
    ) -> None:
        self._planner = planner
        self._executor = executor
        self._costs = costs
        self._rewards = rewards
        self._scorer_free_at = 0.0
        self._iteration = 0

    def rollout(self, state: RunState) -> tuple[Batch, Submission]:
        self._iteration = state.iteration
        self._executor.change_phase("rollout", state.iteration)
        return state.batch, self._executor.submit(self._planner.rollout(state.batch, state.policy))

    def reward(self, rollout: tuple[Batch, Submission]) -> Process[tuple[TrajectoryGroup, ...]]:
        async def run() -> tuple[TrajectoryGroup, ...]:
            batch, submission = rollout
            scores = await self._scored(submission)
            groups = trajectory_groups(batch, submission.requests, scores)
            self._planner.explorer.rolled_out(batch, groups)
            return groups

        return Process(run())

    @property
    def explores_beside_training(self) -> bool:
        return self._planner.explores_beside_training

    def upcoming(self, state: RunState) -> Batch:
        return self._planner.upcoming(state)

    def explore(self, upcoming: Batch, policy: PolicyVersion) -> Process[Explored]:
        if not self.explores_beside_training:
            self._executor.change_phase("remainder", self._iteration)
        submission = self._executor.submit(self._planner.explore(upcoming, policy, self._supply()))

        async def run() -> Explored:
            return explored_scores(submission.requests, await self._scored(submission))

        return Process(run())

    def train(self, groups: tuple[TrajectoryGroup, ...]) -> Process[Mapping[str, float]]:
        async def run() -> Mapping[str, float]:
            self._executor.change_phase("train", self._iteration)
            await self._sleep(self._costs.train_seconds)
            self._planner.explorer.trained(self._costs.train_seconds)
            self._executor.change_phase("remainder", self._iteration)
            return {}

        return Process(run())

    def select(self, upcoming: Batch, explored: Explored) -> tuple[Batch, Decision]:
        return self._planner.select(upcoming, explored)

    def publish(self, iteration: int) -> Process[PolicyVersion]:
        async def run() -> PolicyVersion:
            self._executor.change_phase("publish", iteration)
            return PolicyVersion(label="old", number=iteration, digest=f"simulated-{iteration}")

        return Process(run())

    def evaluate(self, iteration: int) -> Process[Evaluation | None]:
        async def run() -> None:
            return None

        return Process(run())

    async def _scored(self, submission: Submission) -> dict[str, Sequence[float]]:
        pending = [Process(self._score(request, submission)) for request in submission.requests]
        results = [await scored for scored in pending]
        return {request.id: scores for request, scores in zip(submission.requests, results, strict=True)}

    async def _score(self, request: GenerationRequest, submission: Submission) -> Sequence[float]:
        if await submission.occasions[request.id] is None:
            raise FleetError(f"request {request.id} was given up", "raise fleet.max_attempts")
        seconds = self._costs.score_seconds_per_image * len(request.seeds)
        now = self._executor.calendar.now
        self._scorer_free_at = max(self._scorer_free_at, now) + seconds
        await self._sleep(self._scorer_free_at - now)
        return self._rewards(request)

    def _supply(self) -> Supply:
        """The spot GPUs that are there now, and what the cost model says of a request's rows."""
        config, costs = self._planner.config, self._costs
        rows = config.data.seeds_per_prompt
        return Supply(
            spot_gpus=self._executor.spot_gpus,
            seconds_per_step=costs.denoise_step_seconds(rows) / rows,
            seconds_per_image=costs.score_seconds_per_image,
        )

    def _sleep(self, seconds: float) -> Occasion[None]:
        over: Occasion[None] = Occasion()
        self._executor.call_at(self._executor.calendar.now + seconds, lambda: over.succeed(None))
        return over


async def simulate_iterations(
    phases: SimPhases, state: RunState, iterations: int, on_report: Callable[[IterationReport], None]
) -> RunState:
    """The outer loop of a run, in virtual time."""
    for _ in range(iterations):
        report = await iterate(phases, state)
        on_report(report)
        state = report.state
    return state


def run_in_virtual_time(
    coroutine: Coroutine[Any, None, Any], decider: Decider, executor: SimExecutor, journal: Journal
) -> Any:
    """Drive the executor until the coroutine has returned; its value.

    Raises:
        FleetError: nothing is left to happen and the coroutine still waits (no node can ever serve it).
    """
    process: Process[Any] = Process(coroutine)
    if not process.done:
        drive(decider, executor, journal, until=lambda: process.done)
    if not process.done:
        raise FleetError("the simulated run waits for ever", "give it a node that may run its requests")
    return process.value
