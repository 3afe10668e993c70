"""What a run folder's files say about its run, read once for the report."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from spotlight_core.errors import BadInputError
from spotlight_core.events import Word
from spotlight_core.journal import read_words
from spotlight_core.market.billing import Segment
from spotlight_core.market.explain import Explanation, explain
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.node_records import read_strikes
from spotlight_core.market.prices import PriceBook
from tasks.run_folder import Record, RunFolder, read_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One evaluation: after ``iterations`` updates and ``usd`` dollars (None when not recorded)."""

    iterations: int
    usd: float | None
    score: float
    held_out: float
    grey_share: float
    images: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The first of two successive evaluations at or above the target (one alone may be luck)."""

    iterations: int
    usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedMean:
    """Mean of paired differences with its 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run as its folder tells it.  ``missing`` names in plain words what the folder lacks."""

    name: str
    recipe: Record
    facts: Record
    iterations: tuple[Record, ...]
    points: tuple[Point, ...]
    ledger: CostLedger
    segments: tuple[Segment, ...]
    explanation: Explanation
    began: float
    now: float
    base_evaluated_at: float | None
    base_image: bytes | None
    final_image: bytes | None
    missing: tuple[str, ...]
    words: tuple[Word, ...]

    @property
    def target(self) -> float | None:
        value = self.recipe.get("evaluation", {}).get("target")
        return None if value is None else float(value)

    @property
    def done(self) -> int:
        """Finished iterations."""
        return max((record["iteration"] + 1 for record in self.iterations), default=0)

    @property
    def planned(self) -> int | None:
        return self.recipe.get("iterations")

    @property
    def usd(self) -> float:
        return self.ledger.usd(self.now)

    @property
    def crossing(self) -> Crossing | None:
        if self.target is None:
            return None
        for first, second in pairwise(self.points):
            if min(first.score, second.score) >= self.target:
                return Crossing(iterations=first.iterations, usd=first.usd)
        return None

    def series(self, metric: str) -> list[tuple[int, float]]:
        """``(iteration, value)`` of each finished iteration that has the metric."""
        found = ((record["iteration"], record["metrics"].get(metric)) for record in self.iterations)
        return [(iteration, float(value)) for iteration, value in found if _finite(value)]


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _json(path: Path) -> Record:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON ({error})", "restore it, or report another run") from error


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _latest(records: Iterable[Record]) -> list[Record]:
    """One record an iteration, the last written: a resumed run may have finished one twice."""
    return [record for _, record in sorted({record["iteration"]: record for record in records}.items())]


def billed_until(segments: Iterable[Segment], prices: PriceBook, at: float) -> float:
    """Dollars of the parts of ``segments`` before ``at``."""
    return math.fsum(
        prices.usd_per_hour(part.pool) / 3600.0 * part.gpus * max(0.0, min(part.end, at) - part.start)
        for part in segments
    )


def _missing(folder: RunFolder, done: int, planned: int | None, points: Sequence[Point]) -> tuple[str, ...]:
    notes = []
    if not folder.journal.exists():
        notes.append("there is no journal, so there is no timeline, no ledger and no list of preemptions")
    if planned is None:
        notes.append("there is no recipe, so neither target nor prices are known")
    elif done < planned:
        notes.append(f"the run stopped after {done} of {planned} iterations")
    if not points:
        notes.append("nothing was evaluated yet")
    elif points[0].iterations > 0:
        notes.append("the base model was not evaluated, so there is no score before training")
    for name, what in (("base.png", "before"), ("final.png", "after")):
        if not (folder.images / name).exists():
            notes.append(f"there are no images from {what} training")
    return tuple(notes)


def read_run(path: Path) -> RunRecord:
    """Read a run folder, whole or stopped early.

    Raises:
        BadInputError: no such folder, nothing of a run in it, or a file that is not JSON.
    """
    folder = RunFolder(path)
    if not (folder.exists() or folder.iterations.exists() or folder.journal.exists()):
        raise BadInputError(
            f"{path} holds no run", "give a folder that spotlight train wrote, as runs/quickstart"
        )
    recipe, facts = _json(folder.recipe), _json(folder.run_json)
    try:
        records = _latest(read_records(folder.iterations))
        words = tuple(read_words(folder.journal))
    except (ValueError, KeyError) as error:
        raise BadInputError(
            f"a log in {path} cannot be read ({error})", "restore it, or report another run"
        ) from error
    prices = PriceBook(recipe.get("prices", {}))
    ledger = CostLedger.replayed(prices, words)
    segments = ledger.segments(ledger.last_at)
    began = min((part.start for part in segments), default=records[0]["at"] if records else 0.0)
    points = [_point(record, segments, prices) for record in records if record.get("evaluation")]
    iterations = tuple(record for record in records if record["iteration"] >= 0)
    done = max((record["iteration"] + 1 for record in iterations), default=0)
    return RunRecord(
        name=recipe.get("name", folder.name),
        recipe=recipe,
        facts=facts,
        iterations=iterations,
        points=tuple(points),
        ledger=ledger,
        segments=tuple(segments),
        explanation=explain(words, prices, read_strikes(folder.nodes)),
        began=began,
        now=ledger.last_at,
        base_evaluated_at=records[0]["at"] if records and records[0]["iteration"] < 0 else None,
        base_image=_bytes(folder.images / "base.png"),
        final_image=_bytes(folder.images / "final.png"),
        missing=_missing(folder, done, recipe.get("iterations"), points),
        words=words,
    )


def _point(record: Record, segments: Sequence[Segment], prices: PriceBook) -> Point:
    usd = record.get("metrics", {}).get("cost/usd_total")
    if usd is None and segments:
        usd = billed_until(segments, prices, record["at"])
    evaluation = record["evaluation"]
    return Point(
        iterations=record["iteration"] + 1,
        usd=usd,
        score=evaluation["score"],
        held_out=evaluation["held_out"],
        grey_share=evaluation["grey_share"],
        images=evaluation["images"],
    )


def student_t_975(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by Cornish and Fisher's expansion (1e-3 from 4 on).

    Abramowitz and Stegun, 26.7.5.  Below 4 degrees of freedom: exact values.
    """
    exact = {1: 12.7062, 2: 4.3027, 3: 3.1824}
    if freedom in exact:
        return exact[freedom]
    z = statistics.NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def paired_mean(run: RunRecord, above: str, below: str) -> PairedMean | None:
    """Mean over iterations of one metric minus another, None with fewer than two pairs."""
    first, second = dict(run.series(above)), dict(run.series(below))
    differences = [first[key] - second[key] for key in sorted(first.keys() & second.keys())]
    if len(differences) < 2:
        return None
    mean = statistics.fmean(differences)
    half = student_t_975(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return PairedMean(mean=mean, low=mean - half, high=mean + half, pairs=len(differences))


def overlap_share(segments: Iterable[Segment]) -> float | None:
    """Share of exploration's node time that ran while reserved nodes trained; None without exploration."""
    explored = [part for part in segments if part.activity == "explore"]
    total = math.fsum(part.end - part.start for part in explored)
    if not total:
        return None
    trained: list[list[float]] = []
    for part in sorted(
        (part for part in segments if part.activity == "training"), key=lambda part: part.start
    ):
        if trained and part.start <= trained[-1][1]:
            trained[-1][1] = max(trained[-1][1], part.end)
        else:
            trained.append([part.start, part.end])
    shared = math.fsum(
        max(0.0, min(part.end, end) - max(part.start, start)) for part in explored for start, end in trained
    )
    return shared / total
