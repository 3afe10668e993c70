"""The report's section on preemptions: what each saved and lost, and that the weights are the same."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spotlight_core.market.explain import ExplainedPreemption, ExplainedRequest, Explanation
from tasks.report_data import RunRecord
from tasks.report_figures import Figure, axis, base_layout
from tasks.report_sections import duration, esc, plural, table
from tasks.report_timeline import iteration_at
from tasks.run_folder import Record, RunFolder, read_records

# What may differ between two runs that are to end in the same weights.
FREE = ("name", "fleet", "services", "replay", "decisions")
HOW = {"notice": "notice", "killed": "killed, no notice", "silent": "fell silent, no notice"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """Another run of the same training.  ``seeds``: it chose other seeds, so its weights may differ."""

    name: str
    digest: str
    score: float | None
    held_out: float | None
    preemptions: int | None
    verdict: Literal["equal", "differ", "seeds"]


def section(run: RunRecord, twins: list[Twin]) -> str:
    """Table, figure and the comparison of weights."""
    if not run.explanation.preemptions:
        return "<p>No node was preempted.</p>" + same_weights(run, twins)
    label = "Denoise steps saved and lost by each preemption"
    place = f'class="plot" id="preempted" data-figure="preemptions" role="img" aria-label="{label}"'
    return f"<div {place}></div>" + preemption_table(run) + same_weights(run, twins)


# -- the preemptions ----------------------------------------------------------------------------------


def preemption_table(run: RunRecord) -> str:
    """Every preemption: what was in flight, what was saved, where it went on, what it cost."""
    rows = [_row(run, one) for one in run.explanation.preemptions]
    head = ["at", "iteration", "node", "how", "in flight", "saved", "went on", "after", "work lost"]
    return table(head, rows) + f"<p>{_total(run.explanation)}</p>"


def _row(run: RunRecord, one: ExplainedPreemption) -> list[str]:
    iteration = iteration_at(run, one.at)
    waits = [item.resumed_at - one.at for item in one.requests if item.resumed_at is not None]
    steps = _steps(one.denoise_steps_lost, one.exact)
    lost = f"{steps}, {one.lost_gpu_seconds:.2f} GPU-s, ${one.lost_usd:.5f}"
    return [
        _whole(duration(one.at - run.began)),
        "–" if iteration is None else str(iteration),
        _whole(esc(one.node)),
        HOW[one.cause],
        "<br>".join(f"{esc(item.kind)} <code>{esc(item.request)}</code>" for item in one.requests)
        or "nothing",
        "<br>".join(_saved(item) for item in one.requests) or "–",
        "<br>".join(_went_on(item) for item in one.requests) or "–",
        _whole(f"{max(waits):.2f} s") if waits else "–",
        lost if one.lost_gpu_seconds else "nothing",
    ]


def _whole(cell: str) -> str:
    """A cell that is not broken into lines."""
    return f'<span style="white-space:nowrap">{cell}</span>'


def _total(explanation: Explanation) -> str:
    lost = _steps(explanation.denoise_steps_lost, explanation.exact)
    saved = sum(_saved_steps(one) for one in explanation.preemptions)
    count = plural(len(explanation.preemptions), "preemption")
    return (
        f"{count} saved {plural(saved, 'denoise step')} in flight "
        f"and lost {lost}: {explanation.lost_gpu_seconds:.2f} GPU-s, ${explanation.lost_usd:.5f}."
    )


def _steps(steps: float, exact: bool) -> str:
    if exact:
        return plural(round(steps), "denoise step")
    return f"about {steps:.1f} denoise steps" if steps else "an unknown number of denoise steps"


def _saved_steps(one: ExplainedPreemption) -> int:
    return sum(item.saved_denoise_step for item in one.requests)


def _saved(item: ExplainedRequest) -> str:
    if item.outcome in ("finished", "dropped"):
        return "–"
    return f"denoise step {item.saved_denoise_step}" if item.saved_denoise_step else "nothing"


def _went_on(item: ExplainedRequest) -> str:
    where = f" on {esc(item.resumed_on)}" if item.resumed_on else ""
    if item.outcome == "resumed":
        return f"resumed at denoise step {item.from_denoise_step}{where}"
    said = {"recomputed": "recomputed from noise", "finished": "finished within the grace"}
    return said.get(item.outcome, esc(item.outcome)) + where


def preemptions_figure(run: RunRecord) -> Figure:
    """Denoise steps in flight at each preemption: those that were saved below those that were lost."""
    found = run.explanation.preemptions
    places = [f"{number}. {one.node}<br>{one.cause}" for number, one in enumerate(found, start=1)]

    def bars(name: str, color: str, values: list[float]) -> Figure:
        hover = "%{x}: %{y:.1f} denoise steps " + name
        return {
            "type": "bar",
            "name": name,
            "x": places,
            "y": values,
            "marker": {"color": color},
            "hovertemplate": hover + "<extra></extra>",
        }

    return {
        "data": [
            bars("saved", "@training", [float(_saved_steps(one)) for one in found]),
            bars("lost", "@lost", [one.denoise_steps_lost for one in found]),
        ],
        "layout": base_layout(
            barmode="stack",
            bargap=0.5,
            xaxis=axis("", type="category"),
            yaxis=axis("denoise steps in flight", rangemode="tozero"),
            height=250,
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        ),
    }


# -- the same weights ---------------------------------------------------------------------------------


def find_twins(path: Path) -> list[Twin]:
    """The finished runs beside this one that differ in their fleet and its market at most, by name.

    None before this run's own weights are known.
    """
    folder = RunFolder(path)
    own = _identity(folder)
    digest = _object(folder.run_json).get("weights_digest")
    if not own or not digest:
        return []
    twins = []
    for place in sorted(folder.runs.iterdir()):
        other = RunFolder(place)
        if other.path == folder.path or _identity(other) != own:
            continue
        facts = _object(other.run_json)
        if facts.get("status") == "finished" and facts.get("weights_digest"):
            twins.append(_twin(folder, digest, other, facts["weights_digest"]))
    return twins


def _identity(folder: RunFolder) -> Record:
    """A run's recipe without what must not change its weights; empty where there is none."""
    return {key: value for key, value in _object(folder.recipe).items() if key not in FREE}


def _object(path: Path) -> Record:
    """A JSON file; empty where it is missing or damaged: a neighbour's fault is no fault of this run."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _twin(folder: RunFolder, digest: str, other: RunFolder, theirs: str) -> Twin:
    records = list(read_records(other.iterations))
    scores = list(_scores(records))
    same = digest == theirs and scores == list(_scores(read_records(folder.iterations)))
    seeds = list(read_records(folder.decisions)) != list(read_records(other.decisions))
    preemptions = [record["metrics"].get("spot/preemptions") for record in records]
    counted = [count for count in preemptions if count is not None]
    return Twin(
        name=other.name,
        digest=theirs,
        score=scores[-1][1] if scores else None,
        held_out=scores[-1][2] if scores else None,
        preemptions=round(counted[-1]) if counted else None,
        verdict="equal" if same else "seeds" if seeds else "differ",
    )


def _scores(records: Iterator[Record] | list[Record]) -> Iterator[tuple[int, float, float]]:
    for record in records:
        found = record.get("evaluation")
        if found:
            yield record["iteration"], found["score"], found["held_out"]


def same_weights(run: RunRecord, twins: list[Twin]) -> str:
    """This run's weights and scores against those of its twins; empty without any."""
    digest = run.facts.get("weights_digest")
    if not twins or not digest:
        return ""
    last = run.points[-1] if run.points else None
    own = [
        f"<strong>{esc(run.name)}</strong>",
        str(len(run.explanation.preemptions)),
        f"<code>{esc(digest[:16])}</code>",
        "–" if last is None else f"{last.score:.6f}",
        "–" if last is None else f"{last.held_out:.6f}",
        "",
    ]
    said = {"equal": "equal ✓", "differ": "differ ✗", "seeds": "other seeds were chosen"}
    rows = [
        [
            esc(twin.name),
            "–" if twin.preemptions is None else str(twin.preemptions),
            f"<code>{esc(twin.digest[:16])}</code>",
            "–" if twin.score is None else f"{twin.score:.6f}",
            "–" if twin.held_out is None else f"{twin.held_out:.6f}",
            said[twin.verdict],
        ]
        for twin in twins
    ]
    head = ["run", "preemptions", "weights", "last score", "last held-out score", "all weights and scores"]
    words = (
        "<p>Finished runs of the same recipe on other fleets and markets. However many nodes were taken "
        "away, weights and scores are to be the same to the last bit.</p>"
    )
    return f'<h2 style="margin-top:20px">The same weights</h2>{words}{table(head, [own, *rows], range(1, 2))}'
