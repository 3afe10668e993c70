"""The cost ledger, word by word: who is billed for what, and what was lost."""

import pytest
from msgspec.structs import replace

from spotlight_core import events as ev
from spotlight_core.errors import BadInputError, FleetError
from spotlight_core.market.ledger import CostLedger, Word
from spotlight_core.market.preemptions import Interrupted
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
    told,
)


def test_bills_idle_or_not_from_start_to_stop() -> None:
    words = [joined("head", 100.0, "reserved", gpus=4), joined("s0", 110.0), lost("s0", 470.0, "released")]
    ledger = CostLedger.replayed(PRICES, words)
    # 4 x 10.08 USD/h x 1 h; 2.87 USD/h x 0.1 h
    assert ledger.usd(3700.0, "reserved") == pytest.approx(40.32, abs=1e-12)
    assert ledger.usd(3700.0, "spot") == pytest.approx(0.287, abs=1e-12)
    assert ledger.usd(3700.0) == pytest.approx(40.607, abs=1e-12)
    assert ledger.gpu_hours(3700.0) == pytest.approx({"useful": 0.0, "idle": 4.1, "lost": 0.0}, abs=1e-12)
    assert ledger.preemptions == []  # let go, not taken
    assert ledger.usd(0.0, "reserved") == 0.0  # no negative bill before a node's first second


def test_a_boot_that_failed_is_billed_for_as_long_as_it_took_and_was_idle() -> None:
    words: list[Word] = [
        boot_failed("s0", 100.0, 460.0, gpus=2),
        ev.BootFailed(node="s1", pool="spot", error="the market has no machine", at=470.0),
        joined("s0", 480.0, incarnation=1),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    assert ledger.usd(480.0, "spot") == pytest.approx(2 * 0.287, abs=1e-12)
    assert ledger.gpu_hours(480.0) == pytest.approx({"useful": 0.0, "idle": 0.2, "lost": 0.0}, abs=1e-12)
    assert told(ledger, 490.0) == [("s0", "idle", 100.0, 460.0, None), ("s0", "idle", 480.0, 490.0, None)]
    assert ledger.preemptions == []
    with pytest.raises(FleetError, match="s0 began twice as incarnation 1"):
        ledger.apply(boot_failed("s0", 500.0, 501.0, incarnation=1))


def test_segments_say_what_each_node_did() -> None:
    words: list[Word] = [
        joined("head", 0.0, "reserved"),
        joined("s0", 1.0),
        tick(2.0),
        start("L0", request("r0"), "head"),
        start("L1", request("r1"), "s0"),
        finished("L0", 5.0),
        phase("train", 6.0),
        start("L2", request("x0", "explore"), "head"),
        finished("L2", 7.0),
        finished("L1", 8.0),
        phase("publish", 9.0),
        tick(10.0),
        start("L3", request("e0", "evaluate"), "s0"),
    ]
    assert told(CostLedger.replayed(PRICES, words), 12.0) == [
        ("head", "idle", 0.0, 2.0, None),
        ("head", "rollout", 2.0, 5.0, "r0"),
        ("head", "idle", 5.0, 6.0, None),
        ("head", "explore", 6.0, 7.0, "x0"),
        ("head", "training", 7.0, 9.0, None),
        ("head", "idle", 9.0, 12.0, None),
        ("s0", "idle", 1.0, 2.0, None),
        ("s0", "rollout", 2.0, 8.0, "r1"),
        ("s0", "idle", 8.0, 10.0, None),
        ("s0", "evaluate", 10.0, 12.0, "e0"),
    ]


def test_a_kill_loses_the_time_since_the_last_commit() -> None:
    words: list[Word] = [
        joined("s0", 0.0),
        joined("s1", 0.0),
        start("L0", request("done"), "s1"),
        finished("L0", 10.0),  # 10 steps in 10 s: the pace
        start("L1", request("r"), "s0"),
        committed("L1", 14.0, 4, released=False),
        lost("s0", 16.0),
        start("L2", request("r"), "s1", step=4),
        finished("L2", 22.0),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    assert told(ledger, 22.0)[:3] == [
        ("s0", "idle", 0.0, 10.0, None),
        ("s0", "rollout", 10.0, 14.0, "r"),
        ("s0", "lost", 14.0, 16.0, "r"),
    ]
    (preemption,) = ledger.preemptions
    assert (preemption.cause, preemption.at, preemption.stopped_at) == ("killed", 16.0, 16.0)
    assert preemption.in_flight == (
        Interrupted(
            request="r",
            kind="rollout",
            lease="L1",
            saved_denoise_step=4,
            denoise_steps_lost=pytest.approx(2.0),
            lost_gpu_seconds=2.0,
            outcome="resumed",
            from_denoise_step=4,
            node="s1",
            waited_seconds=0.0,
        ),
    )
    assert preemption.lost_gpu_seconds == 2.0
    assert preemption.denoise_steps_lost == pytest.approx(2.0)
    assert (ledger.resumed_requests, ledger.recomputed_requests) == (1, 0)


def test_a_notice_with_a_commit_loses_nothing() -> None:
    words: list[Word] = [
        joined("s0", 0.0),
        joined("s1", 0.0),
        start("L1", request("r"), "s0"),
        ev.Notice(node="s0", incarnation=0, seconds_left=30.0, at=4.0),
        ev.Notice(node="s0", incarnation=0, seconds_left=29.0, at=5.0),  # said twice
        committed("L1", 6.0, 5, released=True),
        start("L2", request("r"), "s1", step=5),
        lost("s0", 7.0, "released"),
        finished("L2", 11.0),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    (preemption,) = ledger.preemptions
    assert (preemption.cause, preemption.at, preemption.stopped_at) == ("notice", 4.0, 7.0)
    (request_,) = preemption.in_flight
    assert (request_.outcome, request_.from_denoise_step, request_.node) == ("resumed", 5, "s1")
    assert request_.waited_seconds == 2.0
    assert ledger.gpu_hours(11.0)["lost"] == 0.0
    assert (ledger.resumed_requests, ledger.recomputed_requests, ledger.denoise_steps_lost) == (1, 0, 0.0)


def test_a_request_recomputed_after_its_call_failed_first() -> None:
    """A dead node's call fails before the node is known to be lost; the record still names the request."""
    words: list[Word] = [
        joined("s0", 0.0),
        joined("s1", 0.0),
        start("L1", request("r"), "s0"),
        ev.Failed(lease="L1", error="actor died", fault="node", at=3.0),
        lost("s0", 3.5),
        start("L2", request("r"), "s1"),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    (preemption,) = ledger.preemptions
    assert [(item.request, item.outcome, item.from_denoise_step) for item in preemption.in_flight] == [
        ("r", "recomputed", None)
    ]
    assert preemption.lost_gpu_seconds == 3.0
    assert (ledger.resumed_requests, ledger.recomputed_requests) == (0, 1)


def test_outcomes_besides_resume() -> None:
    words: list[Word] = [
        joined("s0", 0.0),
        joined("s1", 0.0),
        start("L1", request("ends"), "s0"),
        start("L2", request("moves"), "s0"),
        start("L3", request("dropped"), "s0"),
        start("L4", request("waits"), "s0"),
        ev.Notice(node="s0", incarnation=0, seconds_left=30.0, at=1.0),
        finished("L1", 2.0),
        committed("L2", 2.0, 0, released=True),
        start("L5", request("moves"), "s1"),
        ev.Abandon(lease="L3", group=ev.SPGroup(node="s0", incarnation=0)),
        ev.Settle(request="dropped", outcome="aborted"),
        lost("s0", 3.0, "released"),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    (preemption,) = ledger.preemptions
    assert {item.request: item.outcome for item in preemption.in_flight} == {
        "ends": "finished",
        "moves": "moved",
        "dropped": "dropped",
        "waits": "waiting",
    }
    assert ledger.recomputed_requests == 0


def test_commits_that_are_not_used_are_lost_steps() -> None:
    words: list[Word] = [
        joined("s0", 0.0),
        start("L1", request("r"), "s0"),
        committed("L1", 6.0, 6, released=True),
        start("L2", request("r"), "s0", step=4),
        committed("L2", 9.0, 7, released=True),
        start("L3", request("r"), "s0"),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    assert ledger.denoise_steps_lost == 2 + 7
    assert (ledger.resumed_requests, ledger.recomputed_requests) == (1, 1)


def test_groups_of_one_node_share_its_gpus() -> None:
    pair = ev.SPGroup(node="s0", incarnation=0, ranks=(0, 1))
    words: list[Word] = [
        joined("s0", 0.0, gpus=4),
        ev.Start(group=pair, lease="L1", request=request("a")),
        tick(10.0),
        ev.Start(group=ev.SPGroup(node="s0", incarnation=0, ranks=(2,)), lease="L2", request=request("b")),
        finished("L1", 20.0),
        ev.Failed(lease="L2", error="x", fault="node", at=40.0),
    ]
    hours = CostLedger.replayed(PRICES, words).gpu_hours(50.0)
    assert hours == pytest.approx({"useful": 40 / 3600, "lost": 30 / 3600, "idle": 130 / 3600}, abs=1e-15)


def test_a_new_epoch_ends_training_and_counts_no_reaped_node_as_preempted() -> None:
    words: list[Word] = [
        joined("head", 0.0, "reserved"),
        phase("train", 2.0),
        tick(4.0),
        replace(lost("head", 4.5), epoch=1, at=60.0),
        replace(joined("head", 61.0, "reserved", incarnation=1), epoch=1),
        phase("rollout", 70.0, epoch=1),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    assert told(ledger, 71.0) == [
        ("head", "idle", 0.0, 2.0, None),
        ("head", "training", 2.0, 4.5, None),
        ("head", "idle", 61.0, 71.0, None),
    ]
    assert ledger.preemptions == []


def test_refuses_pools_without_price_and_repeated_incarnations() -> None:
    ledger = CostLedger(PRICES)
    with pytest.raises(BadInputError, match="no price for pool 'edge'"):
        ledger.apply(joined("s0", 0.0, "edge"))
    ledger.apply(joined("s0", 0.0))
    with pytest.raises(FleetError, match="s0 began twice as incarnation 0"):
        ledger.apply(joined("s0", 5.0))
