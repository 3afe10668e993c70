import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight_core import events as ev
from spotlight_core.errors import BadInputError, FleetError
from spotlight_core.market.ledger import CostLedger, Word, recompute_usd
from spotlight_core.market.preemptions import Interrupted
from spotlight_core.market.prices import PriceBook
from spotlight_core.types import Fidelity, GenerationRequest, Kind, PolicyVersion, Prompt

PRICES = PriceBook({"reserved": 10.08, "spot": 2.87})
POLICY = PolicyVersion(label="old", number=0, digest="d")


def request(name: str, kind: Kind = "rollout") -> GenerationRequest:
    prompt = Prompt(occurrence="0/0", text='"1"')
    fidelity = Fidelity(denoise_steps=10)
    return GenerationRequest(
        id=name, kind=kind, prompts=(prompt,), seeds=(1,), policy=POLICY, fidelity=fidelity
    )


def joined(node: str, at: float, pool: str = "spot", incarnation: int = 0, gpus: int = 1) -> ev.NodeJoined:
    return ev.NodeJoined(node=node, incarnation=incarnation, pool=pool, gpus=gpus, at=at, started_at=at)


def lost(node: str, at: float, cause: str = "killed", incarnation: int = 0) -> ev.Lost:
    return ev.Lost(node=node, incarnation=incarnation, cause=cause, at=at, stopped_at=at)


def start(lease: str, work: GenerationRequest, node: str, step: int = 0, incarnation: int = 0) -> ev.Start:
    group = ev.SPGroup(node=node, generation=incarnation)
    return ev.Start(group=group, lease=lease, request=work, from_denoise_step=step)


def tick(at: float) -> ev.Timer:
    return ev.Timer(id="tick", at=at)


def finished(lease: str, at: float) -> ev.Finished:
    return ev.Finished(lease=lease, request="r", ref="ref", digest="d", at=at)


def committed(lease: str, at: float, step: int, released: bool) -> ev.Committed:
    return ev.Committed(
        lease=lease, request="r", next_denoise_step=step, ref="ref", digest="d", released=released, at=at
    )


def phase(name: ev.Phase, at: float, epoch: int = 0) -> ev.PhaseChanged:
    return ev.PhaseChanged(phase=name, iteration=0, at=at, epoch=epoch)


def told(ledger: CostLedger, now: float) -> list[tuple[str, str, float, float, str | None]]:
    return [(part.node, part.activity, part.start, part.end, part.request) for part in ledger.segments(now)]


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
            request="r", kind="rollout", outcome="resumed", from_denoise_step=4, node="s1", waited_seconds=0.0
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
        ev.Failed(lease="L1", error="actor died", retryable=True, at=3.0),
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
        ev.Abandon(lease="L3", group=ev.SPGroup(node="s0", generation=0)),
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
    pair = ev.SPGroup(node="s0", generation=0, ranks=(0, 1))
    words: list[Word] = [
        joined("s0", 0.0, gpus=4),
        ev.Start(group=pair, lease="L1", request=request("a")),
        tick(10.0),
        ev.Start(group=ev.SPGroup(node="s0", generation=0, ranks=(2,)), lease="L2", request=request("b")),
        finished("L1", 20.0),
        ev.Failed(lease="L2", error="x", retryable=True, at=40.0),
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
    with pytest.raises(FleetError, match="s0 joined twice as incarnation 0"):
        ledger.apply(joined("s0", 5.0))


def test_the_fold_survives_the_journal_as_json() -> None:
    words: list[Word] = [
        joined("s0", 0.5),
        start("L", request("r"), "s0"),
        finished("L", 2.25),
        lost("s0", 3.125),
    ]
    again = [ev.from_dict(json.loads(json.dumps(ev.to_dict(word)))) for word in words]
    first, second = CostLedger.replayed(PRICES, words), CostLedger.replayed(PRICES, again)
    assert first.segments(9.0) == second.segments(9.0)
    assert first.usd(9.0) == second.usd(9.0)


NODES = ("n0", "n1", "n2")


@st.composite
def journals(draw: st.DrawFn) -> list[Word]:
    """Any order of words on three nodes, also orders no coordinator would write."""
    words: list[Word] = []
    at, alive, incarnations, leases = 1.7e9, set[str](), dict.fromkeys(NODES, 0), 0
    for _ in range(draw(st.integers(5, 60))):
        at += draw(st.floats(0, 20, allow_subnormal=False))
        node = draw(st.sampled_from(NODES))
        key = {"node": node, "incarnation": incarnations[node]}
        lease = f"L{draw(st.integers(0, max(0, leases)))}"
        kind = draw(
            st.sampled_from(["join", "lose", "start", "start", "finish", "commit", "fail", "train", "rest"])
        )
        if kind == "join" and node not in alive:
            incarnations[node] += 1
            pool = "reserved" if node == "n0" else "spot"
            billed_since = at - draw(st.floats(0, 5))
            words.append(replace(joined(node, at, pool, incarnations[node], gpus=2), started_at=billed_since))
            alive.add(node)
        elif kind == "lose" and node in alive:
            cause = draw(st.sampled_from(["killed", "released"]))
            stopped_at = at - draw(st.floats(-1, 5))
            words.append(ev.Lost(**key, cause=cause, at=at, stopped_at=stopped_at))
            alive.discard(node)
        elif kind == "start":
            leases += 1
            words += [
                tick(at),
                start(f"L{leases}", request(f"r{leases % 7}"), node, incarnation=key["incarnation"]),
            ]
        elif kind == "finish":
            words.append(finished(lease, at))
        elif kind == "commit":
            words.append(committed(lease, at, 3, draw(st.booleans())))
        elif kind == "fail":
            words.append(ev.Failed(lease=lease, error="x", retryable=True, at=at))
        elif kind in ("train", "rest"):
            words.append(phase("train" if kind == "train" else "rollout", at))
    return words


@settings(max_examples=150, deadline=None)
@given(words=journals(), later=st.floats(0, 100))
def test_segments_tile_billed_time(words: list[Word], later: float) -> None:
    ledger = CostLedger.replayed(PRICES, words)
    now = ledger.last_at + later
    bills = {
        (word.node, word.incarnation): [word.started_at, now]
        for word in words
        if isinstance(word, ev.NodeJoined)
    }
    for word in words:
        if isinstance(word, ev.Lost):
            bill = bills[word.node, word.incarnation]
            bill[1] = max(bill[0], word.stopped_at)
    lives: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for part in ledger.segments(now):
        assert part.start < part.end
        lives.setdefault((part.node, part.incarnation), []).append((part.start, part.end))
    assert {key for key, (begin, end) in bills.items() if begin < end} == set(lives)
    for key, life in lives.items():
        assert [life[0][0], life[-1][1]] == bills[key]
        assert all(left[1] == right[0] for left, right in pairwise(life))
    hours = sum(2 * (end - begin) for begin, end in bills.values()) / 3600
    assert sum(ledger.gpu_hours(now).values()) == pytest.approx(hours, abs=1e-9)
    assert ledger.usd(now, "reserved") + ledger.usd(now, "spot") == pytest.approx(ledger.usd(now), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(words=journals())
def test_dollars_equal_the_nodes_own_logs(
    words: list[Word], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("nodes")
    for word in words:
        if isinstance(word, ev.NodeJoined):
            record = {"event": "start", "node": word.node, "incarnation": word.incarnation, "pool": word.pool}
            record |= {"gpus": word.gpus, "at": word.started_at, "by": "node"}
        elif isinstance(word, ev.Lost):
            record = {
                "event": "stop",
                "node": word.node,
                "incarnation": word.incarnation,
                "at": word.stopped_at,
            }
        else:
            continue
        with (folder / f"{word.node}-{word.incarnation}.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
    ledger = CostLedger.replayed(PRICES, words)
    now = ledger.last_at + 10.0
    by_pool = recompute_usd(folder, PRICES, now)
    for pool in ("reserved", "spot"):
        assert abs(by_pool.get(pool, 0.0) - ledger.usd(now, pool)) < 1e-9


def test_recompute_takes_the_first_of_two_stops_and_refuses_nonsense(tmp_path: Path) -> None:
    begin = {
        "event": "start",
        "node": "s0",
        "incarnation": 2,
        "pool": "spot",
        "gpus": 2,
        "at": 100.0,
        "by": "node",
    }
    stops = [{**begin, "event": "stop", "at": at} for at in (1900.0, 1960.0)]
    log = tmp_path / "s0-2.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in (begin, *stops)), encoding="utf-8")
    assert recompute_usd(tmp_path, PRICES, 9999.0) == {"spot": pytest.approx(2.87, abs=1e-15)}
    log.write_text(json.dumps(begin) + "\n{torn", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"s0-2\.jsonl:2 is not a node's start or stop"):
        recompute_usd(tmp_path, PRICES, 9999.0)
    log.write_text(json.dumps(stops[0]) + "\n", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"s0-2\.jsonl:1 .*before any start"):
        recompute_usd(tmp_path, PRICES, 9999.0)
