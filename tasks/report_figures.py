"""The report's charts as Plotly JSON.

Colours are names (``@rollout``): the page resolves them from its style sheet, so that one figure
serves light and dark.  One colour means one activity in every chart.
"""

from collections.abc import Sequence
from typing import Any

from spotlight_core.market.preemptions import Preemption
from tasks.report_data import Point, RunRecord

Figure = dict[str, Any]
ACTIVITIES = ("rollout", "explore", "training", "evaluate", "audit", "lost", "idle")
FONT = "ui-sans-serif, system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"


def _axis(title: str, **more: Any) -> Figure:
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": "@muted"}},
        "gridcolor": "@line",
        "linecolor": "@line",
        "zeroline": False,
        "tickfont": {"size": 11, "color": "@muted"},
        "automargin": True,
        **more,
    }


def _layout(**more: Any) -> Figure:
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": "@ink"},
        "margin": {"l": 44, "r": 16, "t": 12, "b": 40},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12}},
        "hoverlabel": {"bgcolor": "@card", "bordercolor": "@line", "font": {"color": "@ink", "family": FONT}},
        "hovermode": "closest",
        **more,
    }


def _line(name: str, points: Sequence[tuple[float, float]], color: str, hover: str, **more: Any) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": color, "width": more.pop("width", 2.5), "dash": more.pop("dash", "solid")},
        "marker": {"color": color, "size": more.pop("size", 7), "symbol": more.pop("symbol", "circle")},
        "hovertemplate": hover + "<extra>%{fullData.name}</extra>",
        **more,
    }


def _at(point: Point, by: str) -> float | None:
    return point.iterations if by == "iterations" else point.usd


def _curve(points: Sequence[Point], by: str, value: str) -> list[tuple[float, float]]:
    placed = ((_at(point, by), getattr(point, value)) for point in points)
    return [(x, y) for x, y in placed if x is not None]


def _training_rewards(run: RunRecord, by: str) -> list[tuple[float, float]]:
    """Mean rollout reward, placed at the policy that rolled out: before that iteration's update."""
    rewards = run.series("train/reward_mean")
    if by == "iterations":
        return [(float(iteration), value) for iteration, value in rewards]
    usd = dict(run.series("cost/usd_total"))
    before = run.points[0].usd if run.points and run.points[0].iterations == 0 else None
    placed = (
        (usd.get(iteration - 1, before if iteration == 0 else None), value) for iteration, value in rewards
    )
    return [(x, y) for x, y in placed if x is not None]


def score_figure(run: RunRecord, by: str, baseline: RunRecord | None = None) -> Figure:
    """Score and held-out score against ``iterations`` or ``usd``, with the target and its crossing."""
    x = "iteration %{x}" if by == "iterations" else "$%{x:.3f}"
    hover = x + "<br>%{y:.3f}"
    data = [
        _line("rollouts (selected seeds)", _training_rewards(run, by), "@faint", hover, width=1.2, size=3),
        _line(
            "held-out check",
            _curve(run.points, by, "held_out"),
            "@second",
            hover,
            dash="dash",
            symbol="diamond",
        ),
        _line("score", _curve(run.points, by, "score"), "@accent", hover, width=3, size=8),
    ]
    if baseline is not None:
        curve = _curve(baseline.points, by, "score")
        data.append(_line(f"score of {baseline.name}", curve, "@muted", hover, dash="dot", symbol="square"))
    shapes, notes = _target_marks(run, by)
    title = "iterations" if by == "iterations" else "dollars spent"
    top = max([1.0, *(point.score for point in run.points)])
    values = [point.score for point in run.points] + [point.held_out for point in run.points]
    values += [value for _, value in run.series("train/reward_mean")]
    low = max(0.0, min([0.5, *values]) - 0.05)
    return {
        "data": data,
        "layout": _layout(
            xaxis=_axis(title, rangemode="tozero", **({} if by == "iterations" else {"tickprefix": "$"})),
            yaxis=_axis("score", range=[low, top + 0.03]),
            shapes=shapes,
            annotations=notes,
        ),
    }


def _target_marks(run: RunRecord, by: str) -> tuple[list[Figure], list[Figure]]:
    if run.target is None:
        return [], []
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    shapes: list[Figure] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": run.target, "y1": run.target, "line": line}
    ]
    small = {"size": 11, "color": "@muted"}
    notes: list[Figure] = [
        {
            "xref": "paper",
            "x": 0.005,
            "y": run.target,
            "yanchor": "bottom",
            "xanchor": "left",
            "showarrow": False,
            "text": f"target {run.target:g}",
            "font": small,
        }
    ]
    crossing = run.crossing
    x = None if crossing is None else crossing.iterations if by == "iterations" else crossing.usd
    if x is not None:
        shapes.append({"type": "line", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": line})
        text = f"iteration {x}" if by == "iterations" else f"${x:.3f}"
        note = {
            "yref": "paper",
            "x": x,
            "y": 0.02,
            "xanchor": "right",
            "yanchor": "bottom",
            "showarrow": False,
        }
        notes.append({**note, "text": f"held from {text} ", "font": small})
    return shapes, notes


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds in the unit that suits a run of this length, and the unit's name."""
    if seconds < 1200:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")


def timeline_figure(run: RunRecord) -> Figure:
    """Every node's billed life, with iteration bands and preemptions; a gap means no node."""
    unit, name = time_unit(run.now - run.began)
    rows = node_rows(run)
    data = []
    for activity in ACTIVITIES:
        parts = [part for part in run.segments if part.activity == activity]
        if parts:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": activity,
                    "y": [part.node for part in parts],
                    "base": [round((part.start - run.began) / unit, 5) for part in parts],
                    "x": [round((part.end - part.start) / unit, 5) for part in parts],
                    "customdata": [
                        [part.request or activity, round(part.end - part.start, 3)] for part in parts
                    ],
                    "marker": {"color": f"@{activity}", "line": {"width": 0}},
                    "hovertemplate": "%{y}: %{customdata[0]}<br>%{customdata[1]} s<extra>"
                    + activity
                    + "</extra>",
                }
            )
    data += _preemption_marks(run, unit)
    shapes, notes = _iteration_bands(run, unit)
    return {
        "data": data,
        "layout": _layout(
            barmode="overlay",
            bargap=0.34,
            xaxis=_axis(
                f"{name} since the run began", range=[0, (run.now - run.began) / unit], showgrid=False
            ),
            yaxis=_axis("", categoryorder="array", categoryarray=rows[::-1], fixedrange=True, showgrid=False),
            legend={"orientation": "h", "x": 0, "y": 1.1, "yanchor": "bottom", "font": {"size": 12}},
            margin={"l": 60, "r": 12, "t": 12, "b": 44},
            height=150 + 62 * max(1, len(rows)),
            shapes=shapes,
            annotations=notes,
            dragmode="pan",
        ),
        "windows": _windows(run, unit),
    }


def node_rows(run: RunRecord) -> list[str]:
    """Nodes from top to bottom: reserved first, then by name."""
    pools = {part.node: part.pool for part in run.segments}
    return sorted(pools, key=lambda node: (pools[node] != "reserved", len(node), node))


def _preemption_marks(run: RunRecord, unit: float) -> list[Figure]:
    marks = []
    for cause, symbol, label in (("notice", "triangle-down", "notice"), ("killed", "x", "killed")):
        hits = [hit for hit in run.ledger.preemptions if hit.cause == cause]
        if hits:
            marks.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": label,
                    "x": [(hit.at - run.began) / unit for hit in hits],
                    "y": [hit.node for hit in hits],
                    "customdata": [[in_flight_words(hit)] for hit in hits],
                    "marker": {
                        "symbol": symbol,
                        "size": 13,
                        "color": "@ink",
                        "line": {"color": "@card", "width": 1.5},
                    },
                    "hovertemplate": "%{y}: %{customdata[0]}<extra>" + label + "</extra>",
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
    began = run.facts.get("training_began_at")
    first = 0.0 if began is None else began - run.began
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
        windows.append(
            {"label": f"{hit.node} {hit.cause}", "range": [max(0.0, at - width / 2), at + width / 2]}
        )
    return windows


def contrast_figure(run: RunRecord) -> Figure:
    """Reward std of the trained groups: explored against plain seeds of the same iterations."""
    hover = "iteration %{x}<br>std %{y:.3f}"
    selected = [(float(x), y) for x, y in run.series("explore/std_selected")]
    plain = [(float(x), y) for x, y in run.series("explore/std_unexplored")]
    return {
        "data": [
            _line("plain seeds", plain, "@faint", hover, dash="dash", symbol="diamond", size=5, width=2),
            _line("selected seeds", selected, "@explore", hover, size=6),
        ],
        "layout": _layout(
            xaxis=_axis("iterations"), yaxis=_axis("reward std of a group", rangemode="tozero"), height=270
        ),
    }


def correlation_figure(run: RunRecord) -> Figure:
    """Audited Spearman of exploration against rollout, with its mean."""
    audits = [(float(x), y) for x, y in run.series("explore/rank_correlation")]
    hover = "iteration %{x}<br>Spearman %{y:.3f}"
    shapes = []
    if audits:
        mean = sum(value for _, value in audits) / len(audits)
        line = {"color": "@muted", "width": 1, "dash": "dot"}
        shapes.append(
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": mean, "y1": mean, "line": line}
        )
    low = min([0.0, *(value for _, value in audits)])
    return {
        "data": [_line("audited prompts", audits, "@audit", hover, mode="markers", size=9)],
        "layout": _layout(
            xaxis=_axis("iterations", rangemode="tozero"),
            yaxis=_axis("Spearman", range=[low - 0.05, 1.05]),
            shapes=shapes,
            showlegend=False,
            height=270,
        ),
    }
