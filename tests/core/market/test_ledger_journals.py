"""The cost ledger over whole journals: time is tiled, and dollars are those of the nodes' own logs."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from spotlight_core import events as ev
from spotlight_core.errors import BadInputError
from spotlight_core.market.ledger import CostLedger, Word
from spotlight_core.market.node_records import recompute_usd
from tests.core.market.words import PRICES, committed, finished, joined, lost, phase, request, start, tick


def test_the_fold_survives_the_journal_as_json() -> None:
    words: list[Word] = [
        joined("s0", 0.5),
        start("L", request("r"), "s0"),
        finished("L", 2.25),
        lost("s0", 3.125),
    ]
    again = [ev.decode(ev.encode(word)) for word in words]
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
            words.append(ev.Failed(lease=lease, error="x", fault="node", at=at))
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
    log.write_text(json.dumps(begin) + "\n{torn\n", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"s0-2\.jsonl:2 is no record of a node"):
        recompute_usd(tmp_path, PRICES, 9999.0)
    log.write_text(json.dumps(stops[0]) + "\n", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"s0-2\.jsonl:1 .*before any start"):
        recompute_usd(tmp_path, PRICES, 9999.0)
