"""The benchmark harness on benches written here."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotlight_core.errors import BadInputError
from tests.benchmarks import Measurement
from tests.benchmarks.run import FOLDER, Baseline, bench_names, main, read_baseline, summary

BENCH = """
from tests.benchmarks import Measurement

def measure() -> Measurement:
    return Measurement(value={value}, unit="steps/s", details={{"bare_loop": 12.5, "nodes": "three"}})
"""
GOOD = {"target": 2.0, "direction": "min", "measured": 2.5, "machine": "a machine"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``benches`` with two benches, importable while the test runs."""
    benches = tmp_path / "benches"
    (benches / "baselines").mkdir(parents=True)
    for name, value in (("fast", "3.0"), ("slow", "1.0")):
        (benches / f"bench_{name}.py").write_text(BENCH.format(value=value), encoding="utf-8")
        (benches / "baselines" / f"{name}.json").write_text(json.dumps(GOOD), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield benches
    for module in [name for name in sys.modules if name.split(".")[0] == "benches"]:
        del sys.modules[module]


def test_all_benches_run_in_order_and_a_short_one_is_no_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], folder, "benches") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("machine: ")
    assert lines[1:] == [
        "fast",
        "  bare_loop: 12.5",
        "  nodes: three",
        "  baseline: 2.5 steps/s on a machine",
        "fast value=3 steps/s target=>=2 ok",
        "slow",
        "  bare_loop: 12.5",
        "  nodes: three",
        "  baseline: 2.5 steps/s on a machine",
        "slow value=1 steps/s target=>=2 short",
    ]


def test_one_bench_runs_by_name_and_an_unknown_one_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slow"], folder, "benches") == 0
    assert "fast" not in capsys.readouterr().out
    assert main(["slwo"], folder, "benches") == 2
    assert capsys.readouterr().err == "error: no bench slwo: there are fast, slow\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("def measure():\n    raise RuntimeError('boom')\n", "boom"),
        (BENCH.format(value="float('nan')"), "fast measured nan"),
        ("import a_library_that_is_not_there\n", "a_library_that_is_not_there"),
    ],
)
def test_a_bench_that_fails_or_measures_nothing_is_an_error_and_the_others_still_run(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, cause: str
) -> None:
    (folder / "bench_fast.py").write_text(text, encoding="utf-8")
    assert main([], folder, "benches") == 1
    captured = capsys.readouterr()
    assert "slow value=1 steps/s target=>=2 short" in captured.out
    assert "fast value" not in captured.out
    assert cause in captured.err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot use baseline"),
        (json.dumps({**GOOD, "direction": "up"}), "direction 'up'"),
        (json.dumps({**GOOD, "target": "2"}), "target '2'"),
        (json.dumps({**GOOD, "measured": float("inf")}), "measured inf"),
        (json.dumps({"target": 2.0}), "cannot use baseline"),
        (json.dumps({**GOOD, "note": "x"}), "cannot use baseline"),
    ],
)
def test_a_broken_baseline_is_refused_before_anything_is_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    (folder / "baselines" / "slow.json").write_text(text, encoding="utf-8")
    assert main(["slow"], folder, "benches") == 2
    captured = capsys.readouterr()
    assert problem in captured.err
    assert "slow value" not in captured.out


def test_a_missing_baseline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="No such file"):
        read_baseline(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("direction", "value", "verdict"),
    [("min", 2.0, "ok"), ("min", 1.99, "short"), ("max", 2.0, "ok"), ("max", 2.01, "short")],
)
def test_a_target_is_met_when_it_is_reached_exactly(direction: str, value: float, verdict: str) -> None:
    baseline = Baseline(target=2.0, direction=direction, measured=1.0, machine="m")  # type: ignore[arg-type]
    sign = {"min": ">=", "max": "<="}[direction]
    line = summary("b", Measurement(value=value, unit="s"), baseline)
    assert line == f"b value={value:g} s target={sign}2 {verdict}"


def test_every_shipped_bench_has_a_sound_baseline() -> None:
    assert {path.stem for path in (FOLDER / "baselines").glob("*.json")} == set(bench_names())
    for name in bench_names():
        read_baseline(FOLDER / "baselines" / f"{name}.json")
