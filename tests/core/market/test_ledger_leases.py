"""When a lease's time begins, what ends it, and the rows that say so."""

import pytest

from spotlight_core import events as ev
from spotlight_core.market.ledger import CostLedger, Word
from spotlight_core.market.ledger_rows import LedgerRow, csv_lines, ledger_rows
from tests.core.market.words import (
    PRICES,
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


def started(lease: str, at: float) -> ev.Started:
    return ev.Started(lease=lease, at=at)


def gpu_seconds(row: LedgerRow) -> tuple[float, float, float]:
    return row.useful_gpu_seconds, row.idle_gpu_seconds, row.lost_gpu_seconds


def queued(lease: str, name: str, node: str, ranks: tuple[int, ...] = (0,)) -> ev.Start:
    group = ev.SPGroup(node=node, incarnation=0, ranks=ranks)
    return ev.Start(group=group, lease=lease, request=request(name), queued=True)


def test_useful_time_begins_when_the_group_says_so_and_a_sign_of_life_changes_nothing() -> None:
    words: list[Word] = [
        joined("s0", 0.0),
        tick(1.0),
        start("L", request("r"), "s0"),
        started("L", 3.0),
        started("L", 5.0),
        finished("L", 13.0),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    assert told(ledger, 13.0) == [("s0", "idle", 0.0, 3.0, None), ("s0", "rollout", 3.0, 13.0, "r")]


def test_a_queued_lease_costs_nothing_until_the_one_before_it_has_ended() -> None:
    words: list[Word] = [
        joined("s0", 0.0),
        start("L1", request("a"), "s0"),
        tick(2.0),
        queued("L2", "b", "s0"),
        finished("L1", 10.0),
        started("L2", 11.0),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    assert told(ledger, 14.0) == [
        ("s0", "rollout", 0.0, 10.0, "a"),
        ("s0", "idle", 10.0, 11.0, None),
        ("s0", "rollout", 11.0, 14.0, "b"),
    ]


def test_a_queued_lease_that_says_nothing_begins_at_the_end_of_the_one_before() -> None:
    words: list[Word] = [joined("s0", 0.0), start("L1", request("a"), "s0"), queued("L2", "b", "s0")]
    words += [committed("L1", 4.0, 2, released=True), finished("L2", 9.0)]
    assert told(CostLedger.replayed(PRICES, words), 9.0) == [
        ("s0", "rollout", 0.0, 4.0, "a"),
        ("s0", "rollout", 4.0, 9.0, "b"),
    ]


def test_a_queued_lease_is_not_in_flight_and_loses_nothing_with_its_node() -> None:
    words: list[Word] = [
        joined("s0", 0.0),
        joined("s1", 0.0),
        start("L1", request("a"), "s0"),
        queued("L2", "b", "s0"),
        lost("s0", 6.0),
        start("L3", request("b"), "s1"),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    (preemption,) = ledger.preemptions
    assert [item.request for item in preemption.in_flight] == ["a"]
    assert preemption.lost_gpu_seconds == 6.0
    assert ledger.recomputed_requests == 0
    assert told(ledger, 6.0)[0] == ("s0", "lost", 0.0, 6.0, "a")


def test_an_abandoned_queued_lease_moves_without_a_loss() -> None:
    words: list[Word] = [
        joined("s0", 0.0),
        joined("s1", 0.0),
        start("L1", request("a"), "s0"),
        queued("L2", "b", "s0"),
        ev.Notice(node="s0", incarnation=0, seconds_left=30.0, at=4.0),
        ev.Abandon(lease="L2", group=ev.SPGroup(node="s0", incarnation=0)),
        ev.Failed(lease="L2", error="abandoned", fault="nobody", at=4.1),
        start("L3", request("b"), "s1"),
        committed("L1", 5.0, 4, released=True),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    assert [item.request for item in ledger.preemptions[0].in_flight] == ["a"]
    assert ledger.gpu_hours(5.0)["lost"] == 0.0
    assert ledger.recomputed_requests == 0


def test_a_lost_process_breaks_the_leases_of_its_group_alone_and_is_no_preemption() -> None:
    words: list[Word] = [
        joined("s0", 0.0, gpus=2),
        start("L1", request("a"), "s0"),
        ev.Start(group=ev.SPGroup(node="s0", incarnation=0, ranks=(1,)), lease="L2", request=request("b")),
        queued("L3", "c", "s0"),
        ev.RankLost(node="s0", incarnation=0, rank=0, cause="died", error="x", at=4.0),
        finished("L2", 10.0),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    assert ledger.preemptions == []
    assert ledger.gpu_hours(10.0) == pytest.approx(
        {"useful": 10 / 3600, "lost": 4 / 3600, "idle": 6 / 3600}, abs=1e-15
    )


def test_silence_is_a_preemption_and_the_fleets_own_notice_is_none() -> None:
    words: list[Word] = [
        joined("s0", 0.0),
        joined("o0", 0.0, "spot"),
        start("L1", request("a"), "s0"),
        ev.Notice(node="o0", incarnation=0, seconds_left=30.0, source="fleet", at=4.0),
        lost("o0", 5.0, "released"),
        lost("s0", 6.0, "silent"),
    ]
    (preemption,) = CostLedger.replayed(PRICES, words).preemptions
    assert (preemption.node, preemption.cause, preemption.lost_gpu_seconds) == ("s0", "silent", 6.0)


def test_on_demand_nodes_have_their_price() -> None:
    prices = type(PRICES)({**PRICES.prices, "on_demand": 3.6})
    words: list[Word] = [joined("on-demand-0", 0.0, "on_demand", gpus=2), lost("on-demand-0", 10.0)]
    assert CostLedger.replayed(prices, words).usd(20.0, "on_demand") == pytest.approx(0.02)


def test_a_row_for_every_state_change_with_the_sums_so_far() -> None:
    words: list[Word] = [
        joined("head", 0.0, "reserved"),
        joined("s0", 1.0, gpus=2),
        tick(2.0),
        start("L1", request("a"), "s0"),
        tick(4.0),
        ev.Start(group=ev.SPGroup(node="s0", incarnation=0, ranks=(1,)), lease="L2", request=request("b")),
        phase("train", 5.0),
        lost("s0", 6.0),
    ]
    ledger = CostLedger.replayed(PRICES, words)
    rows = list(ledger_rows(ledger, 8.0))
    changes = [(row.at, row.node, row.from_state, row.to_state, *gpu_seconds(row)) for row in rows]
    assert changes == [
        (0.0, "head", "absent", "idle", 0.0, 0.0, 0.0),
        (1.0, "s0", "absent", "idle", 0.0, 0.0, 0.0),
        (2.0, "s0", "idle", "1 idle + 1 lost", 0.0, 2.0, 0.0),
        (4.0, "s0", "1 idle + 1 lost", "lost", 0.0, 4.0, 2.0),
        (5.0, "head", "idle", "training", 0.0, 5.0, 0.0),
        (6.0, "s0", "lost", "gone", 0.0, 4.0, 6.0),
        (8.0, "head", "training", "now", 3.0, 5.0, 0.0),
    ]
    last = {row.node: row.usd for row in rows}
    assert sum(last.values()) == pytest.approx(ledger.usd(8.0), abs=1e-12)
    assert list(csv_lines(rows))[:2] == [
        "at,node,incarnation,pool,from_state,to_state,useful_gpu_seconds,idle_gpu_seconds,"
        "lost_gpu_seconds,usd",
        "0.0,head,0,reserved,absent,idle,0.0,0.0,0.0,0.0",
    ]
