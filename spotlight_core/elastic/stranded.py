"""GPUs that are there and cannot work: what a spot market strands under fixed and under elastic groups.

A fixed group works only while all of its GPUs are there, so one that is taken strands the others of its
group; elastic groups re-form from those that are left.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb, floor
from statistics import fmean

from spotlight_core.elastic.layout import FixedDegree, Groups, NodeLayout, changed_groups
from spotlight_core.errors import BadInputError
from spotlight_core.market.traces import ClockTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranded:
    """GPU-seconds that were there and that were stranded; ``any_share``: of the time, when something was."""

    available_gpu_seconds: float
    stranded_gpu_seconds: float
    any_share: float

    @property
    def share(self) -> float:
        """Of the GPU-seconds that were there."""
        return self.stranded_gpu_seconds / self.available_gpu_seconds if self.available_gpu_seconds else 0.0


@dataclass(frozen=True, slots=True)
class FixedGroups:
    """The static baseline: groups of consecutive ranks, each of which works whole or not at all."""

    degree: int

    def groups(self, ranks: Sequence[int], current: Groups) -> Groups:
        there = set(ranks)
        first = sorted({rank - rank % self.degree for rank in ranks})
        whole = (tuple(range(rank, rank + self.degree)) for rank in first)
        return tuple(group for group in whole if there.issuperset(group))


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many GPUs of a small fleet are there from each of ``times`` (seconds) to the next."""

    times: tuple[float, ...]
    gpus: tuple[int, ...]

    @classmethod
    def of(cls, trace: ClockTrace, gpus: int) -> "Capacity":
        """The trace scaled so that its most nodes at once are all ``gpus``."""
        present: set[str] = set()
        counts: dict[float, int] = {}
        for event in trace.events:
            if event.change == "add":
                present.add(event.node)
            else:
                present.discard(event.node)
            counts[event.at_seconds] = len(present)
        most = max(counts.values(), default=0)
        if not most:
            raise BadInputError("no node is ever there in this trace", "give a trace with nodes")
        scaled = [floor(count * gpus / most + 0.5) for count in counts.values()]
        return cls(tuple(counts), tuple(scaled[:-1]))

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    def stretches(self) -> Iterator[tuple[float, int]]:
        """Seconds, and GPUs that are there for as long."""
        for (begin, end), there in zip(pairwise(self.times), self.gpus, strict=True):
            yield end - begin, there


def replayed(
    capacity: Capacity,
    layout: NodeLayout,
    *,
    nodes: int,
    gpus_per_node: int,
    placement: int,
    regroup_seconds: float = 0.0,
) -> Stranded:
    """What a policy strands.  ``placement`` seeds which of the GPUs that are there is taken, and which of
    the others comes.

    A GPU in a group that was just formed counts as stranded for ``regroup_seconds``.
    """
    draws = random.Random(placement)
    away, there = list(range(nodes * gpus_per_node)), list[int]()
    layouts: list[Groups] = [()] * nodes
    available = stranded = any_seconds = 0.0
    for seconds, count in capacity.stretches():
        while len(there) != count:
            source, target = (away, there) if len(there) < count else (there, away)
            target.append(source.pop(draws.randrange(len(source))))
        idle, pausing = 0, 0
        for node in range(nodes):
            ranks = [gpu % gpus_per_node for gpu in sorted(there) if gpu // gpus_per_node == node]
            wanted = layout.groups(ranks, layouts[node])
            _, formed = changed_groups(layouts[node], wanted)
            layouts[node] = wanted
            idle += len(ranks) - sum(map(len, wanted))
            pausing += sum(map(len, formed))
        available += seconds * count
        stranded += seconds * idle + min(seconds, regroup_seconds) * pausing
        any_seconds += seconds * (idle > 0)
    return Stranded(
        available_gpu_seconds=available,
        stranded_gpu_seconds=stranded,
        any_share=any_seconds / capacity.seconds if capacity.seconds else 0.0,
    )


def expected_of_fixed(capacity: Capacity, degree: int, gpus: int) -> Stranded:
    """What fixed groups strand on average over all placements, by counting them.

    With k of n GPUs there, a group of d is whole in ``C(n-d, k-d) / C(n, k)`` of the placements, and
    nothing is stranded in ``C(n/d, k/d) / C(n, k)`` of them, if d divides k.
    """
    available = stranded = any_seconds = 0.0
    for seconds, there in capacity.stretches():
        ways = comb(gpus, there)
        whole = gpus // degree * comb(gpus - degree, there - degree) / ways if there >= degree else 0.0
        neat = comb(gpus // degree, there // degree) / ways if there % degree == 0 else 0.0
        available += seconds * there
        stranded += seconds * (there - degree * whole)
        any_seconds += seconds * (1 - neat)
    return Stranded(
        available_gpu_seconds=available,
        stranded_gpu_seconds=stranded,
        any_share=any_seconds / capacity.seconds if capacity.seconds else 0.0,
    )


def compared(
    trace: ClockTrace,
    *,
    nodes: int,
    gpus_per_node: int,
    degree: int,
    placements: int,
    regroup_seconds: float,
) -> dict[str, Stranded]:
    """Fixed and elastic groups over the same seeded placements, on average, and fixed ones by counting."""
    capacity = Capacity.of(trace, nodes * gpus_per_node)

    def mean(layout: NodeLayout, pause: float) -> Stranded:
        runs = [
            replayed(
                capacity,
                layout,
                nodes=nodes,
                gpus_per_node=gpus_per_node,
                placement=placement,
                regroup_seconds=pause,
            )
            for placement in range(placements)
        ]
        return Stranded(
            available_gpu_seconds=fmean(run.available_gpu_seconds for run in runs),
            stranded_gpu_seconds=fmean(run.stranded_gpu_seconds for run in runs),
            any_share=fmean(run.any_share for run in runs),
        )

    return {
        "fixed": mean(FixedGroups(degree), 0.0),
        "fixed, by counting": expected_of_fixed(capacity, degree, nodes * gpus_per_node),
        "elastic": mean(FixedDegree(degree), regroup_seconds),
    }
