"""How much to explore: the arm of the next batch (Spotlight, §4).

training's seconds × spot GPUs = W ─► arms that fit ─► bandit ─► arm of batch n + 1
                                                          ▲
rollout n + 1: σ of all groups over σ of unexplored ones ─┘  (pending until then)
audits: rank correlation of previews and rollouts ─► fewest effective steps, or nothing at all
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

import numpy as np

from spotlight_core.config import BanditConfig, FixedArmConfig, RunConfig
from spotlight_core.errors import BadInputError
from spotlight_core.exploration.arms import Arm, Budget, arm_grid, default_seeds, default_steps
from spotlight_core.exploration.backoff import FidelityBackoff
from spotlight_core.exploration.bandits import Bandit, PaperUcb, PriorUcb, Thompson
from spotlight_core.types import Batch, TrajectoryGroup

TRAININGS = 3  # whose seconds are averaged, each earlier one for half as much
REMEMBERED = 4  # decided arms: feedback comes one batch later
FEW_SEEDS, FEW_STEPS = (1.5, 2.0, 4.0), (0.8, 1.0)  # six arms, since each has to be learnt


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What exploration can count on now: spot GPUs beside training, and GPU-seconds of its work."""

    spot_gpus: float
    seconds_per_step: float
    seconds_per_image: float = 0.0


class ExplorationPlanner(Protocol):
    def decide(self, iteration: int, prompts: int, supply: Supply | None) -> Arm | None:
        """Choose the arm of the batch that ``iteration`` will roll out, once; None for plain seeds.

        ``prompts``: how many are explored.
        """
        ...

    def arm(self, iteration: int) -> Arm | None:
        """What was decided for a batch."""
        ...

    def trained(self, seconds: float) -> None:
        """How long a training took."""
        ...

    def rolled_out(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> str:
        """What the batch's seeds have come to; why nothing is learnt from them, or an empty text."""
        ...

    def audited(self, iteration: int, correlation: float) -> None:
        """The rank correlation of a batch's previews with its rollouts."""
        ...

    def metrics(self, iteration: int) -> dict[str, float]:
        """What was decided for a batch, to be tracked."""
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


class NoExploration:
    """Plain seeds, always."""

    def decide(self, iteration: int, prompts: int, supply: Supply | None) -> Arm | None:
        return None

    def arm(self, iteration: int) -> Arm | None:
        return None

    def trained(self, seconds: float) -> None:
        pass

    def rolled_out(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> str:
        return ""

    def audited(self, iteration: int, correlation: float) -> None:
        pass

    def metrics(self, iteration: int) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise _another_planner(state)


class _Deciding:
    """What planners share that decide: arms by batch, and the back-off."""

    def __init__(self, backoff: FidelityBackoff) -> None:
        self._backoff = backoff
        self._decided: dict[int, Arm | None] = {}

    def arm(self, iteration: int) -> Arm | None:
        return self._decided.get(iteration)

    def audited(self, iteration: int, correlation: float) -> None:
        arm = self.arm(iteration)
        if arm is not None:
            self._backoff.audited(arm.effective_steps, correlation)

    def metrics(self, iteration: int) -> dict[str, float]:
        arm = self.arm(iteration)
        return {
            "explore/arm_seeds": 0.0 if arm is None else float(arm.seeds_per_prompt),
            "explore/arm_steps": 0.0 if arm is None else float(arm.effective_steps),
            "explore/least_steps": float(self._backoff.least_steps),
            "explore/off": float(self._backoff.off),
        }

    def state_dict(self) -> dict[str, Any]:
        decided = [
            [iteration, None if arm is None else [arm.seeds_per_prompt, arm.effective_steps]]
            for iteration, arm in self._decided.items()
        ]
        return {"decided": decided, "backoff": self._backoff.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._decided = {
                int(iteration): None if arm is None else Arm(seeds_per_prompt=arm[0], effective_steps=arm[1])
                for iteration, arm in state["decided"]
            }
            self._backoff.load_state_dict(state["backoff"])
        except (KeyError, TypeError, ValueError) as error:
            raise _another_planner(state) from error

    def _keep(self, iteration: int, arm: Arm | None) -> Arm | None:
        self._decided[iteration] = arm
        for old in sorted(self._decided)[:-REMEMBERED]:
            del self._decided[old]
        return arm


class FixedArm(_Deciding):
    """The same arm every iteration: the decision log then depends on neither time nor fleet."""

    def __init__(self, arm: Arm, backoff: FidelityBackoff) -> None:
        super().__init__(backoff)
        self._arm = arm

    def decide(self, iteration: int, prompts: int, supply: Supply | None) -> Arm | None:
        steps = max(self._arm.effective_steps, self._backoff.least_steps)
        arm = Arm(seeds_per_prompt=self._arm.seeds_per_prompt, effective_steps=steps)
        return self._keep(iteration, None if self._backoff.off else arm)

    def trained(self, seconds: float) -> None:
        pass

    def rolled_out(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> str:
        return ""


class BanditPlanner(_Deciding):
    """A bandit over the arms that fit beside training; see the module's text."""

    def __init__(
        self,
        arms: Sequence[Arm],
        bandit: Bandit,
        backoff: FidelityBackoff,
        fixed: tuple[float, Supply] | None = None,
    ) -> None:
        """``fixed``: a training's seconds and a supply that are taken instead of measured ones."""
        super().__init__(backoff)
        self._arms = tuple(arms)
        self._bandit = bandit
        self._fixed = fixed
        self._trainings: deque[float] = deque(maxlen=TRAININGS)
        self._budget: Budget | None = None

    @property
    def train_seconds(self) -> float | None:
        """What a training is expected to take: of the last ones each earlier one counts half as much."""
        if not self._trainings:
            return None
        weights = [0.5**age for age in range(len(self._trainings))][::-1]
        return float(np.average(self._trainings, weights=weights))

    def decide(self, iteration: int, prompts: int, supply: Supply | None) -> Arm | None:
        seconds, supply = self._fixed or (self.train_seconds, supply)
        self._budget = None
        if seconds is None or supply is None or self._backoff.off:
            return self._keep(iteration, None)
        self._budget = Budget(
            gpu_seconds=seconds * supply.spot_gpus,
            seconds_per_step=supply.seconds_per_step,
            seconds_per_image=supply.seconds_per_image,
        )
        allowed = [arm for arm in self._arms if arm.effective_steps >= self._backoff.least_steps]
        eligible = self._budget.eligible(allowed, prompts)
        return self._keep(iteration, self._bandit.choose(eligible) if eligible else None)

    def trained(self, seconds: float) -> None:
        self._trainings.append(seconds)

    def rolled_out(self, batch: Batch, groups: Sequence[TrajectoryGroup]) -> str:
        arm = self.arm(batch.iteration)
        if arm is None:
            return "nothing was explored"
        plain = [group for group in groups if not group.explored]
        explored = [planned for planned in batch.prompts if planned.explored]
        if not explored or any(len(planned.explored) != arm.seeds_per_prompt for planned in explored):
            return "exploration did not come to its end"
        every, alone = _mean_std(groups), _mean_std(plain)
        if not alone:
            return "no prompt was left plain" if not plain else "rewards of plain seeds are all equal"
        self._bandit.observe(arm, every / alone)
        return ""

    def metrics(self, iteration: int) -> dict[str, float]:
        found = super().metrics(iteration)
        if self._budget is not None:
            found["explore/budget_gpu_seconds"] = self._budget.gpu_seconds
        return found

    def state_dict(self) -> dict[str, Any]:
        bandit = {"bandit": self._bandit.state_dict(), "trainings": list(self._trainings)}
        return {**super().state_dict(), **bandit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "bandit" not in state:
            raise _another_planner(state)
        super().load_state_dict(state)
        self._bandit.load_state_dict(state["bandit"])
        self._trainings = deque(map(float, state["trainings"]), maxlen=TRAININGS)


def _mean_std(groups: Sequence[TrajectoryGroup]) -> float:
    return fmean(float(np.std(group.rewards)) for group in groups) if groups else 0.0


def _another_planner(state: Mapping[str, Any]) -> BadInputError:
    return BadInputError(
        f"the checkpoint holds the state {sorted(state)} of another exploration planner",
        "resume with the exploration section the run was started with",
    )


def build_planner(config: RunConfig) -> ExplorationPlanner:
    """The planner of a recipe."""
    exploration, denoise_steps = config.exploration, config.sampler.denoise_steps
    if isinstance(exploration, FixedArmConfig):
        arm = Arm(seeds_per_prompt=exploration.seeds_per_prompt, effective_steps=exploration.effective_steps)
        steps = range(exploration.effective_steps, denoise_steps + 1)
        return FixedArm(arm, FidelityBackoff(steps, exploration.correlation_floor))
    if isinstance(exploration, BanditConfig):
        arms = arms_of(exploration, config.data.seeds_per_prompt, denoise_steps)
        return BanditPlanner(
            arms,
            _bandit(exploration, config.rng_seed),
            FidelityBackoff([arm.effective_steps for arm in arms], exploration.correlation_floor),
            _fixed(exploration),
        )
    return NoExploration()


def arms_of(config: BanditConfig, trained: int, denoise_steps: int) -> tuple[Arm, ...]:
    """The arms of a bandit: the recipe's, else six of them, the paper's UCB 25."""
    paper = config.type == "ucb_paper"
    seeds, steps = config.seeds_per_prompt, config.effective_steps
    if seeds is None:
        seeds = default_seeds(trained) if paper else default_seeds(trained, FEW_SEEDS)
    if steps is None:
        steps = default_steps(denoise_steps) if paper else default_steps(denoise_steps, FEW_STEPS)
    return arm_grid(seeds, steps)


def _bandit(config: BanditConfig, rng_seed: int) -> Bandit:
    if config.type == "thompson":
        return Thompson(config.window, rng_seed)
    return (PaperUcb if config.type == "ucb_paper" else PriorUcb)(config.window, config.bonus)


def _fixed(config: BanditConfig) -> tuple[float, Supply] | None:
    given = config.supply
    if given is None:
        return None
    supply = Supply(
        spot_gpus=given.spot_gpus,
        seconds_per_step=given.seconds_per_step,
        seconds_per_image=given.seconds_per_image,
    )
    return given.train_seconds, supply
