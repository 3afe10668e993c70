"""How a run ends that is not let finish, and how it goes on."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spotlight_core.events import Lost
from spotlight_core.executor.processes import run_processes
from spotlight_core.journal import read_words
from spotlight_core.market.node_records import recompute_usd
from spotlight_core.market.prices import PriceBook
from tasks.run_folder import RunFolder, read_records
from tasks.tracking import TrackedRun, prepare
from tests.flows.live import (
    START_SECONDS,
    command,
    ended,
    environment,
    gone,
    in_phase,
    killed,
    nothing_left,
    one_value_each,
    started,
    train,
    write_inputs,
    writing_checkpoint,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of runs for all tests here: a fresh database costs seconds to migrate."""
    return write_inputs(tmp_path_factory.mktemp("e2e"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_driver_killed_in_rollout_training_and_checkpointing_ends_with_the_same_weights(
    runs: Path,
) -> None:
    """Four lives of one run, on LoRA, log-probabilities, warm-up and two rewards at once."""
    whole = train(runs, "unbroken", recipe="lora")
    folder = RunFolder(runs / "broken")

    killed(runs, "broken", recipe="lora", moment=in_phase("rollout", 1))
    assert run_processes(folder.run_id) != []
    down = [sys.executable, "-m", "flows.cli", "down", "broken", "--runs", str(runs)]
    began = time.monotonic()
    subprocess.run(down, check=True, env=environment(), capture_output=True)
    assert time.monotonic() - began < 15
    nothing_left(folder)

    killed(runs, "broken", "--resume", recipe="lora", moment=in_phase("train", 2))
    assert [record["iteration"] for record in read_records(folder.iterations)] == [-1, 0, 1]
    killed(runs, "broken", "--resume", recipe="lora", moment=writing_checkpoint(3))
    assert [path.name for path in folder.checkpoints.glob("*") if path.name == "3"] == []

    assert train(runs, "broken", "--resume", recipe="lora") == whole
    assert [record["iteration"] for record in read_records(folder.iterations)] == [-1, 0, 1, 2, 3]
    assert folder.facts()["epoch"] == 3
    one_value_each(folder)
    same_history(folder, RunFolder(runs / "unbroken"))
    prices = PriceBook({"reserved": 10.08, "spot": 2.87})
    own = recompute_usd(folder.nodes, prices, now=0.0)
    assert sum(own.values()) == pytest.approx(folder.facts()["usd_total"], abs=1e-9)
    nothing_left(folder)


def same_history(broken: RunFolder, whole: RunFolder) -> None:
    """What MLflow holds of both runs, except time and money, is equal: each key, step and value."""
    histories = []
    for folder in (broken, whole):
        tracked = TrackedRun(prepare(folder.runs), folder.facts()["mlflow_run_id"], folder)
        keys = {key for record in read_records(folder.iterations) for key in record["metrics"]}
        kept = sorted(key for key in keys if not key.startswith(("seconds/", "cost/", "gpu_hours/", "spot/")))
        kept.remove("explore/overlap_share")  # of time
        histories.append({key: [(step, value) for step, value, _ in tracked.values(key)] for key in kept})
    assert histories[0] == histories[1]
    assert {"train/kl", "train/lr", "reward/ocr", "reward/jpeg_size"} <= histories[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [3, 12])
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
    "signals",
    [
        [signal.SIGTERM],
        pytest.param([signal.SIGHUP], marks=pytest.mark.soak),
        [signal.SIGINT, signal.SIGINT],
    ],
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
        ends = [word.cause for word in read_words(folder.journal) if isinstance(word, Lost)]
        assert ends == ["shutdown"] * 3
        assert not folder.coordinator.exists()
        assert json.loads(folder.run_json.read_text())["status"] == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "mark"),
    [
        ("Prefect API", "prefect.server.api"),
        ("Ray head", "gcs_server"),
        ("coordinator", "coordinator_process"),
    ],
)
def test_a_run_whose_part_dies_ends_with_a_word_and_leaves_nothing(runs: Path, part: str, mark: str) -> None:
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
