"""What `spotlight explain` and `spotlight audit` print at a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotlight_core.market.audit import AuditReport
from spotlight_core.market.explain import ExplainedPreemption, ExplainedRequest, Explanation

MOST_BREACHES = 10


def explanation_view(run: str, explanation: Explanation, *, begun: bool) -> RenderableType:
    """A table of the preemptions and a line with their total; a hint where there is nothing to show."""
    if not begun:
        return Text(f"{run} has no journal yet: nothing has happened to it.")
    if not explanation.preemptions:
        lives = f"{explanation.lives} node {'life' if explanation.lives == 1 else 'lives'}"
        return Text(
            f"No node of {run} was preempted in {lives}. A trace replays preemptions: "
            "spotlight train quickstart --trace FILE."
        )
    table = Table(title=f"Preemptions of {run}", title_justify="left", expand=False)
    for heading in ("at", "node", "in flight", "saved", "went on", "lost"):
        table.add_column(heading, overflow="fold")
    for one in explanation.preemptions:
        table.add_row(*_row(one, explanation.began), end_section=True)
    return Group(table, Text(total_line(explanation)))


def total_line(explanation: Explanation) -> str:
    """All preemptions in one line."""
    count = len(explanation.preemptions)
    noticed = sum(one.cause == "notice" for one in explanation.preemptions)
    items = [item for one in explanation.preemptions for item in one.requests]
    outcomes = [item.outcome for item in items]
    kinds = ", ".join(
        f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes) if outcomes.count(name)
    )
    requests = f"{len(items)} request{'' if len(items) == 1 else 's'} in flight"
    lost = _lost(explanation.denoise_steps_lost, explanation.exact)
    return (
        f"{count} preemption{'' if count == 1 else 's'}, {noticed} with notice; {requests}"
        f"{f' ({kinds})' if kinds else ''}; {lost} lost, {explanation.lost_gpu_seconds:.2f} GPU-s, "
        f"${explanation.lost_usd:.5f}"
    )


def _lost(steps: float, exact: bool) -> str:
    said = f"{steps:.0f} denoise step{'' if steps == 1 else 's'}"
    if exact:
        return said
    return f"about {steps:.1f} denoise steps" if steps else "an unknown number of denoise steps"


def _row(one: ExplainedPreemption, began: float) -> tuple[str, ...]:
    where = "" if one.phase is None else f"\niteration {one.iteration}, {one.phase}"
    told = {"notice": f"notice ({one.source})", "killed": "killed, no notice", "silent": "silent, no notice"}
    cost = "nothing" if not one.lost_gpu_seconds else f"{one.lost_gpu_seconds:.2f} GPU-s, ${one.lost_usd:.5f}"
    return (
        f"{one.at - began:.1f} s{where}",
        f"{one.node}#{one.incarnation} {one.pool}\n{told[one.cause]}",
        "\n".join(_in_flight(item) for item in one.requests) or "nothing",
        "\n".join(_saved(item) for item in one.requests) or "–",
        "\n".join(_went_on(item, one.at) for item in one.requests) or "–",
        f"{_lost(one.denoise_steps_lost, one.exact)}\n{cost}" if one.lost_gpu_seconds else "nothing",
    )


def _in_flight(item: ExplainedRequest) -> str:
    if item.denoise_step is None:
        return f"{item.request} ({item.kind})"
    if item.exact:
        place = f"at step {item.denoise_step:.0f}"
    elif item.denoise_steps_lost:
        place = f"at step about {item.denoise_step:.1f}"
    else:
        place = f"past step {item.saved_denoise_step}"
    return f"{item.request} ({item.kind}) {place}"


def _saved(item: ExplainedRequest) -> str:
    if item.outcome in ("finished", "dropped"):
        return item.outcome
    return f"step {item.saved_denoise_step}" if item.saved_denoise_step else "nothing"


def _went_on(item: ExplainedRequest, at: float) -> str:
    if item.resumed_at is None:
        return {"finished": "in the grace", "dropped": "no longer wanted"}.get(item.outcome, "still waits")
    where = "from noise" if not item.from_denoise_step else f"at step {item.from_denoise_step}"
    return f"{item.resumed_on} {where}, after {item.resumed_at - at:.2f} s"


def audit_view(run: str, report: AuditReport) -> RenderableType:
    """A line for each promise, its breaches below it, and the verdict."""
    lines = [
        Text(f"{run}: {report.words:,} words of journal" + ("" if report.finished else ", not finished"))
    ]
    for verdict in report.verdicts:
        mark = Text("✓ ", style="green") if verdict.kept else Text("✗ ", style="bold red")
        lines.append(mark + Text(verdict.said) + Text(f"  {verdict.counted}", style="dim"))
        lines += [Text(f"    {breach}", style="red") for breach in verdict.breaches[:MOST_BREACHES]]
        if len(verdict.breaches) > MOST_BREACHES:
            lines.append(Text(f"    and {len(verdict.breaches) - MOST_BREACHES} more", style="red"))
    broken = sum(not verdict.kept for verdict in report.verdicts)
    lines.append(Text(_verdict(broken), style="bold"))
    return Group(*lines)


def _verdict(broken: int) -> str:
    if not broken:
        return "All promises kept."
    return f"{broken} promise{'' if broken == 1 else 's'} broken."
