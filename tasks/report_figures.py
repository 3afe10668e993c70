"""The report's charts as Plotly JSON.

Colours are names (``@rollout``): the page resolves them from its style sheet, so that one figure
serves light and dark.  One colour means one activity in every chart.
"""

from collections.abc import Sequence
from typing import Any

from tasks.report_data import Point, RunRecord

Figure = dict[str, Any]
FONT = "ui-sans-serif, system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"


def axis(title: str, **more: Any) -> Figure:
    return {
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": "@muted"}},
        "gridcolor": "@line",
        "linecolor": "@line",
        "zeroline": False,
        "tickfont": {"size": 11, "color": "@muted"},
        "automargin": True,
        **more,
    }


def base_layout(**more: Any) -> Figure:
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
        "cliponaxis": False,
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
        "layout": base_layout(
            xaxis=axis(title, rangemode="tozero", **({} if by == "iterations" else {"tickprefix": "$"})),
            yaxis=axis("score", range=[low, top + 0.03]),
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
        "layout": base_layout(
            xaxis=axis("iterations"), yaxis=axis("reward std of a group", rangemode="tozero"), height=270
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
        "layout": base_layout(
            xaxis=axis("iterations", rangemode="tozero"),
            yaxis=axis("Spearman", range=[low - 0.05, 1.05]),
            shapes=shapes,
            showlegend=False,
            height=270,
        ),
    }
