"""How much to explore: the arm of the next batch.

An arm is ``(seeds per prompt, effective denoise steps)``.  The fixed arm is the plug-in that takes
no decision; a bandit is another class behind the same protocol.
"""

from dataclasses import dataclass
from typing import Protocol

from spotlight_core.config import ExplorationConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Explore ``seeds_per_prompt`` candidates at ``effective_steps`` computed denoise steps."""

    seeds_per_prompt: int
    effective_steps: int


class ExplorationPlanner(Protocol):
    def plan(self, iteration: int) -> Arm | None:
        """The arm for the batch that ``iteration`` will roll out; None for plain seeds."""
        ...


@dataclass(frozen=True, slots=True)
class FixedArm:
    """The same arm every iteration: the decision log then depends on neither time nor fleet."""

    arm: Arm

    def plan(self, iteration: int) -> Arm | None:
        return self.arm


@dataclass(frozen=True, slots=True)
class NoExploration:
    """Plain seeds, always."""

    def plan(self, iteration: int) -> Arm | None:
        return None


def build_planner(config: ExplorationConfig) -> ExplorationPlanner:
    if config.type == "none":
        return NoExploration()
    return FixedArm(Arm(seeds_per_prompt=config.seeds_per_prompt, effective_steps=config.effective_steps))
