"""One RL iteration, on one page.

    batch n ──► rollout ──► reward ──► train ────────────► publish n+1 ──► evaluate
                (all nodes)            (reserved)     ▲
                                       explore n+1 ──►│ select seeds of batch n+1
                                       (spot, weights n)

``iterate`` awaits only what ``Phases`` hands out, so the same lines run under asyncio on a real
fleet and in the simulator's virtual time.
"""

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from spotlight_core.types import (
    Batch,
    Decision,
    Evaluation,
    IterationReport,
    PolicyVersion,
    RunState,
    SeedScore,
    TrajectoryGroup,
)

Explored = Mapping[str, tuple[SeedScore, ...]]


class Phases(Protocol):
    """The phases of an iteration.  Each call starts the phase and returns what finishes it."""

    @property
    def explores_beside_training(self) -> bool:
        """Whether exploration runs beside training, with the weights before it; else after it."""
        ...

    def rollout(self, state: RunState) -> Any:
        """Denoise the batch under the published policy; a handle that ``reward`` consumes."""
        ...

    def reward(self, rollout: Any) -> Awaitable[tuple[TrajectoryGroup, ...]]:
        """Score trajectories as they finish."""
        ...

    def upcoming(self, state: RunState) -> Batch:
        """The next batch with plain seeds, as the prompt sampler gives it."""
        ...

    def explore(self, upcoming: Batch, policy: PolicyVersion) -> Awaitable[Explored]:
        """Score candidate seeds of the next batch with these weights."""
        ...

    def train(self, groups: tuple[TrajectoryGroup, ...]) -> Awaitable[Mapping[str, float]]:
        """Update the policy; returns the training metrics."""
        ...

    def select(self, upcoming: Batch, explored: Explored) -> tuple[Batch, Decision]:
        """Choose the seeds to roll out from what exploration saw."""
        ...

    def publish(self, iteration: int) -> Awaitable[PolicyVersion]:
        """Make the updated rollout policy available to every node."""
        ...

    def evaluate(self, iteration: int) -> Awaitable[Evaluation | None]:
        """Score the EMA weights on held-out prompts, when due after this iteration."""
        ...


async def iterate(phases: Phases, state: RunState) -> IterationReport:
    """Run one iteration and return the state of the next."""
    rollout = phases.rollout(state)
    groups = await phases.reward(rollout)

    upcoming = phases.upcoming(state)
    beside = phases.explore(upcoming, state.policy) if phases.explores_beside_training else None
    metrics = await phases.train(groups)
    explored = None if beside is None else await beside

    policy = await phases.publish(state.iteration + 1)
    if explored is None:
        explored = await phases.explore(upcoming, policy)
    batch, decision = phases.select(upcoming, explored)
    evaluation = await phases.evaluate(state.iteration + 1)
    following = RunState(
        iteration=state.iteration + 1,
        policy=policy,
        batch=batch,
        sampler_position=state.sampler_position + len(batch.prompts),
    )
    return IterationReport(
        iteration=state.iteration,
        state=following,
        decision=decision,
        evaluation=evaluation,
        metrics=dict(metrics),
    )
