"""The report of a run: one HTML file that opens anywhere, offline, from the run folder's files only."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

from plotly.offline import get_plotlyjs

from spotlight_core.durable import write_text
from tasks import report_preemptions, report_throughput
from tasks import report_sections as sections
from tasks.report_data import RunRecord, read_run
from tasks.report_figures import contrast_figure, correlation_figure, score_figure
from tasks.report_throughput import RunChanges
from tasks.report_timeline import closed_pause, every_segment, joined_segments, timeline_figure
from tasks.run_folder import RunFolder

PAGE = Path(__file__).parent / "report_page.html"


def _figures(
    run: RunRecord, baseline: RunRecord | None, changes: RunChanges, others: RunChanges | None
) -> str:
    figures = {
        "score_iterations": score_figure(run, "iterations", baseline),
        "score_usd": score_figure(run, "usd", baseline),
        "timeline": timeline_figure(run, every_segment(run)),
        "timeline_whole": timeline_figure(run, joined_segments(run, closed_pause(run))),
        "contrast": contrast_figure(run),
        "correlation": correlation_figure(run),
        "preemptions": report_preemptions.preemptions_figure(run),
    }
    if changes.found:
        figures["throughput"] = report_throughput.figure(changes, others)
    # A request's id or a file's name must not be able to end the script element.
    return json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _changes(run: RunRecord) -> RunChanges:
    return RunChanges(run=run.name, began=run.began, found=report_throughput.changes(run.words))


def _parts(run: RunRecord, baseline: RunRecord | None, folder: Path) -> dict[str, str]:
    began = datetime.fromtimestamp(run.began, tz=UTC).strftime("%Y-%m-%d %H:%M UTC") if run.began else "never"
    changes, others = _changes(run), None if baseline is None else _changes(baseline)
    preemptions = report_preemptions.section(run, report_preemptions.find_twins(folder))
    return {
        "title": sections.esc(f"{run.name} · Spotlight run"),
        "heading": sections.esc(run.name),
        "summary": sections.esc(sections.summary(run)),
        "notes": sections.notes(run),
        "tiles": sections.tiles(run),
        "parts": sections.parts(run),
        "pictures": sections.pictures(run),
        "timeline": sections.timeline_words(run),
        "comparison": sections.comparison(run, baseline),
        "contrast": sections.contrast_words(run),
        "correlation": sections.correlation_words(run),
        "money": sections.money(run),
        "preemptions": preemptions + report_throughput.section(changes, others),
        "recipe": sections.recipe(run),
        "footer": f"Begun {began}. Made from the run folder's own files.",
        "figures": _figures(run, baseline, changes, others),
        "plotly": get_plotlyjs(),
    }


def write_report(run_folder: Path, *, baseline: Path | None = None) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    ``baseline`` is another run's folder to compare with.  A run that stopped early gets a report
    that says what it lacks.

    Raises:
        BadInputError: a folder holds no run, or one of its files cannot be read.
    """
    run = read_run(run_folder)
    parts = _parts(run, None if baseline is None else read_run(baseline), run_folder)
    # One pass, so that text from the run that looks like a placeholder stays text.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], PAGE.read_text(encoding="utf-8"))
    path = RunFolder(run_folder).report
    write_text(path, page)
    return path
