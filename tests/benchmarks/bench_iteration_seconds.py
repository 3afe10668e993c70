"""Seconds of an RL iteration by phase, and what the machinery adds to the work itself.

The value is the median iteration of a real run (Prefect, Ray, MLflow, preemptions off) over the same
work done in one process, one thing after the other, with nothing between: below 1 means that what
runs in parallel outweighs everything the machinery costs.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from spotlight_core.recipes import load_recipe
from tests.benchmarks import Measurement
from tests.benchmarks.one_process import OneProcess

ITERATIONS, SKIPPED = 6, 1  # the first iteration has no explored batch and cold caches
OVERRIDES = (
    f"iterations={ITERATIONS}",
    "evaluation.every=100",
    "evaluation.images=16",
    "evaluation.final_images=16",
    "exploration.audit_every=0",
)


def _live(folder: Path) -> tuple[float, Mapping[str, float]]:
    """Median seconds of an iteration of a real run, in all and by phase."""
    overrides = [part for override in OVERRIDES for part in ("--override", override)]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "flows.cli",
            "train",
            "quickstart",
            "--trace",
            "none",
            "--runs",
            str(folder),
            *overrides,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = (folder / "quickstart/iterations.jsonl").read_text().splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines][1 + SKIPPED : -1]  # the last one evaluates
    phases = sorted(name for name in metrics[0] if name.startswith("seconds/"))
    middle = {name: median(m[name] for m in metrics if name in m) for name in phases}
    return middle.pop("seconds/iteration"), middle


def measure() -> Measurement:
    with tempfile.TemporaryDirectory() as scratch:
        live, phases = _live(Path(scratch))
    alone = OneProcess(load_recipe("quickstart", OVERRIDES))
    bare = median([alone.iterate() for _ in range(ITERATIONS - 1)][SKIPPED:])
    return Measurement(
        value=live / bare,
        unit="of the same work in one process",
        details={"seconds/iteration": live, **phases, "one process, seconds/iteration": bare},
    )
