"""A run on real Prefect, Ray and MLflow at the smallest size that has every part, driven from outside."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from spotlight_core.events import Phase
from spotlight_core.executor.processes import ray_folder, run_processes
from spotlight_core.recipes import RECIPES
from tasks.run_folder import RunFolder, read_records
from tasks.tracking import TrackedRun, prepare

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
LORA = """
extends = "mini"
iterations = 4
[model.lora]
rank = 4
alpha = 8
[sampler]
type = "flow_sde"
denoise_steps = 4
[sampler.window]
type = "random"
size = 2
[reward]
type = "weighted"
parts = [
    { weight = 1.0, reward = { type = "ocr" } },
    { weight = 0.5, reward = { type = "jpeg_size" } },
]
[loss]
type = "grpo"
kl_weight = 0.01
[advantage]
rewards = "normalise_each"
[optimizer]
lr = 1e-3
warmup_steps = 5
[ema]
interval = 2
"""
START_SECONDS = 120.0


def write_inputs(folder: Path) -> Path:
    """The recipes in ``folder``; returns the folder of its runs."""
    (folder / "mini.toml").write_text(RECIPE)
    (folder / "lora.toml").write_text(LORA)
    return folder / "runs"


def command(runs: Path, name: str, *options: str, recipe: str = "mini") -> list[str]:
    recipe = str(runs.parent / f"{recipe}.toml")
    start = [sys.executable, "-m", "flows.cli", "train", recipe, "--runs", str(runs), "--name", name]
    return [*start, *options]


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    return kept | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def train(runs: Path, name: str, *options: str, recipe: str = "mini", seconds: float = 280) -> str:
    """Run to the end; the hash that the last line tells."""
    done = subprocess.run(
        command(runs, name, *options, recipe=recipe),
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    word, _, digest = done.stdout.splitlines()[-1].partition(" ")
    assert word == "weights"
    assert len(digest) == 64
    return digest


def spotlight(runs: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and all that another command says of the runs in ``runs``."""
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments, "--runs", str(runs)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


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
    try:
        while sum(1 for _ in read_records(log)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    except AssertionError:
        process.kill()  # its coordinator ends by itself
        raise
    return process


def killed(runs: Path, name: str, *options: str, recipe: str, moment: Callable[[RunFolder], bool]) -> None:
    """Start the run and SIGKILL its driver at ``moment``, which is asked every few milliseconds."""
    process = subprocess.Popen(command(runs, name, *options, recipe=recipe), env=environment())
    folder, deadline = RunFolder(runs / name), time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None, "the run ended before the moment came"
        assert time.monotonic() < deadline
        if moment(folder):
            # Stopped first: the moment must still be there when the kill arrives.
            process.send_signal(signal.SIGSTOP)
            if moment(folder):
                break
            process.send_signal(signal.SIGCONT)
        time.sleep(0.003)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL


def in_phase(phase: Phase, iteration: int) -> Callable[[RunFolder], bool]:
    """The run is in ``phase`` of ``iteration``, by the last word of its journal about phases."""

    def moment(folder: RunFolder) -> bool:
        if not folder.journal.exists():
            return False
        changes = [
            json.loads(line)
            for line in folder.journal.read_text().split("\n")[:-1]
            if '"word":"PhaseChanged"' in line
        ]
        return bool(changes) and (changes[-1]["phase"], changes[-1]["iteration"]) == (phase, iteration)

    return moment


def writing_checkpoint(iteration: int) -> Callable[[RunFolder], bool]:
    """The checkpoint that ``iteration`` would start from is half written."""
    return lambda folder: any(folder.checkpoints.glob(f".{iteration}.*.tmp"))


def ended(process: "subprocess.Popen[str]", seconds: float) -> int:
    code = process.wait(seconds)
    assert process.stdout is not None
    process.stdout.close()
    return code


def gone(folder: RunFolder, deadline: float) -> None:
    """Nothing of the run is left by ``deadline``, nor the process that cleaned up (it holds the lock)."""
    while time.monotonic() < deadline:
        if not (folder.holder() or run_processes(folder.run_id) or ray_folder(folder.run_id).exists()):
            break
        time.sleep(0.2)
    nothing_left(folder)
