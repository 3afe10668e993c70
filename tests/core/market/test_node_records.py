"""What nodes logged themselves."""

import json
from pathlib import Path

import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.market.node_records import NodeRecord, Strike, read_lives, read_strikes

START = {"event": "start", "node": "s0", "incarnation": 2, "pool": "spot", "gpus": 2, "at": 1.0}
STRIKE = {"event": "strike", "at": 3.5, "lease": "0.7", "request": "r", "denoise_step": 6}
STOP = {"event": "stop", "node": "s0", "incarnation": 2, "pool": "spot", "gpus": 2, "at": 4.0}


def written(folder: Path, *records: dict[str, object], cut: str = "") -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records) + cut
    (folder / "s0-2.jsonl").write_text(text, encoding="utf-8")
    return folder


def test_a_life_and_its_strike(tmp_path: Path) -> None:
    written(tmp_path, START, STRIKE, STOP, cut='{"event": "sto')
    life = NodeRecord(node="s0", incarnation=2, pool="spot", gpus=2, started_at=1.0, stopped_at=4.0)
    assert read_lives(tmp_path) == [life]
    assert read_strikes(tmp_path) == {"0.7": Strike(at=3.5, lease="0.7", request="r", denoise_step=6)}


def test_no_folder_holds_nothing(tmp_path: Path) -> None:
    assert read_lives(tmp_path / "none") == []
    assert read_strikes(tmp_path / "none") == {}


def test_a_strike_without_its_step_is_refused(tmp_path: Path) -> None:
    written(tmp_path, START, {**STRIKE, "denoise_step": None})
    with pytest.raises(BadInputError, match=r"s0-2\.jsonl:2 is no record of a node"):
        read_strikes(tmp_path)
