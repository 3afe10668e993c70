"""What `spotlight trace` prints at a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotlight_core.elastic.stranded import Stranded
from spotlight_core.market.trace_summary import ProgressSummary, TraceSummary

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """One character a value, from 0 to the greatest; a blank for none at all."""
    most = max(values, default=0.0)
    if not most:
        return " " * len(values)
    return "".join(
        " " if value <= 0 else BARS[min(len(BARS) - 1, int(value / most * len(BARS)))] for value in values
    )


def one_line(summary: TraceSummary | ProgressSummary) -> str:
    """The summary as words."""
    if isinstance(summary, ProgressSummary):
        strikes = f"{_many(summary.notices, 'notice')}, {_many(summary.kills, 'kill')}"
        last = summary.last_iteration
        return (
            f"{strikes} and {_many(summary.returns, 'return')} of {', '.join(summary.nodes) or 'no node'}, "
            f"keyed to a run's progress (iterations {summary.first_iteration} to {last})"
        )
    return (
        f"{summary.hours:.2f} h, {summary.mean_nodes:.1f} nodes on average "
        f"({summary.least_nodes} to {summary.most_nodes}), {_many(summary.preemptions, 'preemption')}, "
        f"{summary.preemptions_per_hour:.2f} an hour, {summary.preemptions_per_node_hour:.3f} a node-hour, "
        f"{_many(summary.storms, 'storm')}"
    )


def trace_view(name: str, summary: TraceSummary | ProgressSummary) -> RenderableType:
    """The summary, what it looks like over time, and what was wrong with the file."""
    lines = [Text(f"{name}: {one_line(summary)}")]
    if isinstance(summary, ProgressSummary):
        lines += [Text(f"  {line}") for line in summary.lines]
    elif summary.nodes_over_time:
        lines.append(Text(f"nodes  0 to {max(summary.nodes_over_time):.1f}"))
        lines.append(Text(sparkline(summary.nodes_over_time), no_wrap=True))
        width = len(summary.nodes_over_time)
        lines.append(Text("0 h" + f"{summary.hours:.1f} h".rjust(width - 3)))
    lines += [Text(f"repaired: {repair}") for repair in summary.repairs]
    return Group(*lines)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def stranded_view(name: str, found: Mapping[str, Stranded]) -> Table:
    """One row for each way to form groups."""
    table = Table(title=f"{name}: GPUs that are there and cannot work", title_justify="left")
    table.add_column("groups")
    for heading in ("GPU-h there", "GPU-h stranded", "stranded", "time with any stranded"):
        table.add_column(heading, justify="right")
    for kind, one in found.items():
        table.add_row(
            kind,
            f"{one.available_gpu_seconds / 3600:.2f}",
            f"{one.stranded_gpu_seconds / 3600:.3f}",
            f"{one.share:.2%}",
            f"{one.any_share:.1%}",
        )
    return table
