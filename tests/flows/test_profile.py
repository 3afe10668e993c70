"""`spotlight profile`: real ranks at the smallest size, and what becomes of their records."""

import sys
from pathlib import Path

import psutil
import pytest

from flows import cli
from spotlight_core.costs.files import read_costs
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.profiling.measure import cost_model, measured
from spotlight_core.profiling.plan import ProfilePlan
from spotlight_core.recipes import load_recipe

RECORDS = [
    {"boot": 7.0},
    *({"degree": 1, "rows": rows, "steps": [0.1 + 0.01 * rows] * 3, "launch": 0.002} for rows in (1, 4)),
    *(
        {"degree": 2, "rows": rows, "steps": [0.2, 0.06 + 0.004 * rows, 0.01], "launch": 0.004}
        for rows in (1, 4)
    ),
    {"regroup": 0.001, "reshard": 0.003},
    {"publish": 0.5, "load": 0.25, "copy": 0.125},
    {"sleep": 0.4, "wake": 0.2},
    {"reused": [0.003, 0.001, 0.002]},
    {"tokens": 8},
]


def test_records_become_medians_and_lines() -> None:
    costs = cost_model(RECORDS, train_seconds=3.0, score_seconds=0.01)
    assert costs.denoise_step_seconds(2) == pytest.approx(0.12)
    assert costs.denoise_step_seconds(2, degree=2) == pytest.approx(0.068)
    assert (costs.tokens, costs.boot_seconds, costs.launch_seconds) == (8, 7.0, 0.003)
    assert (costs.publish_seconds, costs.load_seconds, costs.copy_seconds) == (0.5, 0.25, 0.125)
    assert costs.reused_step_seconds == 0.002
    assert (costs.sleep_seconds, costs.wake_seconds) == (0.4, 0.2)
    assert (costs.regroup_seconds, costs.reshard_seconds) == (0.001, 0.003)
    assert (costs.train_seconds, costs.score_seconds_per_image) == (3.0, 0.01)


@pytest.mark.slow
def test_two_ranks_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "costs.json"
    options = ["--rows", "1,2", "--steps", "3", "--repeats", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["spotlight", "profile", "quickstart", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    out = capsys.readouterr().out
    assert "denoise step at SP 2" in out
    assert out.splitlines()[-1] == f"costs {output}"
    costs = read_costs(output)
    assert {step.degree for step in costs.sharded} == {2}
    for seconds in (costs.denoise_step_seconds(1), costs.denoise_step_seconds(1, 2)):
        assert 0 < seconds < 10
    assert min(costs.load_seconds, costs.publish_seconds, costs.regroup_seconds, costs.reshard_seconds) > 0


def test_a_rank_that_cannot_load_its_model_says_why(tmp_path: Path) -> None:
    config = load_recipe("quickstart", [f"model.weights={tmp_path / 'none.safetensors'}"])
    plan = ProfilePlan(degrees=(1,), rows=(1,), steps=3, repeats=1)
    with pytest.raises(BadInputError, match="no model weights at"):
        measured(config, plan, lambda record: None)


def test_a_rank_that_is_killed_is_told_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_recipe("quickstart", [])
    killed: list[int] = []

    def kill_the_other(record: dict[str, object]) -> None:
        if not killed:
            killed.append(1)
            ranks = [p for p in psutil.Process().children() if "spotlight_core.profiling.rank" in p.cmdline()]
            next(p for p in ranks if p.cmdline()[-1] == "1").kill()

    plan = ProfilePlan(degrees=(1, 2), rows=(1,), steps=200, repeats=4)
    with pytest.raises(SpotlightError, match=r"rank 1 of the profile ended without an answer \(signal 9\)"):
        measured(config, plan, kill_the_other)


@pytest.mark.parametrize("degrees", ["0", "two", "", "1,-2"])
def test_degrees_are_whole_numbers(
    degrees: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["spotlight", "profile", "quickstart", "--degrees", degrees])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "give whole numbers from 1 to 16, such as 1,2,4" in capsys.readouterr().err
