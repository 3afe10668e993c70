"""How long to wait before a node is rented again: after failures of its own, and while many are taken."""

import math
from collections import deque
from dataclasses import dataclass, field

STORM_SECONDS = 60.0


def storm_size(nodes: int) -> int:
    """How many of the nodes that are there, taken within ``STORM_SECONDS``, make a storm."""
    return max(3, math.ceil(nodes / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackoffRules:
    """``first_seconds`` doubles with every failure in a row, up to ``most_seconds``.

    A life shorter than ``short_life_seconds`` that ended without a notice is a failure; one longer than
    ``long_life_seconds`` forgives all before it.  Taken within ``storm_window_seconds``, so many spot
    nodes are a storm (``Storm``), which new spot nodes wait out for ``storm_seconds``, doubled while
    it goes on.
    """

    first_seconds: float = 1.0
    most_seconds: float = 300.0
    short_life_seconds: float = 60.0
    long_life_seconds: float = 300.0
    storm_window_seconds: float = STORM_SECONDS
    storm_seconds: float = 30.0

    def sped_up(self, speedup: float) -> "BackoffRules":
        """The same rules in a market whose time passes ``speedup`` times as fast."""
        return BackoffRules(
            first_seconds=self.first_seconds / speedup,
            most_seconds=self.most_seconds / speedup,
            short_life_seconds=self.short_life_seconds / speedup,
            long_life_seconds=self.long_life_seconds / speedup,
            storm_window_seconds=self.storm_window_seconds / speedup,
            storm_seconds=self.storm_seconds / speedup,
        )


@dataclass(slots=True)
class Backoff:
    """One node's failures in a row.  ``not_before``: when it may be rented again."""

    rules: BackoffRules
    failures: int = 0
    not_before: float = 0.0

    def failed(self, at: float) -> None:
        """A boot failed, or a life ended at once."""
        # The exponent is held, since 2 ** failures of a node that never comes would overflow a float.
        wait = self.rules.first_seconds * 2.0 ** min(self.failures, 60)
        self.not_before = at + min(wait, self.rules.most_seconds)
        self.failures += 1

    def ended(self, at: float, life_seconds: float, faulty: bool) -> None:
        """A life is over; ``faulty`` when it ended without a notice."""
        if life_seconds > self.rules.long_life_seconds:
            self.failures = 0
        elif faulty and life_seconds < self.rules.short_life_seconds:
            self.failed(at)


@dataclass(slots=True)
class Storm:
    """Spot nodes taken one after another: the market is out of machines, and new ones would go as fast.

    ``enough``: how many within the window are a storm.  ``until``: when new spot nodes may be rented.
    """

    rules: BackoffRules
    enough: int
    until: float = 0.0
    _wait: float = 0.0
    _taken: deque[float] = field(default_factory=deque)

    def taken(self, at: float) -> None:
        """A spot node was taken, or told that it will be."""
        window = self.rules.storm_window_seconds
        self._taken.append(at)
        while at - self._taken[0] > window:
            self._taken.popleft()
        if len(self._taken) < self.enough:
            return
        goes_on = self._wait > 0 and at <= self.until + window
        self._wait = min(2 * self._wait, self.rules.most_seconds) if goes_on else self.rules.storm_seconds
        self.until = max(self.until, at + self._wait)
        self._taken.clear()  # the same losses do not double the wait twice
