"""LayoutPlanner: the SP degrees under which a node finishes most requests for its dollars.

A node costs the same however its GPUs are grouped, so most requests a dollar are most requests a second.
More GPUs on one request are quicker and less efficient: with enough requests waiting small groups win,
with few of them large ones do, since a GPU without a request earns nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from spotlight_core.costs import CostModel
from spotlight_core.elastic.layout import Groups, arranged, changed_groups

MOST_RANKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """Requests of one kind: latent ``tokens`` of a row, ``rows`` and computed denoise ``steps`` of a request.

    ``share``: how many of all requests these are.  ``min_degree``: the fewest GPUs whose memory holds one.
    """

    tokens: int
    rows: int
    steps: int
    share: float = 1.0
    min_degree: int = 1


@dataclass(frozen=True)
class LayoutPlanner:
    """See the module's text; a ``NodeLayout``.

    ``waiting``: requests that there usually are for each GPU of the node, those that run included.
    ``stay_seconds``: how long a layout lasts until a GPU comes or goes.  A new layout has to earn in this
    time what its change costs, so that equal ones are not swapped for ever.
    """

    costs: CostModel
    shapes: tuple[RequestShape, ...]
    waiting: float = float("inf")
    stay_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not self.shapes or sum(shape.share for shape in self.shapes) <= 0:
            raise ValueError("a planner needs the shapes of requests, with shares above 0")

    @cached_property
    def min_degree(self) -> int:
        """The fewest GPUs that can work together: every group takes every request."""
        return max(shape.min_degree for shape in self.shapes)

    def groups(self, ranks: Sequence[int], current: Groups) -> Groups:
        """The best groups of ``ranks``, or the ones that change least where the best gains too little."""
        if len(ranks) > MOST_RANKS:
            raise ValueError(f"{len(ranks)} ranks on one node; layouts are planned for up to {MOST_RANKS}")
        there = set(ranks)
        valid = all(there.issuperset(group) and len(group) >= self.min_degree for group in current)
        choices = [arranged(degrees, ranks, current) for degrees in self._partitions(len(ranks))]
        if valid:
            choices.insert(0, current)
        if not choices:
            return ()
        best = max(choices, key=lambda groups: self._worth(groups, current, len(ranks)))
        return tuple(best)

    def requests_per_second(self, degrees: Sequence[int], ranks: int) -> float:
        """What groups of these degrees finish, on a node of ``ranks`` GPUs with ``waiting`` requests each."""
        busy = self.waiting * ranks
        total = 0.0
        for rate in sorted((1 / self.request_seconds(degree) for degree in degrees), reverse=True):
            total += rate * min(1.0, busy)
            busy -= min(1.0, busy)
        return total

    def request_seconds(self, degree: int) -> float:
        """A request of the mean mix on a group of this degree, from its launch to its end."""
        whole = sum(shape.share for shape in self.shapes)
        steps = sum(
            shape.share
            / whole
            * shape.steps
            * self.costs.denoise_step_seconds(shape.rows, degree, shape.tokens)
            for shape in self.shapes
        )
        return steps + self.costs.launch_seconds

    def _worth(self, groups: Groups, current: Groups, ranks: int) -> tuple[float, float]:
        """Requests finished until the next change, less those that the change itself keeps from being
        finished; then the ranks that work, so that none is idle that could."""
        finished = self.requests_per_second([len(group) for group in groups], ranks) * self.stay_seconds
        _, formed = changed_groups(current, groups)
        pause = self.costs.regroup_seconds + self.costs.reshard_seconds
        lost = sum(pause / self.request_seconds(len(group)) for group in formed)
        return finished - lost, float(sum(map(len, groups)))

    def _partitions(self, ranks: int) -> Iterator[tuple[int, ...]]:
        """Ways to group as many of the ranks as can work."""
        for usable in range(ranks, 0, -1):
            found = _partitions(usable, self.min_degree, usable)
            if found:
                yield from found
                return


@cache
def _partitions(total: int, least: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Partitions of ``total`` into parts from ``least`` to ``most``, descending."""
    if total == 0:
        return ((),)
    return tuple(
        (part, *rest)
        for part in range(min(total, most), least - 1, -1)
        for rest in _partitions(total - part, least, part)
    )
