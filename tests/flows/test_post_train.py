"""The whole path through the flow, on real Prefect, Ray and MLflow, at the smallest size with every part."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from spotlight_core.config import RunConfig
from spotlight_core.deciders import build_decider
from spotlight_core.events import Event, Start
from spotlight_core.journal import read_words
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.node_records import recompute_usd
from spotlight_core.market.prices import PriceBook
from spotlight_core.simulator.executor import SimExecutor
from spotlight_core.types import Decision
from tasks.run_folder import RunFolder, read_records
from tests.flows.live import nothing_left, one_value_each, train, write_inputs
from tests.parity.conftest import COSTS, virtual_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of runs for all tests here: a fresh database costs seconds to migrate."""
    return write_inputs(tmp_path_factory.mktemp("e2e"))


def query(folder: RunFolder, sql: str) -> list[Any]:
    with sqlite3.connect(folder.runs / ".prefect" / "prefect.db") as database:
        return database.execute(sql, (folder.name,)).fetchall()


@pytest.fixture(scope="module")
def whole(runs: Path) -> RunFolder:
    """A finished run that nothing disturbed."""
    digest = train(runs, "whole")
    folder = RunFolder(runs / "whole")
    assert folder.facts()["weights_digest"] == digest
    return folder


def test_a_run_from_prompts_to_trained_weights(whole: RunFolder) -> None:
    folder = whole
    nothing_left(folder)
    records = list(read_records(folder.iterations))
    assert [record["iteration"] for record in records] == [-1, 0, 1]
    assert records[0]["evaluation"]["policy"]["label"] == "base"
    assert records[1]["evaluation"] is None
    assert records[2]["evaluation"]["policy"] | {"digest": ""} == {"label": "ema", "number": 2, "digest": ""}
    assert records[1]["state"]["policy"]["digest"] != records[0]["state"]["policy"]["digest"]
    # Explored with the weights of the iteration before, trained on in the next, audited there.
    assert [record["metrics"]["explore/seeds"] for record in records[1:]] == [0.0, 4.0]
    assert "explore/std_selected" in records[2]["metrics"]
    assert records[2]["metrics"]["explore/audits_skipped"] in (0.0, 1.0)
    assert [decision["iteration"] for decision in read_records(folder.decisions)] == [1, 2]
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["1", "2"]

    facts = folder.facts()
    assert facts["status"] == "finished"
    assert facts["cpu_capability"]
    assert folder.report.read_text().count("<html") == 1
    assert (folder.images / "base.png").stat().st_size > 0
    assert (folder.images / "final.png").stat().st_size > 0
    one_value_each(folder)

    # Dollars three times: the ledger's, folded from the journal, and summed from the nodes' own logs.
    prices = PriceBook({"reserved": 10.08, "spot": 2.87})
    ledger = CostLedger.replayed(prices, read_words(folder.journal))
    own = recompute_usd(folder.nodes, prices, now=0.0)
    assert facts["usd_total"] == pytest.approx(ledger.usd(ledger.last_at), abs=1e-9)
    assert sum(own.values()) == pytest.approx(facts["usd_total"], abs=1e-9)

    runs_of = (
        "select fr.name from flow_run fr join flow f on f.id = fr.flow_id where f.name = '{}' and ? != ''"
    )
    assert query(folder, runs_of.format("post-train")) == [("whole",)]
    assert sorted(query(folder, runs_of.format("rl-iteration"))) == [("iter 0",), ("iter 1",)]
    states = "select distinct state_type from flow_run where ? != ''"
    assert query(folder, states) == [("COMPLETED",)]
    tasks = {name for (name,) in query(folder, "select name from task_run where ? != ''")}
    expected = {"rollout 2×2", "reward 4 images", "explore 1×4 @ 3 steps", "train 2×2", "publish old-1"}
    assert expected <= tasks
    keys = {key for (key,) in query(folder, "select distinct key from artifact where ? != ''")}
    assert keys == {"whole-iteration", "whole-images", "whole-progress", "whole-tracking"}


def test_the_journal_replays_to_identical_commands(whole: RunFolder) -> None:
    config = RunConfig.model_validate_json(whole.recipe.read_text())
    decider = build_decider(config)
    recorded = list(read_words(whole.journal))

    replayed: list[object] = []
    for word in recorded:
        if isinstance(word, Event):
            replayed += [word, *decider.decide(word)]

    assert any(isinstance(word, Start) for word in recorded)
    assert replayed == recorded


def test_a_simulated_replay_takes_the_decisions_of_the_live_run(whole: RunFolder) -> None:
    config = RunConfig.model_validate_json(whole.recipe.read_text())
    scores = {k: v for record in read_records(whole.scores) for k, v in record["scores"].items()}

    run = virtual_run(config, SimExecutor(COSTS), rewards=lambda request: scores[request.id])

    live = [TypeAdapter(Decision).validate_python(record) for record in read_records(whole.decisions)]
    assert [report.decision for report in run.reports] == live
    assert any(decision.selected.values() for decision in live)
