from pathlib import Path

import pytest
import torch

from spotlight_core.errors import SpotlightError
from spotlight_core.types import Batch, PlannedPrompt, PolicyVersion, Prompt, RunState, SeedScore
from tasks import checkpoints
from tasks.run_folder import RunFolder, append_record, read_records


def state(iteration: int) -> RunState:
    explored = (SeedScore(seed=3, reward=1 / 3), SeedScore(seed=5, reward=0.1 + 0.2))
    planned = PlannedPrompt(prompt=Prompt(occurrence="p8", text='A "42"'), seeds=(3, 5), explored=explored)
    batch = Batch(iteration=iteration, prompts=(planned,), audit_occurrence="p8")
    policy = PolicyVersion(label="old", number=iteration, digest="d" * 64)
    return RunState(iteration=iteration, policy=policy, batch=batch, sampler_position=8 * iteration)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"raw.w": torch.full((2, 3), value), "counters": torch.tensor([7, 0], dtype=torch.int64)}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_what_is_saved_comes_back_bit_for_bit(folder: RunFolder) -> None:
    assert checkpoints.latest(folder) is None
    checkpoints.save(folder, state(1), tensors(0.1))

    found = checkpoints.latest(folder)

    assert found is not None
    assert found.state == state(1)
    assert found.damaged == ()
    assert set(found.tensors) == {"raw.w", "counters"}
    assert torch.equal(found.tensors["raw.w"], tensors(0.1)["raw.w"])
    assert torch.equal(found.tensors["counters"], tensors(0.1)["counters"])


def test_the_last_two_are_kept_in_the_order_of_numbers(folder: RunFolder) -> None:
    for iteration in (8, 9, 10):
        checkpoints.save(folder, state(iteration), tensors(iteration))

    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["10", "9"]
    found = checkpoints.latest(folder)
    assert found is not None
    assert found.state.iteration == 10


@pytest.mark.parametrize("file", ["state.json", "tensors.safetensors", "manifest.json"])
def test_a_damaged_newest_one_is_named_and_the_previous_used(folder: RunFolder, file: str) -> None:
    checkpoints.save(folder, state(1), tensors(1.0))
    newest = checkpoints.save(folder, state(2), tensors(2.0))
    data = bytearray((newest / file).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (newest / file).write_bytes(data)

    found = checkpoints.latest(folder)

    assert found is not None
    assert found.state.iteration == 1
    assert float(found.tensors["raw.w"][0, 0]) == 1.0
    assert len(found.damaged) == 1
    assert found.damaged[0].startswith("checkpoint 2 is damaged (")


def test_a_missing_file_counts_as_damage_and_a_half_written_folder_is_no_checkpoint(
    folder: RunFolder,
) -> None:
    checkpoints.save(folder, state(1), tensors(1.0))
    (checkpoints.save(folder, state(2), tensors(2.0)) / "tensors.safetensors").unlink()
    (folder.checkpoints / ".3.99.tmp").mkdir()

    found = checkpoints.latest(folder)

    assert found is not None
    assert found.state.iteration == 1


def test_when_none_is_usable_the_run_stops_and_says_so(folder: RunFolder) -> None:
    (checkpoints.save(folder, state(1), tensors(1.0)) / "state.json").write_text("{}")

    with pytest.raises(
        SpotlightError, match=r"no usable checkpoint in .*checkpoint 1 is damaged \(state.json differs"
    ):
        checkpoints.latest(folder)


def test_saving_over_a_skipped_damaged_one_replaces_it(folder: RunFolder) -> None:
    (checkpoints.save(folder, state(1), tensors(1.0)) / "state.json").write_text("{}")
    checkpoints.save(folder, state(1), tensors(5.0))

    found = checkpoints.latest(folder)

    assert found is not None
    assert float(found.tensors["raw.w"][0, 0]) == 5.0


def test_rewind_leaves_exactly_the_finished_iterations(folder: RunFolder) -> None:
    for iteration in (-1, 0, 1, 2):
        append_record(folder.iterations, {"iteration": iteration})
    for iteration in (1, 2, 3):  # the decision of an iteration is taken in the one before
        append_record(folder.decisions, {"iteration": iteration})
    append_record(folder.journal, {"word": "Timer"})
    with folder.journal.open("a") as file:
        file.write('{"word": "Ti')

    assert checkpoints.rewind(folder, 2) == 1

    assert [record["iteration"] for record in read_records(folder.iterations)] == [-1, 0, 1]
    assert [record["iteration"] for record in read_records(folder.decisions)] == [1, 2]
    assert folder.journal.read_text() == '{"word": "Timer"}\n'
