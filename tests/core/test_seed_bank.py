"""What exploration scored is kept, whole, and read back as it was."""

from pathlib import Path

import pyarrow.parquet
import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.exploration.arms import Arm
from spotlight_core.seed_bank import SeedBank, SeedEntry, entries_of
from spotlight_core.types import Batch, PlannedPrompt, PolicyVersion, Prompt, SeedScore

POLICY = PolicyVersion(label="old", number=3, digest="d")


def batch(iteration: int = 4) -> Batch:
    explored = tuple(SeedScore(seed=seed, reward=0.25 * seed) for seed in range(4))
    prompts = (
        PlannedPrompt(prompt=Prompt(occurrence="32", text='A "42"'), seeds=(0, 3), explored=explored),
        PlannedPrompt(prompt=Prompt(occurrence="33", text='A "7"'), seeds=(0, 1)),
    )
    return Batch(iteration=iteration, prompts=prompts)


def entries(iteration: int = 4) -> list[SeedEntry]:
    arm = Arm(seeds_per_prompt=4, effective_steps=8)
    return entries_of(batch(iteration), arm, POLICY, 12.5, {("32", 1): "spot-0"})


def test_entries_say_who_drew_a_seed_where_and_what_became_of_it() -> None:
    found = entries()
    assert [(entry.seed, entry.reward, entry.selected, entry.node) for entry in found] == [
        (0, 0.0, True, ""),
        (1, 0.25, False, "spot-0"),
        (2, 0.5, False, ""),
        (3, 0.75, True, ""),
    ]
    assert {(entry.policy, entry.effective_steps, entry.prompt, entry.at) for entry in found} == {
        ("old-3", 8, 'A "42"', 12.5)
    }


def test_it_is_read_back_as_it_was_and_written_twice_it_is_there_once(tmp_path: Path) -> None:
    bank = SeedBank(tmp_path / "bank")
    bank.write(4, entries())
    bank.write(4, entries())
    assert bank.read(4) == entries()
    assert bank.read(5) == []
    bank.write(6, [])
    assert [path.name for path in (tmp_path / "bank").iterdir()] == ["000004.parquet"]


def test_a_resumed_run_explores_later_batches_again(tmp_path: Path) -> None:
    bank = SeedBank(tmp_path)
    for iteration in (3, 4, 5):
        bank.write(iteration, entries(iteration))
    bank.rewind(4)
    assert [bool(bank.read(iteration)) for iteration in (3, 4, 5)] == [True, True, False]


def test_a_damaged_or_foreign_file_is_named(tmp_path: Path) -> None:
    bank = SeedBank(tmp_path)
    bank.write(4, entries())
    path = tmp_path / "000004.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInputError, match=r"cannot read .*000004\.parquet"):
        bank.read(4)
    pyarrow.parquet.write_table(pyarrow.table({"seed": [1]}), path)
    with pytest.raises(BadInputError, match="other columns"):
        bank.read(4)
