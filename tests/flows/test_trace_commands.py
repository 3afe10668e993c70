"""`spotlight trace`."""

import json
import sys
from pathlib import Path

import pytest

from flows import cli
from flows.trace_view import sparkline
from spotlight_core.market.traces import read_trace
from spotlight_core.recipes import RECIPES

Trace = tuple[int, str, str]


def trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Trace:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["spotlight", "trace", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_generate_and_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    parameters = ("--seed", "7", "--nodes", "4", "--hours", "12")
    code, said, _ = trace(monkeypatch, capsys, "generate", "--output", str(path), *parameters)
    assert (code, said.startswith(f"trace {path}: ")) == (0, True)
    first = path.read_bytes()
    assert read_trace(path).repairs == ()
    trace(monkeypatch, capsys, "generate", "--output", str(path), *parameters)
    assert path.read_bytes() == first
    code, out, _ = trace(monkeypatch, capsys, "show", str(path))
    assert code == 0
    assert out.splitlines()[0] == f"trace.csv: {said.rstrip().partition(': ')[2]}"
    assert len(out.splitlines()[2]) == 72
    as_json = json.loads(trace(monkeypatch, capsys, "show", str(path), "--json")[1])
    assert as_json["most_nodes"] <= 4


def test_repairs_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "messy.csv"
    path.write_text("7200000,remove,a\n0,add,a\n0,add,a\n0,add,b\n", encoding="utf-8")
    _, out, _ = trace(monkeypatch, capsys, "show", str(path))
    assert "2.00 h, 2.0 nodes on average (1 to 2), 1 preemption, 0.50 an hour" in out
    assert "repaired: 1 rows out of order, sorted" in out
    assert "repaired: 1 repeated rows dropped" in out


def test_a_progress_keyed_trace_is_told_point_by_point(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = trace(monkeypatch, capsys, "show", str(RECIPES / "traces" / "quickstart.jsonl"))
    assert out.startswith("quickstart.jsonl: 3 notices, 1 kill and 4 returns of spot-0, spot-1, keyed to")
    assert "  iteration 8, rollout: spot-0 kill at denoise step 6 of its request 1\n" in out


def test_what_is_no_trace_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = trace(monkeypatch, capsys, "show", str(tmp_path / "none"))
    assert (code, err.count("\n")) == (2, 1)
    assert "cannot read trace" in err


def test_a_sparkline_goes_from_nothing_to_the_greatest() -> None:
    assert sparkline([0, 1, 4, 8]) == " ▂▅█"
    assert sparkline([0, 0]) == "  "


def test_what_a_market_strands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n0,add,c\n0,add,d\n3600000,remove,a\n7200000,add,a\n")
    options = (str(path), "--nodes", "2", "--placements", "3")
    code, out, _ = trace(monkeypatch, capsys, "stranded", *options, "--json")
    found = json.loads(out)
    assert code == 0
    for kind in ("fixed", "fixed, by counting"):  # three of two pairs are there for the second hour
        assert found[kind] == pytest.approx(
            {"available_gpu_seconds": 7 * 3600, "stranded_gpu_seconds": 3600, "any_share": 0.5}
        )
    assert found["elastic"]["stranded_gpu_seconds"] < 1
    assert "fixed" in trace(monkeypatch, capsys, "stranded", *options)[1]


def test_what_cannot_be_stranded_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(RECIPES / "traces" / "quickstart.jsonl")
    code, _, error = trace(monkeypatch, capsys, "stranded", path)
    assert (code, "has no clock" in error) == (2, True)
    code, _, error = trace(monkeypatch, capsys, "stranded", path, "--gpus", "3")
    assert (code, "give a degree that divides the GPUs of a node" in error) == (2, True)
