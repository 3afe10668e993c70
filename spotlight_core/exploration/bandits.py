"""Which arm to explore: bandits over arms whose rewards drift while the policy learns.

An observation of an arm is how much larger reward spreads where it chose the seeds:
``r = mean σ of all groups / mean σ of unexplored ones`` (Spotlight, §4), about 1 when nothing is gained.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from spotlight_core.errors import BadInputError
from spotlight_core.exploration.arms import Arm
from spotlight_core.philox import named_generator

NO_GAIN = 1.0
PSEUDO_COUNT = 1.0
NEAR_SEEDS, NEAR_STEPS = 0.7, 0.2  # in log seeds, and in shares of the most effective steps
SPREAD = 0.25  # of one observation about its arm's mean, as Thompson sampling takes it


class Bandit(Protocol):
    """Chooses among arms, and learns from what comes of them."""

    def choose(self, eligible: Sequence[Arm]) -> Arm:
        """One of ``eligible``, which is not empty and whose order breaks ties."""
        ...

    def observe(self, arm: Arm, reward: float) -> None:
        """What an arm has come to."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What was observed, as JSON has it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        ...


class Observations:
    """The last ``window`` rewards of each arm, and how many there were in all."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._last: dict[Arm, deque[float]] = {}
        self.counts: dict[Arm, int] = {}

    def add(self, arm: Arm, reward: float) -> None:
        """Raises ValueError for a reward that is not finite."""
        if not math.isfinite(reward):
            raise ValueError(f"{arm} observed {reward}")
        self._last.setdefault(arm, deque(maxlen=self._window)).append(reward)
        self.counts[arm] = self.counts.get(arm, 0) + 1

    @property
    def total(self) -> int:
        """Observations of all arms."""
        return sum(self.counts.values())

    def count(self, arm: Arm) -> int:
        """Observations of an arm within the window."""
        return len(self._last.get(arm, ()))

    def mean(self, arm: Arm) -> float:
        """Mean of these."""
        last = self._last[arm]
        return math.fsum(last) / len(last)

    def neighbourhood(self, arm: Arm) -> float:
        """What arms near this one have come to, itself aside; ``NO_GAIN`` where nothing was observed.

        The mean of their means, weighted by a Gaussian of their distance in log seeds and in steps.
        """
        most = max((other.effective_steps for other in (*self._last, arm)), default=1)
        weights, sums = 0.0, 0.0
        for other in self._last:
            if other == arm:
                continue
            seeds = math.log(other.seeds_per_prompt / arm.seeds_per_prompt) / NEAR_SEEDS
            steps = (other.effective_steps - arm.effective_steps) / most / NEAR_STEPS
            weight = math.exp(-(seeds**2 + steps**2) / 2)
            weights, sums = weights + weight, sums + weight * self.mean(other)
        # One observation of nothing gained, so that far arms say little.
        return (sums + 0.1 * NO_GAIN) / (weights + 0.1)

    def posterior(self, arm: Arm) -> tuple[float, float]:
        """Mean and weight of an arm whose neighbourhood counts for ``PSEUDO_COUNT`` observations."""
        count = self.count(arm)
        own = count * self.mean(arm) if count else 0.0
        weight = count + PSEUDO_COUNT
        return (own + PSEUDO_COUNT * self.neighbourhood(arm)) / weight, weight

    def state_dict(self) -> dict[str, Any]:
        return {
            "arms": [
                [arm.seeds_per_prompt, arm.effective_steps, self.counts[arm], list(last)]
                for arm, last in self._last.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            arms = [
                (Arm(seeds_per_prompt=int(d), effective_steps=int(s)), int(count), list(map(float, last)))
                for d, s, count, last in state["arms"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise BadInputError(
                f"the checkpoint holds no observations of arms ({error!r})",
                "resume with the exploration section the run was started with",
            ) from error
        self._last = {arm: deque(last, maxlen=self._window) for arm, _, last in arms}
        self.counts = {arm: count for arm, count, _ in arms}


class _Observing:
    """What bandits over ``Observations`` share."""

    def __init__(self, window: int) -> None:
        self.seen = Observations(window)

    def observe(self, arm: Arm, reward: float) -> None:
        self.seen.add(arm, reward)

    def state_dict(self) -> dict[str, Any]:
        return self.seen.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen.load_state_dict(state)


class PaperUcb(_Observing):
    """The paper's sliding-window UCB: ``μ̂ + β sqrt(ln(N + 1) / n)``, unseen arms first."""

    def __init__(self, window: int, bonus: float) -> None:
        super().__init__(window)
        self._bonus = bonus

    def choose(self, eligible: Sequence[Arm]) -> Arm:
        return _first_best(eligible, self.score)

    def score(self, arm: Arm) -> float:
        """Infinite for an arm that was never seen."""
        count = self.seen.count(arm)
        if not count:
            return math.inf
        return self.seen.mean(arm) + self._bonus * math.sqrt(math.log(self.seen.total + 1) / count)


class PriorUcb(PaperUcb):
    """The same, but unseen arms start from what arms near them have come to, so that none has to be swept."""

    def score(self, arm: Arm) -> float:
        mean, weight = self.seen.posterior(arm)
        return mean + self._bonus * math.sqrt(math.log(self.seen.total + 1) / weight)


class Thompson(_Observing):
    """Thompson sampling with Gaussian posteriors about the same means; draws are named, so they replay."""

    def __init__(self, window: int, rng_seed: int) -> None:
        super().__init__(window)
        self._rng_seed = rng_seed
        self._draws = 0

    def choose(self, eligible: Sequence[Arm]) -> Arm:
        self._draws += 1
        return _first_best(eligible, self._drawn)

    def _drawn(self, arm: Arm) -> float:
        mean, weight = self.seen.posterior(arm)
        names = ("thompson", self._rng_seed, self._draws, arm.seeds_per_prompt, arm.effective_steps)
        return mean + SPREAD / math.sqrt(weight) * float(named_generator(*names).standard_normal())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._draws = int(state.get("draws", 0))


def _first_best(eligible: Sequence[Arm], score: Callable[[Arm], float]) -> Arm:
    best, best_score = eligible[0], score(eligible[0])
    for arm in eligible[1:]:
        if (own := score(arm)) > best_score:
            best, best_score = arm, own
    return best
