"""The report's throughput around changes of GPUs: what the journal's words come to, in bins of 100 ms."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spotlight_core import events as ev
from tasks.report_throughput import (
    AFTER_SECONDS,
    BEFORE_SECONDS,
    Change,
    RunChanges,
    changes,
    figure,
    section,
)
from tasks.reporting import write_report
from tests.tasks.run_folders import BEGAN, request, write_run

PAIR = ev.SPGroup(node="spot-0", incarnation=1, ranks=(0, 1), generation=1)
ALONE = ev.SPGroup(node="spot-0", incarnation=1, ranks=(0,), generation=2)
WORK = request(0, "rollout", 0)  # of 10 denoise steps
KEY: dict[str, Any] = {"node": "spot-0", "incarnation": 1}


def lease(
    group: ev.SPGroup, name: str, start: float, end: float, first: int = 0, last: int | None = None
) -> list[ev.Word]:
    """A lease's words: it finishes, or lets go with its state held before step ``last``."""
    ended: ev.Word = ev.Finished(at=end, lease=name, request=WORK.id, ref=name, digest="d")
    if last is not None:
        ended = ev.Committed(
            at=end,
            lease=name,
            request=WORK.id,
            next_denoise_step=last,
            ref=f"held:{name}",
            digest="d",
            released=True,
            held=True,
        )
    return [
        ev.Start(group=group, lease=name, request=WORK, from_denoise_step=first),
        ev.Started(at=start, lease=name),
        ended,
    ]


def words() -> list[ev.Word]:
    """10 steps/s until GPU 1 goes at 100 s, nothing for 0.5 s, 5 steps/s by the one that is left."""
    return [
        *lease(PAIR, "1.1", 98.0, 99.0),
        *lease(PAIR, "1.2", 99.0, 100.0),
        ev.RankLost(**KEY, at=100.0, rank=1, cause="revoked"),
        ev.Regrouped(**KEY, at=100.02, generation=2, groups=((0,),)),
        *(word for n in range(4) for word in lease(ALONE, f"1.{n + 3}", 100.5 + 2 * n, 102.5 + 2 * n)),
    ]


def test_the_rates_are_those_before_and_after_and_the_pause_is_seen() -> None:
    (change,) = changes(words())
    assert (change.node, change.at) == ("spot-0", 100.0)
    assert change.said == ("rank 1 revoked", "groups 0")
    assert len(change.rates) == round(10 * (BEFORE_SECONDS + AFTER_SECONDS))
    assert change.rates[:20] == pytest.approx([10.0] * 20)
    assert change.rates[20:25] == pytest.approx([0.0] * 5)
    assert change.rates[25:] == pytest.approx([5.0] * 75)
    assert (change.before, change.after) == (pytest.approx(10.0), pytest.approx(5.0))
    assert change.stalled_seconds == pytest.approx(0.5)


def test_the_first_groups_of_a_node_are_no_change() -> None:
    assert changes([ev.Regrouped(**KEY, at=1.0, generation=1, groups=((0, 1),))]) == ()


def test_a_node_that_is_not_back_in_time_stood_still_all_the_while() -> None:
    (change,) = changes([*lease(PAIR, "1.1", 98.0, 100.0), ev.RankReady(**KEY, at=100.0, rank=1)])
    assert change.stalled_seconds == pytest.approx(AFTER_SECONDS)


def test_every_step_is_counted_once_whatever_the_bins() -> None:
    stretch = lease(PAIR, "1.1", 99.234, 101.071, last=7)
    (change,) = changes([*stretch, ev.RankReady(**KEY, at=100.0, rank=1)])
    assert sum(change.rates) * 0.1 == pytest.approx(7.0)


def test_commits_on_the_way_are_known_points() -> None:
    commit = ev.Committed(
        at=99.5, lease="1.1", request=WORK.id, next_denoise_step=8, ref="r", digest="d", released=False
    )
    begin, started, finished = lease(PAIR, "1.1", 99.0, 100.0)
    again = ev.Started(at=99.2, lease="1.1")  # a sign of life says nothing of how far it is
    stretch = [begin, started, again, commit, finished]
    (change,) = changes([*stretch, ev.RankReady(**KEY, at=100.0, rank=1)])
    assert change.rates[10:15] == pytest.approx([16.0] * 5)
    assert change.rates[15:20] == pytest.approx([4.0] * 5)


def test_a_resumed_lease_counts_only_its_own_steps() -> None:
    stretch = lease(ALONE, "1.1", 99.0, 100.0, first=6)
    (change,) = changes([*stretch, ev.RankReady(**KEY, at=100.0, rank=1)])
    assert sum(change.rates) * 0.1 == pytest.approx(4.0)


def test_other_nodes_and_lives_are_no_part_of_it() -> None:
    elsewhere = ev.SPGroup(node="spot-1", incarnation=1)
    earlier = ev.SPGroup(node="spot-0", incarnation=0)
    others = [*lease(elsewhere, "1.1", 99.0, 100.0), *lease(earlier, "1.2", 99.0, 100.0)]
    (change,) = changes([*others, ev.RankReady(**KEY, at=100.0, rank=1)])
    assert set(change.rates) == {0.0}


def test_words_that_come_together_are_one_change_and_later_ones_another() -> None:
    told = [
        ev.RankNotice(**KEY, at=100.0, ranks=(1,), seconds_left=30.0),
        ev.Regrouped(**KEY, at=100.5, generation=2, groups=((0,),)),
        ev.RankLost(**KEY, at=101.4, rank=1, cause="revoked"),
        ev.RankReady(**KEY, at=110.0, rank=1),
        ev.Regrouped(**KEY, at=110.1, generation=3, groups=((0,), (1,))),
        ev.RankReady(node="spot-1", incarnation=1, at=110.2, rank=0),
    ]
    assert [(change.node, change.at, change.said) for change in changes(told)] == [
        ("spot-0", 100.0, ("notice for rank 1", "groups 0", "rank 1 revoked")),
        ("spot-0", 110.0, ("rank 1 is back", "groups 0 | 1")),
        ("spot-1", 110.2, ("rank 0 is back",)),
    ]


def of(*found: Change) -> RunChanges:
    return RunChanges(run="run", began=40.0, found=found)


def test_the_figure_has_a_line_for_each_change_with_the_change_at_0() -> None:
    found = changes(words())
    (line,) = figure(of(*found))["data"]
    assert line["name"] == "1. spot-0: rank 1 revoked"
    assert (line["x"][0], line["x"][20], line["x"][-1]) == (-1.95, 0.05, 7.95)
    assert line["y"] == [round(rate, 3) for rate in found[0].rates]
    many = figure(of(*[Change(node="n", at=0.0, said=("s",), rates=(0.0,) * 100)] * 40))
    assert len(many["data"]) == 12


def test_the_table_says_how_long_it_was_felt() -> None:
    said = section(of(*changes(words())))
    assert "<td>10.0</td><td>5.0</td><td>0.5 s</td>" in re.sub(r"<td[^>]*>", "<td>", said)
    assert "rank 1 revoked<br>groups 0" in said
    assert section(of()) == ""


def test_a_baselines_changes_are_dotted_beside_and_named() -> None:
    found = changes(words())
    other = RunChanges(run="restarting", began=20.0, found=found)
    ours, theirs = figure(of(*found), other)["data"]
    assert (ours["line"]["dash"], theirs["line"]["dash"]) == ("solid", "dot")
    assert theirs["name"] == "restarting 1. spot-0: rank 1 revoked"
    assert "<td>restarting: spot-0</td>" in section(of(*found), other)
    assert section(of(), other) == ""


def test_the_page_shows_it_only_where_gpus_came_or_went(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", 3)
    page = write_report(plain).read_text(encoding="utf-8")
    assert "When GPUs came and went" not in page
    assert "throughput" not in _figures(page)
    group = ev.SPGroup(node="spot-1", incarnation=0)
    lost = ev.RankLost(node="spot-1", incarnation=0, at=BEGAN + 5.0, rank=0, cause="died")
    told = [*lease(group, "1.999", BEGAN + 4.0, BEGAN + 5.0, last=7), lost]
    with (plain / "journal.jsonl").open("ab") as journal:
        journal.write(b"".join(ev.encode(word) + b"\n" for word in told))
    page = write_report(plain).read_text(encoding="utf-8")
    assert "When GPUs came and went" in page
    assert sum(_figures(page)["throughput"]["data"][0]["y"]) == pytest.approx(70.0)


def _figures(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    found: dict[str, Any] = json.loads(match[1])
    return found
