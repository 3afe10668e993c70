"""The report's plot of a node's throughput around each change of its GPUs: how long a change is felt.

No word of the journal tells of a single denoise step: between two that say how far a lease is (Started,
Committed, Finished) its steps are taken for evenly spread.
"""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from spotlight_core.events import (
    Committed,
    Event,
    Finished,
    NodeKey,
    RankLost,
    RankNotice,
    RankReady,
    Regrouped,
    SPGroup,
    Start,
    Started,
    Word,
)
from tasks.report_figures import Figure, axis, base_layout
from tasks.report_sections import duration, esc, table

BIN_SECONDS = 0.1
BEFORE_SECONDS, AFTER_SECONDS = 2.0, 8.0
LEVEL_SECONDS = 1.5  # what the throughput before a change, and after it, is the mean of
TOGETHER_SECONDS = 1.0  # words of one node that come closer than this tell of one change
MOST_CHANGES = 12
_GROUPS = "groups "
COLORS = ("@rollout", "@training", "@explore", "@lost")

RankWord = RankNotice | RankLost | RankReady | Regrouped


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Denoise steps of a lease on a node, from one word about it to the next; ends in seconds."""

    node: NodeKey
    start: float
    end: float
    denoise_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a node's GPUs at ``at``.

    ``rates``: denoise steps per second in each bin of ``BIN_SECONDS`` from ``BEFORE_SECONDS`` before it
    to ``AFTER_SECONDS`` after.
    """

    node: str
    at: float
    said: tuple[str, ...]
    rates: tuple[float, ...]

    @property
    def before(self) -> float:
        """Mean denoise steps per second just before."""
        return statistics.fmean(self.rates[_bins(BEFORE_SECONDS - LEVEL_SECONDS) : _bins(BEFORE_SECONDS)])

    @property
    def after(self) -> float:
        """Mean denoise steps per second at the end of what is shown."""
        return statistics.fmean(self.rates[-_bins(LEVEL_SECONDS) :])

    @property
    def stalled_seconds(self) -> float:
        """How long the node did less than half of what it did before and after, whichever is less.

        One that is not back by the end of what is shown is measured by what it did before.
        """
        low = min(self.before, self.after or self.before) / 2
        return BIN_SECONDS * sum(rate < low for rate in self.rates[_bins(BEFORE_SECONDS) :])


def changes(words: Iterable[Word]) -> tuple[Change, ...]:
    """The changes of the nodes' GPUs in a run's journal, by time; none in a run whose nodes stay whole."""
    known = list(words)
    stretches = list(_stretches(known))
    found: list[tuple[NodeKey, float, list[str]]] = []
    last: dict[NodeKey, tuple[float, list[str]]] = {}
    for word in known:
        if not isinstance(word, RankWord):
            continue
        key = (word.node, word.incarnation)
        until, said = last.get(key, (float("-inf"), []))
        if word.at > until:
            said = []
            found.append((key, word.at, said))
        said.append(_said(word))
        last[key] = (word.at + TOGETHER_SECONDS, said)
    return tuple(
        Change(node=key[0], at=at, said=tuple(dict.fromkeys(said)), rates=_rates(stretches, key, at))
        for key, at, said in found
        if not all(one.startswith(_GROUPS) for one in said)  # a node that joins forms its groups first
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChanges:
    """The changes of a run that began at ``began``."""

    run: str
    began: float
    found: tuple[Change, ...]


def section(run: RunChanges, baseline: RunChanges | None = None) -> str:
    """The plot and a table of the changes; empty where there is none."""
    if not run.found:
        return ""
    label = "Denoise steps per second of a node around each change of its GPUs"
    place = f'class="plot" id="throughput" data-figure="throughput" role="img" aria-label="{label}"'
    rows = _rows(run, "") + ([] if baseline is None else _rows(baseline, f"{baseline.run}: "))
    words = (
        "<p>Denoise steps per second in bins of 100 ms. Between two words about a request its steps are "
        "taken for evenly spread, so that short pauses may hide.</p>"
    )
    head = ["at", "node", "change", "steps/s before", "steps/s after", "below half for"]
    title = '<h2 style="margin-top:20px">When GPUs came and went</h2>'
    return f"{title}{words}<div {place}></div>{table(head, rows)}"


def _rows(run: RunChanges, prefix: str) -> list[list[str]]:
    return [
        [
            duration(change.at - run.began),
            esc(f"{prefix}{change.node}"),
            "<br>".join(esc(said) for said in change.said),
            f"{change.before:.1f}",
            f"{change.after:.1f}",
            f"{change.stalled_seconds:.1f} s",
        ]
        for change in run.found
    ]


def figure(run: RunChanges, baseline: RunChanges | None = None) -> Figure:
    """A line for each change, the moment of the change at 0; the first ``MOST_CHANGES`` of each run."""
    lines = _lines(run, "", "solid") + ([] if baseline is None else _lines(baseline, baseline.run, "dot"))
    return {
        "data": lines,
        "layout": base_layout(
            xaxis=axis("seconds from the change"),
            yaxis=axis("denoise steps per second", rangemode="tozero"),
            height=280,
        ),
    }


def _lines(run: RunChanges, name: str, dash: str) -> list[Figure]:
    seconds = [
        round((number + 0.5) * BIN_SECONDS - BEFORE_SECONDS, 3)
        for number in range(_bins(BEFORE_SECONDS + AFTER_SECONDS))
    ]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"{name} {number}. {change.node}: {change.said[0]}".strip(),
            "x": seconds,
            "y": [round(rate, 3) for rate in change.rates],
            "line": {
                "color": COLORS[(number - 1) % len(COLORS)],
                "width": 2,
                "shape": "hvh",
                "dash": dash,
            },
            "hovertemplate": "%{x:.2f} s: %{y:.1f} steps/s<extra>%{fullData.name}</extra>",
        }
        for number, change in enumerate(run.found[:MOST_CHANGES], start=1)
    ]


def _stretches(words: Iterable[Word]) -> Iterator[Stretch]:
    starts: dict[str, Start] = {}
    reached: dict[str, tuple[float, int]] = {}  # of each lease that has begun: when it was how far
    for word in words:
        match word:
            case Start():
                starts[word.lease] = word
            case Started() if word.lease in starts and word.lease not in reached:
                reached[word.lease] = (word.at, starts[word.lease].from_denoise_step)
            case Committed() | Finished() if word.lease in reached:
                yield from _reached(word, starts[word.lease], reached)


def _reached(
    word: Committed | Finished, start: Start, reached: dict[str, tuple[float, int]]
) -> Iterator[Stretch]:
    since, step = reached[word.lease]
    now = start.request.fidelity.denoise_steps if isinstance(word, Finished) else word.next_denoise_step
    if now > step and word.at > since:
        yield Stretch(node=_node(start.group), start=since, end=word.at, denoise_steps=now - step)
        reached[word.lease] = (word.at, now)
    if isinstance(word, Finished):
        del reached[word.lease]


def _node(group: SPGroup) -> NodeKey:
    return group.node, group.incarnation


def _rates(stretches: Iterable[Stretch], node: NodeKey, at: float) -> tuple[float, ...]:
    first = at - BEFORE_SECONDS
    rates = [0.0] * _bins(BEFORE_SECONDS + AFTER_SECONDS)
    for part in stretches:
        if part.node != node:
            continue
        low = max(0, int((part.start - first) / BIN_SECONDS))
        high = min(len(rates), int((part.end - first) / BIN_SECONDS) + 1)
        for number in range(low, high):
            begin = first + number * BIN_SECONDS
            inside = min(part.end, begin + BIN_SECONDS) - max(part.start, begin)
            share = max(0.0, inside) / (part.end - part.start)
            rates[number] += part.denoise_steps * share / BIN_SECONDS
    return tuple(rates)


def _bins(seconds: float) -> int:
    return round(seconds / BIN_SECONDS)


def _said(word: Event) -> str:
    match word:
        case RankNotice():
            return f"notice for rank {', '.join(map(str, word.ranks))}"
        case RankLost():
            return f"rank {word.rank} {word.cause}"
        case RankReady():
            return f"rank {word.rank} is back"
        case Regrouped():
            groups = " | ".join("+".join(map(str, ranks)) for ranks in word.groups)
            return f"{_GROUPS}{groups}"
    return type(word).__name__
