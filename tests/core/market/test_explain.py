"""Each preemption told: what was in flight, what was saved, where it went on, what it cost."""

import pytest

from spotlight_core import events as ev
from spotlight_core.events import Word
from spotlight_core.market.explain import explain
from spotlight_core.market.node_records import Strike
from tests.core.market.words import (
    PRICES,
    boot_failed,
    committed,
    finished,
    joined,
    lost,
    phase,
    request,
    start,
    tick,
)

PACE: list[Word] = [
    joined("s0", 0.0),
    joined("s1", 0.0),
    start("P", request("done"), "s1"),
    finished("P", 10.0),  # 10 denoise steps in 10 s
]


def test_no_preemption_is_said_with_the_lives_there_were() -> None:
    told = explain([*PACE, lost("s0", 20.0, "shutdown")], PRICES, {})
    assert (told.preemptions, told.lives, told.began) == ((), 2, 0.0)
    assert (told.denoise_steps_lost, told.lost_usd, told.exact) == (0, 0, True)


def test_a_boot_that_failed_is_a_life_and_no_preemption() -> None:
    told = explain([boot_failed("s9", -5.0, -1.0), *PACE], PRICES, {})
    assert (told.preemptions, told.lives, told.began) == ((), 3, -5.0)


def test_a_notice_saves_everything_and_says_where_it_went_on() -> None:
    words: list[Word] = [
        *PACE,
        phase("rollout", 10.0),
        start("L1", request("r", "rollout"), "s0"),
        ev.Notice(node="s0", incarnation=0, seconds_left=30.0, source="aws", at=14.0),
        committed("L1", 15.0, 5, released=True),
        start("L2", request("r"), "s1", step=5),
        lost("s0", 16.0, "released"),
        finished("L2", 20.0),
    ]
    (one,) = explain(words, PRICES, {}).preemptions
    assert (one.at, one.iteration, one.phase) == (14.0, 0, "rollout")
    assert (one.node, one.pool, one.cause, one.source) == ("s0", "spot", "notice", "aws")
    (item,) = one.requests
    assert (item.request, item.outcome, item.denoise_step, item.saved_denoise_step) == (
        "r",
        "resumed",
        5.0,
        5,
    )
    assert (item.resumed_on, item.resumed_at, item.from_denoise_step) == ("s1", 15.0, 5)
    assert (one.denoise_steps_lost, one.exact, one.lost_gpu_seconds, one.lost_usd) == (0.0, True, 0.0, 0.0)


def test_a_strike_that_was_written_down_counts_even_where_the_last_commit_was_told_after_the_loss() -> None:
    words: list[Word] = [
        *PACE,
        tick(10.0),
        start("L1", request("r"), "s0"),
        committed("L1", 16.0, 4, released=False),
        lost("s0", 16.0),
        start("L2", request("r"), "s1", step=4),
    ]
    strikes = {"L1": Strike(at=16.0, lease="L1", request="r", denoise_step=6)}
    (one,) = explain(words, PRICES, strikes).preemptions
    assert (one.denoise_steps_lost, one.exact) == (2.0, True)


def killed() -> list[Word]:
    return [
        *PACE,
        tick(10.0),
        start("L1", request("r"), "s0"),
        committed("L1", 14.0, 4, released=False),
        lost("s0", 17.2),
        start("L2", request("r"), "s1", step=4),
    ]


def test_a_kill_is_known_to_the_step_where_the_node_said_so_and_estimated_elsewhere() -> None:
    (about,) = explain(killed(), PRICES, {}).preemptions
    assert not about.exact
    assert about.denoise_steps_lost == pytest.approx(3.2)
    strike = Strike(at=17.0, lease="L1", request="r", denoise_step=7)
    told = explain(killed(), PRICES, {"L1": strike})
    (one,) = told.preemptions
    (item,) = one.requests
    assert (one.exact, one.denoise_steps_lost, one.source) == (True, 3.0, None)
    assert (item.denoise_step, item.saved_denoise_step, item.from_denoise_step) == (7.0, 4, 4)
    assert one.lost_gpu_seconds == pytest.approx(3.2)
    assert told.lost_usd == pytest.approx(3.2 * 2.87 / 3600)


def test_what_finished_in_the_grace_was_at_no_known_step() -> None:
    words: list[Word] = [
        *PACE,
        start("L1", request("r"), "s0"),
        ev.Notice(node="s0", incarnation=0, seconds_left=30.0, at=14.0),
        finished("L1", 15.0),
    ]
    ((item,),) = [one.requests for one in explain(words, PRICES, {}).preemptions]
    assert (item.outcome, item.denoise_step, item.resumed_on, item.exact) == ("finished", None, None, True)


def test_before_any_request_has_finished_the_whole_runs_pace_serves_and_none_is_no_estimate() -> None:
    words: list[Word] = [joined("s0", 0.0), start("L1", request("r"), "s0"), lost("s0", 3.0)]
    (one,) = explain(words, PRICES, {}).preemptions
    assert (one.exact, one.denoise_steps_lost, one.lost_gpu_seconds) == (False, 0.0, 3.0)
    words += [joined("s1", 3.0), start("L2", request("r"), "s1"), finished("L2", 13.0)]
    (one,) = explain(words, PRICES, {}).preemptions
    assert (one.exact, one.denoise_steps_lost) == (False, pytest.approx(3.0))
