"""Measure against the baselines: ``python -m tests.benchmarks.run [NAME ...]``, all of them without a name.

A value short of its target is reported, not an error: machines differ, and a figure that fails the
build on a busy one would soon be measured no more.  The exit code is 2 for an unknown name or a
broken baseline, 1 when a bench raised (the others still run), else 0.
"""

import argparse
import importlib
import json
import math
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spotlight_core.errors import BadInputError
from tests.benchmarks import Measurement

FOLDER = Path(__file__).parent
PREFIX = "bench_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a bench should reach.

    ``direction`` is ``min`` when the value should be at least ``target``, ``max`` when at most;
    ``measured`` is what ``machine`` gave when the baseline was written.
    """

    target: float
    direction: Literal["min", "max"]
    measured: float
    machine: str

    def met_by(self, value: float) -> bool:
        return value >= self.target if self.direction == "min" else value <= self.target


def bench_names(folder: Path = FOLDER) -> list[str]:
    """The benches of a folder, in alphabetical order."""
    return sorted(path.stem.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*.py"))


def read_baseline(path: Path) -> Baseline:
    """A baseline file; BadInputError when it is missing or does not hold exactly the four keys."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        baseline = Baseline(**record)
    except (OSError, ValueError, TypeError) as error:
        raise BadInputError(
            f"cannot use baseline {path} ({error})",
            'write {"target": number, "direction": "min" or "max", "measured": number, "machine": text}',
        ) from error
    if baseline.direction not in ("min", "max"):
        raise BadInputError(
            f"{path}: direction {baseline.direction!r}", "write min (at least) or max (at most)"
        )
    for key, value in (("target", baseline.target), ("measured", baseline.measured)):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise BadInputError(f"{path}: {key} {value!r}", "write a finite number")
    return baseline


def summary(name: str, measurement: Measurement, baseline: Baseline) -> str:
    """The line a bench ends with: ``<name> value=… target=… ok|short``."""
    sign = ">=" if baseline.direction == "min" else "<="
    verdict = "ok" if baseline.met_by(measurement.value) else "short"
    value = f"value={measurement.value:.6g} {measurement.unit}"
    return f"{name} {value} target={sign}{baseline.target:.6g} {verdict}"


def run_bench(name: str, folder: Path = FOLDER, package: str = "tests.benchmarks") -> Measurement:
    """Measure one bench and print its figures."""
    baseline = read_baseline(folder / "baselines" / f"{name}.json")
    measurement: Measurement = importlib.import_module(f"{package}.{PREFIX}{name}").measure()
    if not math.isfinite(measurement.value):
        raise ValueError(f"{name} measured {measurement.value}")
    for key, value in measurement.details.items():
        print(f"  {key}: {value:.6g}" if isinstance(value, float) else f"  {key}: {value}")
    print(f"  baseline: {baseline.measured:.6g} {measurement.unit} on {baseline.machine}")
    print(summary(name, measurement, baseline), flush=True)
    return measurement


def main(
    arguments: Sequence[str] | None = None, folder: Path = FOLDER, package: str = "tests.benchmarks"
) -> int:
    """Run the named benches one after the other; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.run", description="Measure against baselines."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(bench_names(folder))}")
    names = parser.parse_args(arguments).names or bench_names(folder)
    unknown = sorted(set(names) - set(bench_names(folder)))
    if unknown:
        print(
            f"error: no bench {', '.join(unknown)}: there are {', '.join(bench_names(folder))}",
            file=sys.stderr,
        )
        return 2
    processor = platform.processor() or platform.machine()
    print(f"machine: {os.cpu_count()} x {processor}, Python {platform.python_version()}")
    code = 0
    for name in names:
        print(name)
        try:
            run_bench(name, folder, package)
        except BadInputError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        except Exception:  # one broken bench must not hide the figures of the others
            traceback.print_exc()
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
