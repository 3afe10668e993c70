"""Commands that ask a run's own files what happened: `spotlight explain` and `spotlight audit`."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import typer

from flows.options import RUNS, AsJson, RunName, Runs

if TYPE_CHECKING:
    from tasks.run_folder import RunFolder


def explain(run: RunName, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Each preemption of a run: what was in flight, what was saved, where it went on, what it cost."""
    from rich.console import Console

    from flows.explain_view import explanation_view
    from flows.targets import begun_recipe, existing_run
    from spotlight_core.journal import read_words
    from spotlight_core.market.explain import explain as explained
    from spotlight_core.market.node_records import read_strikes
    from spotlight_core.market.prices import PriceBook

    folder = existing_run(runs, run)
    prices = PriceBook(begun_recipe(folder).prices)
    words = list(read_words(folder.journal))
    # The nodes' logs after the journal: a strike is written before the Lost that it causes.
    explanation = explained(words, prices, read_strikes(folder.nodes))
    if as_json:
        totals = {
            "denoise_steps_lost": explanation.denoise_steps_lost,
            "exact": explanation.exact,
            "lost_gpu_seconds": explanation.lost_gpu_seconds,
            "lost_usd": explanation.lost_usd,
        }
        _print_json(dataclasses.asdict(explanation) | {"run": folder.name, "total": totals})
        return
    Console().print(explanation_view(folder.name, explanation, begun=bool(words)))


def audit(run: RunName, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Prove from a run's journal that every request finished exactly once, and the other promises.

    Also while the run goes on.  Exits with 1 if a promise was broken.
    """
    from rich.console import Console

    from flows.explain_view import audit_view
    from flows.targets import existing_run
    from spotlight_core.journal import read_words
    from spotlight_core.market.audit import Audit

    folder = existing_run(runs, run)
    auditor = Audit()
    for word in read_words(folder.journal):
        auditor.see(word)
    report = auditor.report(_evidence(folder))
    if as_json:
        verdicts = [
            {"promise": one.said, "kept": one.kept, "counted": one.counted, "breaches": one.breaches}
            for one in report.verdicts
        ]
        facts = {"run": folder.name, "finished": report.finished, "words": report.words, "kept": report.kept}
        _print_json(facts | {"promises": verdicts})
    else:
        Console().print(audit_view(folder.name, report))
    if not report.kept:
        raise typer.Exit(1)


def _evidence(folder: "RunFolder") -> Any:
    """What else the audit goes by; to be read after the journal, since the logs are ahead of it."""
    from flows.targets import begun_recipe
    from spotlight_core.market.audit_promises import Evidence
    from spotlight_core.market.node_records import read_lives, read_strikes

    return Evidence(
        finished=folder.facts().get("status") == "finished" and folder.holder() is None,
        commit_every_steps=begun_recipe(folder).fleet.commit_every_steps,
        lives=tuple(read_lives(folder.nodes)),
        strikes=read_strikes(folder.nodes),
    )


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
