"""What a driver that was killed leaves, and what is left of it after the sweep."""

import sys
from pathlib import Path

import numpy as np
import pytest

from spotlight_core.arrays import to_bytes
from spotlight_core.config import RunConfig
from spotlight_core.durable import write_text
from spotlight_core.events import Lost, NodeJoined, SetTimer, Started, encode
from spotlight_core.executor.client import find
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.executor.processes import spawn
from spotlight_core.journal import read_words
from spotlight_core.storage import store_url
from spotlight_core.tensor_store import TensorStore
from tasks.recovery import begin_epoch, sweep
from tasks.run_folder import RunFolder
from tests.core.executor.coordinator_rig import RIG

ROOT = Path(__file__).parents[2]


def recipe(folder: RunFolder, **fleet: object) -> RunConfig:
    """The run's recipe, written down as its driver did."""
    tree = {"name": "mini", "iterations": 3, "data": {"prompts": "prompts"}, "fleet": fleet}
    config = RunConfig.model_validate(tree)
    write_text(folder.recipe, config.model_dump_json())
    return config


def test_a_coordinator_that_outlived_its_driver_is_gone_with_its_word_where_it_was(folder: RunFolder) -> None:
    recipe(folder)
    process = spawn(
        [sys.executable, "-m", RIG, str(folder.path), "--epoch", "0"],
        folder.run_id,
        folder.logs / "coordinator.log",
        {"PYTHONPATH": str(ROOT)},
    )
    find(folder.coordinator, 0, process)

    assert sweep(folder) >= 1
    assert process.wait(10) is not None
    assert not folder.coordinator.exists()
    assert sweep(folder) == 0


def test_nodes_that_nobody_ended_are_buried_once_behind_the_last_whole_line(folder: RunFolder) -> None:
    recipe(folder)
    NodeLog(folder=folder.nodes).start("spot-0", 1, "spot", 1, at=100.0)
    joined = NodeJoined(
        node="spot-0", incarnation=1, pool="spot", gpus=1, started_at=100.0, at=101.0, seq=7, epoch=2
    )
    later = SetTimer(id="nodes/1", at=5_000.0)  # a time to come, which no node was paid for
    folder.journal.write_bytes(encode(joined) + b"\n" + encode(later) + b'\n{"word":"Sta')
    sweep(folder)
    sweep(folder)

    lost = Lost(node="spot-0", incarnation=1, cause="shutdown", stopped_at=101.0, at=101.0, seq=8, epoch=2)
    assert list(read_words(folder.journal)) == [joined, later, lost]


def test_an_epoch_is_higher_than_any_before_and_noted_at_once(folder: RunFolder) -> None:
    assert begin_epoch(folder) == 0
    assert folder.facts() == {"run_id": folder.run_id, "epoch": 0}
    assert begin_epoch(folder) == 1, "the start before journalled nothing"
    folder.journal.write_bytes(encode(Started(lease="7.1", seq=1, epoch=7)) + b"\n")
    assert begin_epoch(folder) == 8
    assert begin_epoch(folder) == 9
    assert folder.facts()["epoch"] == 9


@pytest.mark.parametrize("elsewhere", [False, True])
def test_commits_of_a_former_driver_are_cleared_where_the_recipe_keeps_them(
    folder: RunFolder, tmp_path: Path, elsewhere: bool
) -> None:
    fleet = {"store": {"url": str(tmp_path / "elsewhere")}} if elsewhere else {}
    config = recipe(folder, **fleet)
    url = store_url(config.fleet.store, folder.path, folder.run_id)
    payload = to_bytes({"latents": np.zeros(3, dtype=np.float32)})
    TensorStore.open(url, memory_bytes=0).put("1/rollout/p0/0", 2, payload)
    assert [path for path in Path(url).rglob("*") if path.is_file()] != []

    sweep(folder)
    assert [path for path in Path(url).rglob("*") if path.is_file()] == []


def test_a_recipe_that_cannot_be_read_stops_no_sweep(folder: RunFolder) -> None:
    """``spotlight down`` must end processes of a run whatever became of its files."""
    write_text(folder.recipe, "{}")
    (folder.checkpoints / ".3.abc.tmp").mkdir()

    assert sweep(folder) == 0
    assert list(folder.checkpoints.iterdir()) == []
