"""A progress-keyed trace as a market: which nodes it holds back now, and which ones a phase brings back.

    market = ProgressMarket(trace.points)
    market.points_of("spot-0", None)        # for the node's first life
    market.struck("spot-0")                 # a notice or kill of the trace has just happened
    market.away("spot-0")                   # True: its Lost is the trace's doing, so no new offer
    market.returns("rollout", 4)            # ["spot-0"]: now offered again
    market.points_of("spot-0", market.since("rollout", 4))

A node that goes otherwise (its process died, it fell silent, it was let go) is not away: whoever runs
the fleet offers it again at once.
"""

from collections.abc import Iterable
from typing import Literal

from spotlight_core.events import Phase
from spotlight_core.market.progress import ProgressPoint
from spotlight_core.market.replay import points_of

Since = tuple[int, Literal["rollout", "explore"]]


class ProgressMarket:
    """Keeps which nodes a trace has taken away.  Nodes that it does not name are always there."""

    def __init__(self, points: Iterable[ProgressPoint]) -> None:
        self._points = tuple(sorted(points, key=lambda point: point.order))
        self._away: dict[str, None] = {}

    def since(self, phase: Phase, iteration: int) -> Since | None:
        """The place of the trace at which ``PhaseChanged(phase, iteration)`` is, None where it has none.

        Batch n + 1 is explored while iteration n trains.
        """
        if phase == "rollout":
            return iteration, "rollout"
        if phase == "train":
            return iteration + 1, "explore"
        return None

    def returns(self, phase: Phase, iteration: int) -> list[str]:
        """The nodes that come back as this phase begins, in the trace's order; they are away no more.

        A node that the run never lost is among them too: its strike did not happen, since it had no
        such request.  To be offered are those that are not present.
        """
        since = self.since(phase, iteration)
        back = [
            point.node
            for point in self._points
            if point.event == "return" and (point.iteration, point.phase) == since
        ]
        for node in back:
            self._away.pop(node, None)
        return back

    def struck(self, node: str) -> None:
        """A notice or kill of the trace has happened to the node: it is away until the trace returns it."""
        self._away[node] = None

    def away(self, node: str) -> bool:
        """Whether the trace has taken the node, so that the market has no machine for it now."""
        return node in self._away

    def points_of(self, node: str, since: Since | None) -> list[ProgressPoint]:
        """The points that a new life of ``node`` still has before it; ``since`` None for a run's first."""
        return points_of(self._points, node, since)
