"""Replayed preemptions, keyed to a run's progress: the same schedule on any machine.

Each node's actor holds the points of its node and is asked at every boundary between two denoise
steps.  A ``kill`` ends the node there without a word; a ``notice`` is passed on, and the node waits
at that boundary for the Yield it causes, since on a fast machine it would be past the end of the
request before the coordinator has answered.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from spotlight_core.market.progress import ProgressPoint
from spotlight_core.types import GenerationRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What happens to the node now.  ``seconds_left`` is the notice's, 0 for a kill."""

    event: Literal["notice", "kill"]
    seconds_left: float


class ReplayWatcher:
    """Which point of a node's trace strikes at this boundary; each strikes once."""

    def __init__(self, points: Iterable[ProgressPoint], grace_seconds: float) -> None:
        self._points: dict[tuple[int, str, int | None, int | None], ProgressPoint] = {
            (point.iteration, point.phase, point.nth_request, point.denoise_step): point
            for point in points
            if point.event != "return"
        }
        self._grace_seconds = grace_seconds
        self._requests: Counter[tuple[int, str]] = Counter()
        self._current: tuple[int, str] | None = None

    def begin(self, request: GenerationRequest) -> None:
        """A request starts on this node: it is the next of its iteration and phase.

        The iteration is the id's first part.  Only rollouts and exploration count; an id of another
        form belongs to no iteration, so nothing strikes it.
        """
        prefix = request.id.partition("/")[0]
        if request.kind in ("rollout", "explore") and prefix.isdecimal():
            self._current = (int(prefix), request.kind)
            self._requests[self._current] += 1
        else:
            self._current = None

    def at(self, denoise_step: int) -> Strike | None:
        """What strikes before ``denoise_step`` of the present request."""
        if self._current is None:
            return None
        iteration, phase = self._current
        point = self._points.pop((iteration, phase, self._requests[self._current], denoise_step), None)
        if point is None:
            return None
        if point.event == "kill":
            return Strike(event="kill", seconds_left=0.0)
        seconds_left = self._grace_seconds if point.seconds_left is None else point.seconds_left
        return Strike(event="notice", seconds_left=seconds_left)


def points_of(
    points: Iterable[ProgressPoint], node: str, since: tuple[int, str] | None
) -> list[ProgressPoint]:
    """The points that a new incarnation of ``node`` still has before it.

    ``since`` is the iteration and phase whose begin brought it back, None for a run's first nodes:
    points before it belong to the node's former lives.
    """
    first = (-1, 0) if since is None else (since[0], int(since[1] == "explore"))
    return [point for point in points if point.node == node and point.order[:2] >= first]
