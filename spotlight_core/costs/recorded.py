"""What a recorded run cost: its cost model, read off its journal and its iterations."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from spotlight_core.costs.model import CostModel


def fit_line(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """``fixed`` and ``per_row`` seconds through the median of each row count.

    One row count alone cannot tell the two apart: all of its cost is then taken per row.
    """
    by_rows: dict[int, list[float]] = {}
    for rows, seconds in points:
        by_rows.setdefault(rows, []).append(seconds)
    medians = sorted((rows, median(values)) for rows, values in by_rows.items())
    if not medians:
        raise ValueError("no measured denoise steps")
    (low, first), (high, last) = medians[0], medians[-1]
    slope = (last - first) / (high - low) if high > low else first / low
    slope = max(slope, 0.0)
    return max(first - slope * low, 0.0), slope


def _group(word: Mapping[str, Any]) -> tuple[str, int, tuple[int, ...]]:
    group = word["group"]
    return group["node"], group["incarnation"], tuple(group["ranks"])


@dataclass(slots=True, kw_only=True)
class _Lease:
    start: Mapping[str, Any]
    given: float
    begun: float | None  # None while it is queued behind another one
    said: bool = False


class _Measured:
    """Durations of denoise steps, launches and loads, read off a journal's records in order."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self.launches: list[float] = []
        self.load_seconds: list[float] = []
        self._leases: dict[str, _Lease] = {}
        self._loads: dict[tuple[str, int, tuple[int, ...]], float] = {}
        self._at = 0.0

    def see(self, word: Mapping[str, Any]) -> None:
        self._at = word.get("at", self._at)
        match word["word"]:
            case "Start":
                begun = None if word.get("queued") else self._at
                self._leases[word["lease"]] = _Lease(start=word, given=self._at, begun=begun)
            case "Started":
                self._started(word["lease"])
            case "Finished":
                self._finished(word["lease"])
            case "Failed" | "Committed" if word.get("released", True):
                self._ended(word["lease"])
            case "Load":
                self._loads[_group(word)] = self._at
            case "WeightsLoaded" if _group(word) in self._loads:
                self.load_seconds.append(self._at - self._loads.pop(_group(word)))

    def _started(self, name: str) -> None:
        """The group says that it began; again later, it is a mere sign of life."""
        lease = self._leases.get(name)
        if lease is None or lease.said:
            return
        if lease.begun is not None and not lease.start.get("queued"):
            self.launches.append(self._at - lease.given)
        lease.begun, lease.said = self._at, True

    def _finished(self, name: str) -> None:
        lease = self._ended(name)
        if lease is None or lease.begun is None or lease.start["from_denoise_step"]:
            return
        request = lease.start["request"]
        fidelity = request["fidelity"]
        effective = fidelity["denoise_steps"] - len(fidelity["reused_steps"])
        self.steps.append((len(request["seeds"]), (self._at - lease.begun) / effective))

    def _ended(self, name: str) -> _Lease | None:
        """Take a lease away; the one queued behind it begins."""
        lease = self._leases.pop(name, None)
        if lease is not None and lease.begun is not None:
            for other in self._leases.values():
                if other.begun is None and _group(other.start) == _group(lease.start):
                    other.begun = self._at
        return lease


def from_records(
    journal: Iterable[Mapping[str, Any]], iterations: Iterable[Mapping[str, Any]], boot_seconds: float
) -> CostModel:
    """The cost model of a recorded run: medians over its journal and its iterations' metrics.

    A request is timed from when its group said that it began, and a queued one at the earliest from
    the end of the one before: what it waited in line is no cost of its own.
    """
    measured = _Measured()
    for word in journal:
        measured.see(word)
    fixed, per_row = fit_line(measured.steps)
    metrics = [record["metrics"] for record in iterations]

    def middle(name: str) -> float:
        return median([m[name] for m in metrics if name in m] or [0.0])

    return CostModel(
        denoise_step_fixed_seconds=fixed,
        denoise_step_per_row_seconds=per_row,
        # Where no group said when it began, launches are inside the measured steps.
        launch_seconds=median(measured.launches or [0.0]),
        load_seconds=median(measured.load_seconds or [0.0]),
        score_seconds_per_image=middle("seconds/score_per_image"),
        train_seconds=middle("seconds/train"),
        boot_seconds=boot_seconds,
    )
