"""What the live phases tell the coordinator; what they do with a fleet is shown by whole runs."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spotlight_core.config import RunConfig
from spotlight_core.executor.inbox import Clock
from spotlight_core.executor.submission import Submission
from spotlight_core.exploration.planner import NoExploration, Supply
from spotlight_core.types import GenerationRequest, PolicyVersion
from tasks.phases import LivePhases
from tests.core.executor.coordinator_rig import request

POLICY = PolicyVersion(label="old", number=0, digest="d")


class Coordinator:
    """Keeps the deadline of each submission."""

    def __init__(self) -> None:
        self.deadlines: list[float | None] = []

    def submit(
        self, requests: Sequence[GenerationRequest], deadline_seconds: float | None = None
    ) -> Submission:
        self.deadlines.append(deadline_seconds)
        return Submission(requests, asyncio.get_running_loop())


class Planner:
    """Explores two requests."""

    explores_beside_training = True

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.explorer = NoExploration()

    def explore(
        self, upcoming: object, policy: PolicyVersion, supply: Supply | None
    ) -> list[GenerationRequest]:
        return [request("1/a", kind="explore"), request("1/b", kind="explore")]

    def arm(self, iteration: int) -> SimpleNamespace:
        return SimpleNamespace(seeds_per_prompt=8, effective_steps=4)


@pytest.mark.parametrize(("decisions", "deadline"), [("live", 7.5), ("planned", None)])
def test_exploration_has_a_deadline_where_time_decides(decisions: str, deadline: float | None) -> None:
    tree = {"name": "mini", "iterations": 3, "data": {"prompts": "prompts"}, "decisions": decisions}
    config = RunConfig.model_validate(tree | {"exploration_deadline_seconds": 7.5})
    coordinator = Coordinator()
    parts: dict[str, Any] = {"planner": Planner(config), "coordinator": coordinator, "clock": Clock()}
    scorer = SimpleNamespace(submit=None)
    phases = LivePhases(
        **parts, scorer=cast(Any, scorer), trainer=cast(Any, None), store=cast(Any, None), held_out=()
    )

    async def explore() -> None:
        phases.explore(cast(Any, SimpleNamespace(iteration=1)), POLICY)
        await phases.close()

    asyncio.run(explore())
    assert coordinator.deadlines == [deadline]
