from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spotlight_core.config import RunConfig
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.types import Batch, PlannedPrompt, PolicyVersion, Prompt, RunState, SeedScore
from tasks import checkpoints
from tasks.run_folder import RunFolder, append_record, read_records

CONFIG = RunConfig.model_validate({"name": "run", "iterations": 9, "data": {"prompts": "."}, "rng_seed": 5})


def state(iteration: int) -> RunState:
    explored = (SeedScore(seed=3, reward=1 / 3), SeedScore(seed=5, reward=0.1 + 0.2))
    planned = PlannedPrompt(prompt=Prompt(occurrence="p8", text='A "42"'), seeds=(3, 5), explored=explored)
    batch = Batch(iteration=iteration, prompts=(planned,), audit_occurrence="p8")
    policy = PolicyVersion(label="old", number=iteration, digest="d" * 64)
    return RunState(iteration=iteration, policy=policy, batch=batch, sampler_position=8 * iteration)


def saved(iteration: int, config: RunConfig = CONFIG) -> checkpoints.Saved:
    planner = {"pulls": [1, 2], "mean": 1 / 3}
    return checkpoints.saved(config, state(iteration), planner=planner, mlflow_run_id="f00d")


def trainer(value: float) -> Callable[[Path], None]:
    """A trainer's ``save``: two ranks' files."""

    def save(folder: Path) -> None:
        save_file({"raw.w": torch.full((2, 3), value)}, folder / "rank-00000.safetensors")
        save_file({"raw.w": torch.full((1, 3), -value)}, folder / "rank-00001.safetensors")

    return save


def value(found: checkpoints.Checkpoint) -> float:
    return float(load_file(found.trainer / "rank-00000.safetensors")["raw.w"][0, 0])


def test_what_is_saved_comes_back_bit_for_bit(folder: RunFolder) -> None:
    assert checkpoints.latest(folder) is None
    checkpoints.save(folder, saved(1), trainer(0.1))

    found = checkpoints.latest(folder)

    assert found is not None
    assert found.saved == saved(1)
    assert found.state == state(1)
    assert found.saved.noise == {"rng_seed": 5, "scheme": "philox-names-1"}
    assert found.saved.planner == {"pulls": [1, 2], "mean": 1 / 3}
    assert found.saved.mlflow_run_id == "f00d"
    assert found.damaged == ()
    assert torch.equal(load_file(found.trainer / "rank-00000.safetensors")["raw.w"], torch.full((2, 3), 0.1))
    assert torch.equal(load_file(found.trainer / "rank-00001.safetensors")["raw.w"], torch.full((1, 3), -0.1))


def test_the_last_two_are_kept_in_the_order_of_numbers(folder: RunFolder) -> None:
    for iteration in (8, 9, 10):
        checkpoints.save(folder, saved(iteration), trainer(iteration))

    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["10", "9"]
    found = checkpoints.latest(folder)
    assert found is not None
    assert found.state.iteration == 10


@pytest.mark.parametrize("file", ["state.json", "trainer/rank-00001.safetensors", "manifest.json"])
def test_a_damaged_newest_one_is_named_and_the_previous_used(folder: RunFolder, file: str) -> None:
    checkpoints.save(folder, saved(1), trainer(1.0))
    newest = checkpoints.save(folder, saved(2), trainer(2.0))
    data = bytearray((newest / file).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (newest / file).write_bytes(data)

    found = checkpoints.latest(folder)

    assert found is not None
    assert found.state.iteration == 1
    assert value(found) == 1.0
    assert len(found.damaged) == 1
    assert found.damaged[0].startswith("checkpoint 2 is damaged (")


def test_a_missing_file_counts_as_damage_and_a_half_written_folder_is_no_checkpoint(
    folder: RunFolder,
) -> None:
    checkpoints.save(folder, saved(1), trainer(1.0))
    (checkpoints.save(folder, saved(2), trainer(2.0)) / "trainer/rank-00001.safetensors").unlink()
    (folder.checkpoints / ".3.99.tmp").mkdir()

    found = checkpoints.latest(folder)

    assert found is not None
    assert found.state.iteration == 1


def test_a_file_that_was_added_counts_as_damage_too(folder: RunFolder) -> None:
    checkpoints.save(folder, saved(1), trainer(1.0))
    newest = checkpoints.save(folder, saved(2), trainer(2.0))
    # A reader of shards would take it for a third rank's.
    save_file({"raw.w": torch.zeros(1, 3)}, newest / "trainer/rank-00002.safetensors")

    found = checkpoints.latest(folder)

    assert found is not None
    assert found.damaged == (
        "checkpoint 2 is damaged (trainer/rank-00002.safetensors is not in manifest.json)",
    )


def test_a_trainer_that_fails_to_save_leaves_the_previous_checkpoint(folder: RunFolder) -> None:
    checkpoints.save(folder, saved(1), trainer(1.0))

    def fails(place: Path) -> None:
        (place / "rank-00000.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(folder, saved(2), fails)
    found = checkpoints.latest(folder)
    assert found is not None
    assert (found.state.iteration, found.damaged) == (1, ())


def test_when_none_is_usable_the_run_stops_and_says_so(folder: RunFolder) -> None:
    (checkpoints.save(folder, saved(1), trainer(1.0)) / "state.json").write_text("{}")

    with pytest.raises(
        SpotlightError, match=r"no usable checkpoint in .*checkpoint 1 is damaged \(state.json differs"
    ):
        checkpoints.latest(folder)


def test_saving_over_a_skipped_damaged_one_replaces_it(folder: RunFolder) -> None:
    (checkpoints.save(folder, saved(1), trainer(1.0)) / "state.json").write_text("{}")
    checkpoints.save(folder, saved(1), trainer(5.0))

    found = checkpoints.latest(folder)

    assert found is not None
    assert value(found) == 5.0


GRPO = {"loss": {"type": "grpo"}, "sampler": {"type": "flow_sde"}}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (GRPO, "loss.type = 'nft', this run has 'grpo'"),
        ({"model": {"lora": {"rank": 4}}}, "model.lora = None, this run has {'rank': 4"),
        ({"model": {"weights": "other.safetensors"}}, "model.weights = None, this run has 'other"),
        ({"rng_seed": 6}, "rng_seed = 5, this run has 6"),
        (
            {"model": {"type": "sd3", "path": "hub/sd3"}},
            r"model.guidance = None, this run has 4.5",
        ),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused(changes: dict[str, object], problem: str) -> None:
    other = RunConfig.model_validate(CONFIG.model_dump() | changes)
    with pytest.raises(BadInputError) as refused:
        checkpoints.check_fits(saved(3), other)
    assert str(refused.value).startswith(f"checkpoint 3 was written with {problem}")


def test_the_same_recipe_fits_and_noise_of_another_scheme_does_not() -> None:
    # What the tensors and draws do not depend on may change.
    longer = CONFIG.model_copy(update={"iterations": 20, "name": "longer"})
    checkpoints.check_fits(saved(3), longer)
    found = replace(saved(3), noise={"rng_seed": 5, "scheme": "torch-1"})
    with pytest.raises(BadInputError, match=r"scheme = 'torch-1', this run has 'philox-names-1'"):
        checkpoints.check_fits(found, CONFIG)


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
