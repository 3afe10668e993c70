"""What things cost in seconds: the profile that simulated runs are timed with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds on one node's GPU.  A denoise step costs ``fixed + per_row x rows``."""

    denoise_step_fixed_seconds: float
    denoise_step_per_row_seconds: float
    launch_seconds: float
    load_seconds: float
    score_seconds_per_image: float
    train_seconds: float
    boot_seconds: float

    def denoise_step_seconds(self, rows: int) -> float:
        return self.denoise_step_fixed_seconds + self.denoise_step_per_row_seconds * rows


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
    return group["node"], group["generation"], tuple(group["ranks"])


def from_records(
    journal: Iterable[Mapping[str, Any]], iterations: Iterable[Mapping[str, Any]], boot_seconds: float
) -> CostModel:
    """The cost model of a recorded run: medians over its journal and its iterations' metrics."""
    at, starts, loads = 0.0, {}, {}
    steps: list[tuple[int, float]] = []
    load_seconds: list[float] = []
    for word in journal:
        at = word.get("at", at)
        match word["word"]:
            case "Start" if word["from_denoise_step"] == 0:
                starts[word["lease"]] = (at, word["request"])
            case "Finished" if word["lease"] in starts:
                begun, request = starts.pop(word["lease"])
                fidelity = request["fidelity"]
                effective = fidelity["denoise_steps"] - len(fidelity["reused_steps"])
                steps.append((len(request["seeds"]), (at - begun) / effective))
            case "Load":
                loads[_group(word)] = at
            case "WeightsLoaded" if _group(word) in loads:
                load_seconds.append(at - loads.pop(_group(word)))
    fixed, per_row = fit_line(steps)
    metrics = [record["metrics"] for record in iterations]

    def middle(name: str) -> float:
        return median([m[name] for m in metrics if name in m] or [0.0])

    return CostModel(
        denoise_step_fixed_seconds=fixed,
        denoise_step_per_row_seconds=per_row,
        launch_seconds=0.0,  # already inside the measured Start to Finished
        load_seconds=median(load_seconds or [0.0]),
        score_seconds_per_image=middle("seconds/score_per_image"),
        train_seconds=middle("seconds/train"),
        boot_seconds=boot_seconds,
    )
