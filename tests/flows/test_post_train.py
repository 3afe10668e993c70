"""The whole path through the flow, on real Prefect, Ray and MLflow, at the smallest size that has every part.

Slow ones: what must not change a bit of the weights (preemptions, a killed driver), and how a run ends.
"""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from spotlight_core.config import RunConfig
from spotlight_core.events import Event, Start
from spotlight_core.executor.processes import ray_folder, run_processes
from spotlight_core.market.ledger import CostLedger, recompute_usd
from spotlight_core.market.prices import PriceBook
from spotlight_core.recipes import RECIPES
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.simulator.executor import SimExecutor
from spotlight_core.types import Decision
from tasks.recovery import journal_words
from tasks.run_folder import RunFolder, read_records
from tasks.tracking import TrackedRun, prepare
from tests.parity.conftest import COSTS, virtual_run

RECIPE = f"""
iterations = 2
[data]
prompts = "{RECIPES}/prompts/digits"
prompts_per_iteration = 2
seeds_per_prompt = 2
[sampler]
type = "ode"
denoise_steps = 4
[optimizer]
lr = 1e-3
[exploration]
type = "fixed_arm"
seeds_per_prompt = 4
effective_steps = 3
seeds_per_request = 2
unexplored_prompts = 1
audit_every = 1
[evaluation]
every = 2
images = 4
final_images = 4
images_per_request = 2
[fleet]
memory_gib = 1.0
"""
POINTS = [
    ("notice", {"iteration": 1, "phase": "explore", "node": "spot-0", "seconds_left": 20}),
    ("kill", {"iteration": 1, "phase": "explore", "node": "spot-1"}),
]
TRACE = "".join(
    json.dumps({"event": event, "nth_request": 1, "denoise_step": 2, **where}) + "\n"
    for event, where in POINTS
)
START_SECONDS = 120.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of runs for all tests here: a fresh database costs seconds to migrate."""
    folder = tmp_path_factory.mktemp("e2e")
    (folder / "mini.toml").write_text(RECIPE)
    (folder / "trace.jsonl").write_text(TRACE)
    return folder / "runs"


def command(runs: Path, name: str, *options: str) -> list[str]:
    recipe = str(runs.parent / "mini.toml")
    start = [sys.executable, "-m", "flows.cli", "train", recipe, "--runs", str(runs), "--name", name]
    return [*start, *options]


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    return kept | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def train(runs: Path, name: str, *options: str) -> str:
    """Run to the end; the hash that the last line tells."""
    done = subprocess.run(
        command(runs, name, *options),
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    word, _, digest = done.stdout.splitlines()[-1].partition(" ")
    assert word == "weights"
    assert len(digest) == 64
    return digest


def nothing_left(folder: RunFolder) -> None:
    assert run_processes(folder.run_id) == []
    assert not ray_folder(folder.run_id).exists()
    assert folder.holder() is None


def one_value_each(folder: RunFolder) -> None:
    """The store holds exactly what the log says, once."""
    tracked = TrackedRun(prepare(folder.runs), folder.facts()["mlflow_run_id"], folder)
    said: dict[str, list[tuple[int, float, int]]] = {}
    for record in read_records(folder.iterations):
        for key, value in record["metrics"].items():
            said.setdefault(key, []).append((record["iteration"], value, round(record["at"] * 1000)))
    assert said
    for key, values in said.items():
        assert tracked.values(key) == values, key


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
    ledger = CostLedger.replayed(prices, journal_words(folder))
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
    rules = SchedulingRules(lease_seconds=config.fleet.lease_seconds, max_attempts=config.fleet.max_attempts)
    scheduler = RequestScheduler(rules)
    recorded = list(journal_words(whole))

    replayed: list[object] = []
    for word in recorded:
        if isinstance(word, Event):
            replayed += [word, *scheduler.decide(word)]

    assert any(isinstance(word, Start) for word in recorded)
    assert replayed == recorded


def test_a_simulated_replay_takes_the_decisions_of_the_live_run(whole: RunFolder) -> None:
    config = RunConfig.model_validate_json(whole.recipe.read_text())
    scores = {k: v for record in read_records(whole.scores) for k, v in record["scores"].items()}

    run = virtual_run(config, SimExecutor(COSTS), rewards=lambda request: scores[request.id])

    live = [TypeAdapter(Decision).validate_python(record) for record in read_records(whole.decisions)]
    assert [report.decision for report in run.reports] == live
    assert any(decision.selected.values() for decision in live)


@pytest.mark.slow
def test_preemptions_change_nothing_in_the_weights(runs: Path) -> None:
    # Eight requests of exploration, so that each spot node takes one for certain.
    more = ("--override", "exploration.seeds_per_prompt=16")
    calm = train(runs, "calm", *more, "--trace", "none")
    rough = train(runs, "rough", *more, "--trace", str(runs.parent / "trace.jsonl"))

    assert rough == calm
    folder = RunFolder(runs / "rough")
    ledger = CostLedger.replayed(PriceBook({"reserved": 10.08, "spot": 2.87}), journal_words(folder))
    assert sorted(preemption.cause for preemption in ledger.preemptions) == ["killed", "notice"]
    assert ledger.resumed_requests == 1
    assert ledger.recomputed_requests == 1
    nothing_left(folder)


def started(runs: Path, name: str, *options: str, errors: bool = False) -> "subprocess.Popen[str]":
    """A run under way that has finished its first iteration."""
    process = subprocess.Popen(
        command(runs, name, "--override", "iterations=4", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if errors else None,
        text=True,
        env=environment(),
    )
    log, deadline = RunFolder(runs / name).iterations, time.monotonic() + START_SECONDS
    while sum(1 for _ in read_records(log)) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def ended(process: "subprocess.Popen[str]", seconds: float) -> int:
    code = process.wait(seconds)
    assert process.stdout is not None
    process.stdout.close()
    return code


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_driver_is_resumed_to_the_same_weights(runs: Path) -> None:
    whole = train(runs, "unbroken", "--override", "iterations=4")
    killed = started(runs, "broken")
    killed.kill()
    assert ended(killed, 5) == -signal.SIGKILL
    folder = RunFolder(runs / "broken")
    assert run_processes(folder.run_id) != []

    down = [sys.executable, "-m", "flows.cli", "down", "broken", "--runs", str(runs)]
    began = time.monotonic()
    subprocess.run(down, check=True, env=environment(), capture_output=True)
    assert time.monotonic() - began < 15
    nothing_left(folder)

    assert train(runs, "broken", "--override", "iterations=4", "--resume") == whole
    assert [record["iteration"] for record in read_records(folder.iterations)] == [-1, 0, 1, 2, 3]
    assert folder.facts()["epoch"] == 1
    one_value_each(folder)
    prices = PriceBook({"reserved": 10.08, "spot": 2.87})
    own = recompute_usd(folder.nodes, prices, now=0.0)
    assert sum(own.values()) == pytest.approx(folder.facts()["usd_total"], abs=1e-9)
    nothing_left(folder)


def gone(folder: RunFolder, deadline: float) -> None:
    """Nothing of the run is left by ``deadline``, nor the process that cleaned up (it holds the lock)."""
    while time.monotonic() < deadline:
        if not (folder.holder() or run_processes(folder.run_id) or ray_folder(folder.run_id).exists()):
            break
        time.sleep(0.2)
    nothing_left(folder)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3, 9, 15])
def test_a_signal_while_everything_starts_leaves_nothing_either(runs: Path, seconds: float) -> None:
    name = f"early-{seconds}"
    process = subprocess.Popen(command(runs, name), stdout=subprocess.PIPE, text=True, env=environment())
    folder, deadline = RunFolder(runs / name), time.monotonic() + START_SECONDS
    while not folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()

    assert ended(process, 15) == 130
    gone(folder, began + 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT, signal.SIGINT]]
)
def test_nothing_is_left_fifteen_seconds_after_a_signal(runs: Path, signals: list[signal.Signals]) -> None:
    name = "-".join(number.name.lower() for number in signals)
    process = started(runs, name)
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.3)

    assert ended(process, 15) == 130
    folder = RunFolder(runs / name)
    gone(folder, began + 15)
    if len(signals) == 1:
        stops = [list(read_records(log))[-1]["event"] for log in folder.nodes.glob("*.jsonl")]
        assert stops == ["stop"] * 3
        assert json.loads(folder.run_json.read_text())["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "mark"), [("Prefect API", "prefect.server.api"), ("Ray head", "gcs_server")]
)
def test_a_run_whose_server_dies_ends_with_a_word_and_leaves_nothing(
    runs: Path, part: str, mark: str
) -> None:
    name = part.replace(" ", "-")
    process = started(runs, name, "--override", "iterations=300", errors=True)
    folder = RunFolder(runs / name)
    [server] = [each for each in run_processes(folder.run_id) if mark in " ".join(each.cmdline())]
    server.kill()
    deadline = time.monotonic() + 25

    _, said = process.communicate(timeout=25)

    assert process.returncode == 1
    last = said.splitlines()[-1]
    assert last.startswith(f"error: the {part} has ended by itself: continue with --resume")
    gone(folder, deadline)
