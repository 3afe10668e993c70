"""The report's section on preemptions, and the runs that are to end in the same weights."""

import json
from pathlib import Path

import pytest

from tasks.report_data import read_run
from tasks.report_preemptions import find_twins, preemptions_figure, same_weights, section
from tests.tasks.run_folders import RECIPE, write_run

FINISHED = {"status": "finished", "weights_digest": "abc123"}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "quickstart", 12)
    life = folder / "nodes" / "spot-0-1.jsonl"  # killed in iteration 8, in its first request
    strike = {"event": "strike", "at": 0.0, "lease": "", "request": "", "denoise_step": 4}
    run = read_run(folder)
    (killed,) = [one for one in run.ledger.preemptions if one.cause == "killed"]
    strike |= {"lease": killed.in_flight[0].lease, "request": killed.in_flight[0].request}
    with life.open("a", encoding="utf-8") as log:
        log.write(json.dumps(strike) + "\n")
    (folder / "run.json").write_text(json.dumps(FINISHED), encoding="utf-8")
    return folder


def beside(folder: Path, name: str, recipe: dict[str, object], facts: dict[str, object]) -> Path:
    """A finished run of the same scores in the same folder of runs."""
    other = folder.parent / name
    other.mkdir()
    (other / "recipe.json").write_text(json.dumps(RECIPE | {"name": name} | recipe), encoding="utf-8")
    (other / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    (other / "iterations.jsonl").write_bytes((folder / "iterations.jsonl").read_bytes())
    return other


def test_the_section_says_what_was_saved_and_lost(whole: Path) -> None:
    run = read_run(whole)
    said = section(run, [])
    assert said.count("<td>denoise step 5</td>") == 3
    assert "recomputed from noise on" in said
    assert "4 denoise steps, " in said
    assert "4 preemptions saved 15 denoise steps in flight and lost 4 denoise steps: " in said
    assert "The same weights" not in said


def test_the_figure_stacks_saved_and_lost_steps(whole: Path) -> None:
    saved, lost = preemptions_figure(read_run(whole))["data"]
    assert saved["x"] == [
        "1. spot-0<br>notice",
        "2. spot-1<br>notice",
        "3. spot-0<br>killed",
        "4. spot-1<br>notice",
    ]
    assert saved["y"] == [5.0, 5.0, 0.0, 5.0]
    assert lost["y"] == [0.0, 0.0, 4.0, 0.0]


def test_twins_are_finished_runs_that_differ_in_their_fleet_at_most(whole: Path) -> None:
    beside(whole, "calm", {"fleet": {"trace": None}}, FINISHED)
    beside(whole, "other_weights", {"fleet": {"spot_nodes": 4}}, FINISHED | {"weights_digest": "fff"})
    beside(whole, "other_seed", {"rng_seed": 1}, FINISHED)
    beside(whole, "unfinished", {}, FINISHED | {"status": "interrupted"})
    live = beside(whole, "live", {"decisions": "live"}, FINISHED | {"weights_digest": "eee"})
    (live / "decisions.jsonl").write_text('{"iteration": 0}\n', encoding="utf-8")
    (whole.parent / "broken").mkdir()
    (whole.parent / "broken" / "recipe.json").write_text("{", encoding="utf-8")
    twins = find_twins(whole)
    assert [(twin.name, twin.verdict) for twin in twins] == [
        ("calm", "equal"),
        ("live", "seeds"),
        ("other_weights", "differ"),
    ]
    said = same_weights(read_run(whole), twins)
    assert (said.count("equal ✓"), said.count("differ ✗"), said.count("other seeds")) == (1, 1, 1)


def test_equal_weights_with_other_scores_are_not_the_same(whole: Path) -> None:
    other = beside(whole, "calm", {}, FINISHED)
    log = other / "iterations.jsonl"
    log.write_text(log.read_text(encoding="utf-8").replace('"score": 0.', '"score": 0.9'), encoding="utf-8")
    assert [twin.verdict for twin in find_twins(whole)] == ["differ"]


def test_a_run_without_weights_has_no_twins(whole: Path) -> None:
    beside(whole, "calm", {}, FINISHED)
    (whole / "run.json").write_text("{}", encoding="utf-8")
    assert find_twins(whole) == []
