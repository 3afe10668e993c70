"""The report's timeline: what every node did, when, and where preemptions struck."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spotlight_core.market.preemptions import Preemption
from tasks.report_data import RunRecord
from tasks.report_figures import Figure, axis, base_layout

ACTIVITIES = ("rollout", "explore", "training", "evaluate", "audit", "lost", "idle")


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds in the unit that suits a run of this length, and the unit's name."""
    if seconds < 1200:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stretch of the timeline as it is drawn: ``label`` is what hovering tells."""

    node: str
    activity: str
    start: float
    end: float
    label: str


def every_segment(run: RunRecord) -> list[Block]:
    """One block a segment."""
    return [
        Block(node=p.node, activity=p.activity, start=p.start, end=p.end, label=p.request or p.activity)
        for p in run.segments
    ]


def joined_segments(run: RunRecord, pause: float) -> list[Block]:
    """Work of one activity joined across pauses of up to ``pause`` seconds, over each node's life.

    A whole run has more segments than pixels, and bars narrower than a pixel are drawn wider or not
    at all: unjoined, what is drawn last wins and busy nodes look idle.
    """
    lives: dict[tuple[str, int], Block] = {}
    work: list[Block] = []
    counts: list[int] = []
    for part in run.segments:
        key = (part.node, part.incarnation)
        life = lives.get(key)
        begin = part.start if life is None else life.start
        lives[key] = Block(node=part.node, activity="idle", start=begin, end=part.end, label="billed life")
        if part.activity == "idle":
            continue
        last = work[-1] if work and life is not None and work[-1].start >= life.start else None
        count, start = 1, part.start
        if (
            last
            and (last.node, last.activity) == (part.node, part.activity)
            and part.start - last.end <= pause
        ):
            count, start = counts.pop() + 1, work.pop().start
        label = part.activity if count == 1 else f"{count} × {part.activity}"
        work.append(Block(node=part.node, activity=part.activity, start=start, end=part.end, label=label))
        counts.append(count)
    return [*lives.values(), *work]


def closed_pause(run: RunRecord) -> float:
    """Pauses up to this many seconds are closed in the view of a whole run: about a pixel or two."""
    return (run.now - run.began) / 400


def _bars(run: RunRecord, blocks: Sequence[Block], unit: float) -> list[Figure]:
    """One trace an activity; idle below all others, but last in the legend."""
    traces = []
    for rank, activity in reversed(list(enumerate(ACTIVITIES, start=1))):
        parts = [block for block in blocks if block.activity == activity]
        if parts:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": activity,
                    "legendrank": rank,
                    "y": [part.node for part in parts],
                    "base": [round((part.start - run.began) / unit, 5) for part in parts],
                    "x": [round((part.end - part.start) / unit, 5) for part in parts],
                    "customdata": [[part.label, round(part.end - part.start, 3)] for part in parts],
                    "marker": {"color": f"@{activity}", "line": {"width": 0}},
                    "hovertemplate": "%{y}: %{customdata[0]}<br>%{customdata[1]} s<extra>"
                    + activity
                    + "</extra>",
                }
            )
    return traces


def timeline_figure(run: RunRecord, blocks: Sequence[Block]) -> Figure:
    """Every node's billed life, with iteration bands and preemptions; a gap means no node."""
    unit, name = time_unit(run.now - run.began)
    rows = node_rows(run)
    shapes, notes = _iteration_bands(run, unit)
    return {
        "data": [*_bars(run, blocks, unit), *_preemption_marks(run, unit)],
        "layout": base_layout(
            barmode="overlay",
            bargap=0.34,
            xaxis=axis(
                f"{name} since the run began", range=[0, (run.now - run.began) / unit], showgrid=False
            ),
            yaxis=axis("", categoryorder="array", categoryarray=rows[::-1], fixedrange=True, showgrid=False),
            legend={"orientation": "h", "x": 0, "y": 1.1, "yanchor": "bottom", "font": {"size": 12}},
            margin={"l": 60, "r": 12, "t": 12, "b": 44},
            height=150 + 62 * max(1, len(rows)),
            shapes=shapes,
            annotations=notes,
            dragmode="zoom",
        ),
        "windows": _windows(run, unit),
    }


def node_rows(run: RunRecord) -> list[str]:
    """Nodes from top to bottom: reserved first, then by name."""
    pools = {part.node: part.pool for part in run.segments}
    return sorted(pools, key=lambda node: (pools[node] != "reserved", len(node), node))


def _preemption_marks(run: RunRecord, unit: float) -> list[Figure]:
    marks = []
    symbols = {"notice": "triangle-down", "killed": "x", "silent": "x-open"}
    for cause, symbol in symbols.items():
        hits = [hit for hit in run.ledger.preemptions if hit.cause == cause]
        if hits:
            marks.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": cause,
                    "legendrank": 20,
                    "x": [(hit.at - run.began) / unit for hit in hits],
                    "y": [hit.node for hit in hits],
                    "customdata": [[in_flight_words(hit)] for hit in hits],
                    "marker": {
                        "symbol": symbol,
                        "size": 13,
                        "color": "@ink",
                        "line": {"color": "@card", "width": 1.5},
                    },
                    "hovertemplate": "%{y}: %{customdata[0]}<extra>" + cause + "</extra>",
                }
            )
    return marks


def in_flight_words(hit: Preemption) -> str:
    """What a preemption interrupted, in one line."""
    words = []
    for item in hit.in_flight:
        where = f" on {item.node}" if item.node else ""
        step = f" at denoise step {item.from_denoise_step}" if item.from_denoise_step else ""
        words.append(f"{item.request} {item.outcome}{step}{where}")
    return "; ".join(words) or "nothing in flight"


def iteration_spans(run: RunRecord) -> list[tuple[int, float, float]]:
    """``(iteration, start, end)`` in seconds since the run began."""
    ends = [(record["iteration"], record["at"] - run.began) for record in run.iterations]
    if not ends:
        return []
    first = 0.0 if run.base_evaluated_at is None else run.base_evaluated_at - run.began
    starts = [first, *(end for _, end in ends)]
    return [(number, start, end) for (number, end), start in zip(ends, starts, strict=False)]


def iteration_at(run: RunRecord, at: float) -> int | None:
    """The iteration that ran at a time of the journal, None outside of all."""
    spans = iteration_spans(run)
    return next((number for number, start, end in spans if start <= at - run.began <= end), None)


def _iteration_bands(run: RunRecord, unit: float) -> tuple[list[Figure], list[Figure]]:
    spans = iteration_spans(run)
    every = max(1, -(-len(spans) // 16))
    shapes, notes = [], []
    if spans:
        place = {"xref": "paper", "x": 0, "xanchor": "right", "y": 1, "yref": "paper", "yanchor": "bottom"}
        small = {"size": 10, "color": "@muted"}
        notes.append({**place, "text": "iteration ", "showarrow": False, "font": small})
    for number, start, end in spans:
        if number % 2 == 0:
            edge = {"x0": start / unit, "x1": end / unit, "y0": 0, "y1": 1, "yref": "paper"}
            shapes.append(
                {"type": "rect", **edge, "fillcolor": "@band", "line": {"width": 0}, "layer": "below"}
            )
        if number % every == 0:
            place = {"x": (start + end) / 2 / unit, "y": 1, "yref": "paper", "yanchor": "bottom"}
            notes.append(
                {**place, "text": str(number), "showarrow": False, "font": {"size": 10, "color": "@muted"}}
            )
    return shapes, notes


def _windows(run: RunRecord, unit: float) -> list[dict[str, Any]]:
    """Stretches worth a closer look: around each preemption, about two iterations wide."""
    whole = (run.now - run.began) / unit
    lengths = [end - start for _, start, end in iteration_spans(run)]
    width = (sum(lengths) / len(lengths) if lengths else 10.0) * 2 / unit
    windows = [{"label": "whole run", "range": [0.0, whole]}]
    for hit in run.ledger.preemptions[:6]:
        at = (hit.at - run.began) / unit
        cause = "kill" if hit.cause == "killed" else hit.cause
        iteration = iteration_at(run, hit.at)
        label = cause if iteration is None else f"{cause}, iteration {iteration}"
        windows.append({"label": label, "range": [max(0.0, at - width / 2), at + width / 2]})
    return windows
