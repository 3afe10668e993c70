"""How much to explore: the arm of the next batch.

An arm is ``(seeds per prompt, effective denoise steps)``.  The fixed arm is the plug-in that takes
no decision; a bandit is another class behind the same protocol.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from spotlight_core.config import ExplorationConfig
from spotlight_core.errors import BadInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Explore ``seeds_per_prompt`` candidates at ``effective_steps`` computed denoise steps."""

    seeds_per_prompt: int
    effective_steps: int


class ExplorationPlanner(Protocol):
    def plan(self, iteration: int) -> Arm | None:
        """The arm for the batch that ``iteration`` will roll out; None for plain seeds."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it has learned so far, as JSON has it; empty for a planner that learns nothing."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``.

        Raises:
            BadInputError: the state is another planner's.
        """
        ...


class _Stateless:
    """What planners without memory share."""

    __slots__ = ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise BadInputError(
                f"the checkpoint holds the state {sorted(state)} of another exploration planner",
                "resume with the exploration section the run was started with",
            )


@dataclass(frozen=True, slots=True)
class FixedArm(_Stateless):
    """The same arm every iteration: the decision log then depends on neither time nor fleet."""

    arm: Arm

    def plan(self, iteration: int) -> Arm | None:
        return self.arm


@dataclass(frozen=True, slots=True)
class NoExploration(_Stateless):
    """Plain seeds, always."""

    def plan(self, iteration: int) -> Arm | None:
        return None


def build_planner(config: ExplorationConfig) -> ExplorationPlanner:
    if config.type == "none":
        return NoExploration()
    return FixedArm(Arm(seeds_per_prompt=config.seeds_per_prompt, effective_steps=config.effective_steps))
