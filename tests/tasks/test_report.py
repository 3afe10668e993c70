import base64
import json
import re
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.market.node_records import recompute_usd
from spotlight_core.market.prices import PriceBook
from tasks import report_sections as sections
from tasks.report_data import overlap_share, paired_mean, read_run, student_t_975
from tasks.report_timeline import closed_pause, every_segment, iteration_at, joined_segments, timeline_figure
from tasks.reporting import write_report
from tests.tasks.run_folders import RECIPE, score, write_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "quickstart")


@pytest.fixture(scope="module")
def page(whole: Path) -> str:
    return write_report(whole).read_text(encoding="utf-8")


def figures(page: str) -> dict[str, dict]:
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    return json.loads(match.group(1))


def text_of(page: str) -> str:
    """What a reader sees, without scripts and styles."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body).replace("&nbsp;", " "))


def test_says_what_happened(page: str) -> None:
    said = text_of(page)
    assert f"OCR score {score(0):.2f} → {score(24):.2f} 400 images" in said
    assert f"template match {score(0) - 0.05:.2f} → {score(24) - 0.05:.2f} never trained on" in said
    assert score(12) < 0.9 < min(score(16), score(20))
    assert "target 0.9 reached in 16 iterations" in said
    assert "4 3 with notice · 1 without" in said
    assert "4 3 resumed midway · 1 recomputed" in said
    assert said.count("resumed at denoise step 5 on") == 3
    assert said.count("recomputed from noise on") == 1
    assert "incomplete" not in said


def test_dollars_are_those_of_the_nodes_own_logs(whole: Path, page: str) -> None:
    run = read_run(whole)
    by_pool = recompute_usd(whole / "nodes", PriceBook(RECIPE["prices"]), run.now)
    assert run.usd == pytest.approx(sum(by_pool.values()), abs=1e-9)
    assert f"spot ${by_pool['spot']:.3f} · reserved ${by_pool['reserved']:.3f}" in text_of(page)


def test_opens_offline_and_alone(page: str) -> None:
    markup = re.sub(r"<script\b.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"', markup) == []
    assert "http" not in markup.replace("http-equiv", "")
    assert "default-src 'none'" in markup
    assert markup.count('<img src="data:image/png;base64,') == 2
    assert "Plotly.react(" in page
    assert "plotly.js v" in page


def test_charts_are_valid_plotly_and_show_every_node(page: str) -> None:
    charts = figures(page)
    timelines = {"timeline", "timeline_whole"}
    assert (
        set(charts) == {"score_iterations", "score_usd", "contrast", "correlation", "preemptions"} | timelines
    )
    # The page resolves colours named @...; any colour will do to check the rest.
    for chart in json.loads(re.sub(r'"@\w+"', '"#123456"', json.dumps(charts))).values():
        go.Figure(data=chart["data"], layout=chart["layout"])
    timeline = charts["timeline"]
    assert timeline["layout"]["yaxis"]["categoryarray"] == ["spot-1", "spot-0", "reserved-0"]
    assert timeline["data"][0]["name"] == "idle"  # drawn first, below the rest
    names = [trace["name"] for trace in sorted(timeline["data"], key=lambda trace: trace["legendrank"])]
    assert names == ["rollout", "explore", "training", "evaluate", "lost", "idle", "notice", "killed"]
    labels = [window["label"] for window in timeline["windows"]]
    assert labels[:2] == ["whole run", "notice, iteration 2"]
    assert labels[3] == "kill, iteration 8"
    (curve,) = (trace for trace in charts["score_iterations"]["data"] if trace["name"] == "score")
    assert curve["x"] == [0, 4, 8, 12, 16, 20, 24]
    assert curve["y"] == [score(updates) for updates in curve["x"]]


def test_the_timeline_bills_what_the_ledger_bills(whole: Path) -> None:
    run = read_run(whole)
    bars = [trace for trace in timeline_figure(run, every_segment(run))["data"] if trace["type"] == "bar"]
    shown = sum(sum(trace["x"]) for trace in bars)
    assert shown == pytest.approx(sum(run.ledger.gpu_hours(run.now).values()) * 3600, abs=0.05)
    assert iteration_at(run, run.ledger.preemptions[2].at) == 8
    assert iteration_at(run, run.began + 1.5) is None  # the base model was evaluated then


def test_the_whole_run_is_drawn_joined(whole: Path) -> None:
    run = read_run(whole)
    pause = closed_pause(run)
    blocks = joined_segments(run, pause)
    lives = [block for block in blocks if block.activity == "idle"]
    assert len(lives) == len({(part.node, part.incarnation) for part in run.segments}) == 7
    for activity in ("rollout", "explore", "training", "lost"):
        parts = [part for part in run.segments if part.activity == activity]
        drawn = [block for block in blocks if block.activity == activity]
        assert len(drawn) <= len(parts)
        work = sum(part.end - part.start for part in parts)
        assert work <= sum(block.end - block.start for block in drawn) <= work + pause * len(parts)
        for block, after in pairwise(block for block in drawn if block.node == "reserved-0"):
            assert block.end < after.start
    assert len([block for block in blocks if block.activity == "rollout"]) < 80


def test_a_run_cut_off_says_what_it_lacks(tmp_path: Path) -> None:
    said = text_of(write_report(write_run(tmp_path / "cut", 7)).read_text(encoding="utf-8"))
    assert "This report is incomplete. The run stopped after 7 of 24 iterations. " in said
    assert "There are no images from after training." in said
    assert "not held in two evaluations" in said


def test_a_run_that_only_began_still_has_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "begun"
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(RECIPE), encoding="utf-8")
    said = text_of(write_report(folder).read_text(encoding="utf-8"))
    for note in (
        "There is no journal",
        "stopped after 0 of 24",
        "Nothing was evaluated yet",
        "no images from before",
    ):
        assert note in said
    assert "No ledger: nothing was journalled." in said


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "torn", 5)
    before = read_run(folder)
    with (folder / "journal.jsonl").open("a", encoding="utf-8") as journal:
        journal.write('{"word": "Lost", "node"')
    assert read_run(folder).segments == before.segments


def test_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="holds no run"):
        write_report(tmp_path)
    (tmp_path / "recipe.json").write_text("{", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"recipe\.json is not JSON"):
        write_report(tmp_path)
    (tmp_path / "recipe.json").write_text("{}", encoding="utf-8")
    (tmp_path / "journal.jsonl").write_text('{"word": "Nonsense"}\n', encoding="utf-8")
    with pytest.raises(BadInputError, match=r"journal\.jsonl:1 is no word"):
        write_report(tmp_path)


def test_text_of_a_run_cannot_become_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "evil", 3)
    evil = "</script><script>alert(1)</script>{{plotly}}"
    (folder / "recipe.json").write_text(json.dumps(RECIPE | {"name": evil}), encoding="utf-8")
    for log in (folder / "journal.jsonl",):
        log.write_text(log.read_text(encoding="utf-8").replace("0/rollout/0.1/0", evil), encoding="utf-8")
    page = write_report(folder).read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert page.count("plotly.js v") == write_report(folder).read_text(encoding="utf-8").count("plotly.js v")
    assert "{{plotly}}" in page


def test_against_a_baseline(whole: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "on_demand")
    recipe = RECIPE | {"name": "on_demand", "prices": {"reserved": 10.08, "spot": 10.08}}
    (other / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    records = [
        json.loads(line) for line in (other / "iterations.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    for record in records:
        record["metrics"].pop("cost/usd_total", None)  # then the ledger is asked
    (other / "iterations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    said = text_of(write_report(whole, baseline=other).read_text(encoding="utf-8"))
    ours, theirs = read_run(whole).crossing, read_run(other).crossing
    assert ours is not None
    assert theirs is not None
    assert ours.iterations == theirs.iterations == 16
    ratio = (ours.usd or 0) / (theirs.usd or 1)
    assert 0.5 < ratio < 0.9
    assert (
        f"Cost to the target × {ratio:.2f} = iterations × 1.00, times dollars per iteration × {ratio:.2f}"
        in said
    )
    write_report(whole)  # as the other tests expect it


def test_overlap_is_measured_on_segments(whole: Path) -> None:
    run = read_run(whole)
    share = overlap_share(run.segments)
    assert share is not None
    assert 0.85 < share < 1.0
    assert overlap_share([part for part in run.segments if part.activity != "explore"]) is None


# From a printed table of Student's t, two-sided 95 %.
T_TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 19: 2.093, 22: 2.074, 100: 1.984}


@pytest.mark.parametrize("freedom", T_TABLE)
def test_students_t(freedom: int) -> None:
    assert student_t_975(freedom) == pytest.approx(T_TABLE[freedom], abs=1.5e-3)


def test_paired_mean_is_a_t_interval(whole: Path) -> None:
    run = read_run(whole)
    found = paired_mean(run, "explore/std_selected", "explore/std_unexplored")
    above, below = dict(run.series("explore/std_selected")), dict(run.series("explore/std_unexplored"))
    differences = [above[key] - below[key] for key in above]
    half = 2.07387 * statistics.stdev(differences) / 23**0.5
    assert found is not None
    assert found.pairs == 23
    assert found.mean == pytest.approx(sum(differences) / 23)
    assert (found.low, found.high) == pytest.approx((found.mean - half, found.mean + half), abs=1e-5)
    assert paired_mean(run, "explore/std_selected", "explore/nothing") is None


def test_embeds_the_grids_themselves(whole: Path, page: str) -> None:
    for name in ("base", "final"):
        assert base64.b64encode((whole / "images" / f"{name}.png").read_bytes()).decode() in page


def test_several_rewards_are_told_one_by_one_and_one_reward_is_not(whole: Path) -> None:
    run = read_run(whole)
    assert sections.parts(run) == ""
    scores = [{"reward/ocr": 0.5, "reward/jpeg_size": 0.71}, {"reward/ocr": 0.875, "reward/jpeg_size": 0.7}]
    records = tuple(
        {**record, "metrics": metrics} for record, metrics in zip(run.iterations[:2], scores, strict=True)
    )
    several = sections.parts(replace(run, iterations=records))
    assert "OCR score 0.500 → 0.875 · JPEG size 0.710 → 0.700." in several
