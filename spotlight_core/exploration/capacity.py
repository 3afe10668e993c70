"""How many spot GPUs there will be while training runs.

past:     ──┐    ┌──────┐  ┌──      each moment's change until a window later
now: 8 GPUs └────┘      └──┘        ─► 8 + a low quantile of these changes
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

SAMPLES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpan:
    """GPUs that were there from ``start`` to ``end`` (seconds; None: they still are)."""

    start: float
    end: float | None
    gpus: int


def gpus_at(spans: Iterable[NodeSpan], at: float) -> int:
    """How many there were."""
    return sum(span.gpus for span in spans if span.start <= at and (span.end is None or at < span.end))


def mean_gpus(spans: Iterable[NodeSpan], start: float, end: float) -> float:
    """Mean number over a stretch of time."""
    seconds = sum(
        span.gpus * max(0.0, min(end, end if span.end is None else span.end) - max(start, span.start))
        for span in spans
    )
    return seconds / (end - start)


def expected_gpus(
    spans: Sequence[NodeSpan], now: float, window_seconds: float, quantile: float, history_seconds: float
) -> float:
    """A quantile of the mean number of GPUs over the window that begins now; never below 0.

    Past windows say by how much such a mean differs from the number at its beginning.  With less history
    than a window the number of now is taken.
    """
    there = gpus_at(spans, now)
    first = max(min((span.start for span in spans), default=now), now - history_seconds)
    last = now - window_seconds
    if window_seconds <= 0 or last <= first:
        return float(there)
    begins = np.linspace(first, last, SAMPLES)
    changes = [mean_gpus(spans, at, at + window_seconds) - gpus_at(spans, at) for at in begins]
    return max(0.0, there + float(np.quantile(changes, quantile)))
