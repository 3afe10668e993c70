"""Start and stop records, and the books of a run whose driver was killed."""

import json
from pathlib import Path

import pytest

from spotlight_core.errors import SpotlightError
from spotlight_core.events import BootFailed, Event, Lost, NodeJoined, encode
from spotlight_core.executor.burial import bury_open_nodes
from spotlight_core.executor.node_log import NodeLife, NodeLog


def life(log: NodeLog, node: str, incarnation: int = 1) -> NodeLife:
    found = log.life(node, incarnation)
    assert found is not None
    return found


def test_a_life_is_what_its_file_says(tmp_path: Path) -> None:
    log = NodeLog(folder=tmp_path / "nodes")
    assert log.life("spot-0", 1) is None
    assert log.next_incarnation("spot-0") == 1
    log.start("spot-0", 1, "spot", 2, 10.25)
    expected = NodeLife(node="spot-0", incarnation=1, pool="spot", gpus=2, started_at=10.25, stopped_at=None)
    assert log.life("spot-0", 1) == expected
    assert log.stop(expected, 12.5, "node") == 12.5
    assert log.stop(expected, 99.0, "coordinator") == 12.5, "the first record holds"
    assert life(log, "spot-0").stopped_at == 12.5
    assert log.next_incarnation("spot-0") == 2
    records = [json.loads(line) for line in log.path("spot-0", 1).read_text().splitlines()]
    common = {"node": "spot-0", "incarnation": 1, "pool": "spot", "gpus": 2}
    assert records == [
        {"event": "start", "at": 10.25, "by": "node"} | common,
        {"event": "stop", "at": 12.5, "by": "node"} | common,
    ]


def test_half_a_line_is_no_record_and_nothing_stops_before_it_starts(tmp_path: Path) -> None:
    log = NodeLog(folder=tmp_path)
    log.start("spot-0", 1, "spot", 1, 10.0)
    with log.path("spot-0", 1).open("a") as file:
        file.write('{"event": "stop", "at"')
    (tmp_path / "spot-1-1.jsonl").write_text('{"event": "sta')
    assert [(one.node, one.stopped_at) for one in log.lives()] == [("spot-0", None)]
    other = NodeLog(folder=tmp_path / "other")
    other.start("spot-0", 1, "spot", 1, 10.0)
    assert other.stop(life(other, "spot-0"), 9.0, "coordinator") == 10.0


@pytest.mark.parametrize(
    "damage", [b"\xf7\x00\n", b"not json\n", b"[1]\n", b'{"at": 1}\n', b'{"event": "start"}\n']
)
def test_a_file_that_is_no_log_is_named(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "spot-0-1.jsonl"
    path.write_bytes(damage)
    with pytest.raises(SpotlightError, match=f"{path} is no log of a node .*: restore the file"):
        list(NodeLog(folder=tmp_path).lives())


def test_burial_brings_the_journal_to_what_the_nodes_say(tmp_path: Path) -> None:
    log = NodeLog(folder=tmp_path / "nodes")
    for number, node in enumerate(["open", "silent", "booting", "closed"]):
        log.start(node, 1, "spot", 1, 10.0 + number)
    log.stop(life(log, "silent"), 20.0, "node")
    log.stop(life(log, "closed"), 21.0, "node")
    words: list[Event] = [
        NodeJoined(node=node, incarnation=1, pool="spot", gpus=1, started_at=0.0)
        for node in ("open", "silent", "closed")
    ]
    words.append(Lost(node="closed", incarnation=1, cause="released", stopped_at=21.0))
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(b"".join(encode(word) + b"\n" for word in words))

    events = bury_open_nodes(tmp_path, 30.0)
    assert events == [
        BootFailed(
            node="booting",
            pool="spot",
            error="killed while it booted",
            incarnation=1,
            gpus=1,
            started_at=12.0,
            stopped_at=30.0,
        ),
        Lost(node="open", incarnation=1, cause="killed", stopped_at=30.0),
        Lost(node="silent", incarnation=1, cause="killed", stopped_at=20.0),
    ]
    assert {one.node: one.stopped_at for one in log.lives()} == {
        "booting": 30.0,
        "closed": 21.0,
        "open": 30.0,
        "silent": 20.0,
    }
    assert bury_open_nodes(tmp_path, 40.0) == events, "until the journal holds them"
    with journal.open("ab") as file:
        file.write(b"".join(encode(word) + b"\n" for word in events))
    assert bury_open_nodes(tmp_path, 50.0) == []


def test_a_run_that_never_booted_has_nothing_to_bury(tmp_path: Path) -> None:
    assert bury_open_nodes(tmp_path, 1.0) == []
