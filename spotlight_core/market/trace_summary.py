"""What a trace holds: nodes over time, how often they are taken, how often many at once."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from spotlight_core.market.backoff import STORM_SECONDS, storm_size
from spotlight_core.market.progress import ProgressTrace
from spotlight_core.market.traces import ClockEvent, ClockTrace

BUCKETS = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """A clock-keyed trace from its beginning to its last event.

    ``nodes_over_time``: time-weighted means over equal stretches.  ``preemptions_per_node_hour`` counts
    the time that nodes are there.  ``storms``: stretches of ``STORM_SECONDS`` in which
    ``storm_size`` of those present went.
    """

    hours: float
    nodes: int
    mean_nodes: float
    least_nodes: int
    most_nodes: int
    preemptions: int
    preemptions_per_hour: float
    preemptions_per_node_hour: float
    storms: int
    nodes_over_time: tuple[float, ...]
    repairs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSummary:
    """A progress-keyed trace: its points by node and event, and the iterations they are in."""

    notices: int
    kills: int
    returns: int
    nodes: tuple[str, ...]
    first_iteration: int
    last_iteration: int
    lines: tuple[str, ...]
    repairs: tuple[str, ...]


def summarised(trace: ClockTrace | ProgressTrace) -> TraceSummary | ProgressSummary:
    """The summary of either kind of trace."""
    return _clock(trace) if isinstance(trace, ClockTrace) else _progress(trace)


def _clock(trace: ClockTrace) -> TraceSummary:
    levels = _levels(trace.events)
    end = levels[-1][0]
    gone = [event.at_seconds for event in trace.events if event.change == "remove"]
    area = _NodeSeconds(levels)
    node_seconds = area.until(end)
    hours = end / 3600.0
    counts = [count for _, count in levels]
    return TraceSummary(
        hours=hours,
        nodes=len({event.node for event in trace.events}),
        mean_nodes=node_seconds / end if end else float(counts[-1]),
        least_nodes=min(counts),
        most_nodes=max(counts),
        preemptions=len(gone),
        preemptions_per_hour=len(gone) / hours if hours else 0.0,
        preemptions_per_node_hour=len(gone) / (node_seconds / 3600.0) if node_seconds else 0.0,
        storms=_storms(gone, levels),
        nodes_over_time=tuple(
            (area.until(end * (part + 1) / BUCKETS) - area.until(end * part / BUCKETS)) / (end / BUCKETS)
            for part in range(BUCKETS if end else 0)
        ),
        repairs=trace.repairs,
    )


def _levels(events: Sequence[ClockEvent]) -> list[tuple[float, int]]:
    """``(seconds, nodes from then on)``, one for each instant, from 0 on."""
    levels: dict[float, int] = {} if events[0].at_seconds == 0 else {0.0: 0}
    count = 0
    for event in events:
        count += 1 if event.change == "add" else -1
        levels[event.at_seconds] = count
    return list(levels.items())


class _NodeSeconds:
    """The time that nodes are there, summed once: a look at every level for each stretch would be slow."""

    def __init__(self, levels: Sequence[tuple[float, int]]) -> None:
        self._at = [at for at, _ in levels]
        self._count = [count for _, count in levels]
        parts = (count * (after[0] - at) for (at, count), after in pairwise(levels))
        self._sums = list(accumulate(parts, initial=0.0))

    def until(self, at: float) -> float:
        """Node-seconds from 0 on."""
        last = max(0, bisect_right(self._at, at) - 1)
        return self._sums[last] + self._count[last] * (at - self._at[last])


def _storms(gone: Sequence[float], levels: Sequence[tuple[float, int]]) -> int:
    """How many stretches hold a storm; each loss is in one stretch at most."""
    found = index = before = 0
    while index < len(gone):
        inside = index
        while inside < len(gone) and gone[inside] <= gone[index] + STORM_SECONDS:
            inside += 1
        while before + 1 < len(levels) and levels[before + 1][0] < gone[index]:
            before += 1
        if inside - index >= storm_size(levels[before][1]):
            found += 1
            index = inside
        else:
            index += 1
    return found


def _progress(trace: ProgressTrace) -> ProgressSummary:
    events = Counter(point.event for point in trace.points)
    lines = []
    for point in trace.points:
        where = f"iteration {point.iteration}, {point.phase}: {point.node}"
        if point.event == "return":
            lines.append(f"{where} returns")
        else:
            left = "" if point.seconds_left is None else f", {point.seconds_left:g} s left"
            place = f"at denoise step {point.denoise_step} of its request {point.nth_request}"
            lines.append(f"{where} {point.event} {place}{left}")
    return ProgressSummary(
        notices=events["notice"],
        kills=events["kill"],
        returns=events["return"],
        nodes=tuple(sorted({point.node for point in trace.points})),
        first_iteration=min((point.iteration for point in trace.points), default=0),
        last_iteration=max((point.iteration for point in trace.points), default=0),
        lines=tuple(lines),
        repairs=trace.repairs,
    )
