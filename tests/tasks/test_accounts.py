import threading
from pathlib import Path

import pytest

from spotlight_core.errors import BadInputError, FleetError
from spotlight_core.events import Event, Lost, NodeJoined, Timer, encode
from spotlight_core.journal import JournalFollower
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.prices import PriceBook
from tasks import accounts
from tasks.accounts import LiveLedger, SpotNodes, check_ends

PRICES = PriceBook({"reserved": 3600.0, "spot": 36.0})


def joined(node: str, pool: str, at: float, seq: int) -> NodeJoined:
    return NodeJoined(node=node, incarnation=1, pool=pool, gpus=1, started_at=at, at=at, seq=seq, epoch=0)


def lost(node: str, at: float, seq: int) -> Lost:
    return Lost(node=node, incarnation=1, cause="killed", stopped_at=at, at=at, seq=seq, epoch=0)


def append(path: Path, *events: Event) -> None:
    with path.open("ab") as file:
        file.writelines(encode(event) + b"\n" for event in events)


class Counts:
    """A display that keeps the numbers of spot nodes it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.heard = threading.Event()

    def nodes(self, spot: int) -> None:
        self.told.append(spot)
        self.heard.set()


def ledger(path: Path, counts: Counts) -> LiveLedger:
    return LiveLedger(CostLedger(PRICES), JournalFollower(path), SpotNodes(counts))  # type: ignore[arg-type]


def test_every_answer_is_from_all_that_is_journalled(tmp_path: Path) -> None:
    path, counts = tmp_path / "journal.jsonl", Counts()
    live = ledger(path, counts)
    assert live.read(lambda it: it.usd(110.0)) == 0.0

    append(path, joined("reserved-0", "reserved", 100.0, 1), joined("spot-0", "spot", 100.0, 2))
    assert live.read(lambda it: it.usd(110.0)) == pytest.approx(10.1)
    append(path, lost("spot-0", 105.0, 3))
    assert live.read(lambda it: it.usd(110.0)) == pytest.approx(10.05)
    assert counts.told == [1, 0]


def test_the_display_hears_of_nodes_when_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "FOLLOW_SECONDS", 0.01)
    path, counts = tmp_path / "journal.jsonl", Counts()
    live = ledger(path, counts)
    live.start()
    append(path, joined("spot-0", "spot", 100.0, 1))

    assert counts.heard.wait(20)
    live.close()
    append(path, lost("spot-0", 105.0, 2))
    assert counts.told == [1]
    assert live.read(lambda it: it.usd(110.0)) == pytest.approx(0.05)
    assert counts.told == [1, 0]


def test_a_word_that_cannot_be_accounted_for_fails_every_later_answer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    live = ledger(path, Counts())
    append(path, joined("spot-0", "spot", 100.0, 1), joined("spot-0", "spot", 101.0, 2), Timer(id="x", seq=3))

    for _ in range(2):
        with pytest.raises(FleetError, match="twice"):
            live.read(lambda it: it.usd(110.0))


def test_a_node_without_an_end_is_named_when_the_fleet_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    live = ledger(path, Counts())
    append(path, joined("reserved-0", "reserved", 100.0, 1), joined("spot-0", "spot", 100.0, 2))
    append(path, lost("spot-0", 105.0, 3))
    with pytest.raises(FleetError, match="the end of reserved-0 is not in the journal"):
        live.read(check_ends)

    append(path, lost("reserved-0", 106.0, 4))
    live.read(check_ends)


def test_a_damaged_line_fails_every_later_answer(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    live = ledger(path, Counts())
    path.write_bytes(b"nonsense\n")
    append(path, joined("spot-0", "spot", 100.0, 1))

    for _ in range(2):
        with pytest.raises(BadInputError, match="is no word"):
            live.read(lambda it: it.usd(110.0))
