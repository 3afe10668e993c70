"""The trainer in processes of its own: the same interface, the same steps, and what ends it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from spotlight_core.config import RunConfig
from spotlight_core.diffusion.models import build_model
from spotlight_core.errors import BadInputError, TrainingError
from spotlight_core.learning import ranks as module
from spotlight_core.learning.ranks import TrainerRanks, build_trainer, read_groups, write_groups
from spotlight_core.learning.trainer import PolicyTrainer
from spotlight_core.learning.updates import TrainingGroup, split
from tests.core.learning.scenarios import GRPO, LORA, NFT, config, small_groups, with_optimizer

ROOT = Path(__file__).parents[3]
TWO = {"trainer": {"ranks": 2}}


def groups_of(recipe: RunConfig) -> list[TrainingGroup]:
    return small_groups(recipe, model=build_model(recipe.model, "rollout"))  # type: ignore[arg-type]


def test_groups_travel_to_the_bit(tmp_path: Path) -> None:
    group = TrainingGroup(
        prompt='Ein Schild: "42" – größer\n',
        rewards=np.array([0.1 + 0.2, 1 / 3]),
        parts={"ocr": np.array([1.0, -0.0])},
        arrays={"x0": np.array([[1.5, np.nan]], dtype=np.float32), "logp_TB": np.zeros((0, 2))},
        sde_steps=(1, 3),
    )
    plain = TrainingGroup(prompt="", rewards=np.zeros(2), arrays={})
    write_groups([group, plain], tmp_path / "groups.safetensors")

    found, other = read_groups(tmp_path / "groups.safetensors")

    assert (found.prompt, found.sde_steps) == (group.prompt, (1, 3))
    for mine, theirs in ((group.arrays, found.arrays), (group.parts, found.parts)):
        assert list(mine) == list(theirs)
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype
            assert mine[name].tobytes() == theirs[name].tobytes()
    assert found.rewards.tobytes() == group.rewards.tobytes()
    assert (other.sde_steps, other.parts, other.arrays) == (None, {}, {})


def test_one_rank_is_a_trainer_in_this_process(tmp_path: Path) -> None:
    recipe = config(NFT | LORA, trainer={"gradient_checkpointing": True})
    trainer = build_trainer(recipe, tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()
    assert isinstance(trainer, PolicyTrainer)
    assert trainer.model.transformer.is_gradient_checkpointing
    trainer.close()


@pytest.fixture(scope="module")
def recipe() -> RunConfig:
    return with_optimizer(NFT | LORA | TWO, samples_per_forward=4)


@pytest.fixture
def ranks(recipe: RunConfig, tmp_path: Path) -> Iterator[TrainerRanks]:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "meeting").write_text("of a run that was killed")
    trainer = TrainerRanks(recipe, tmp_path / "scratch")
    yield trainer
    trainer.close()
    assert not (tmp_path / "scratch").exists()


@pytest.mark.slow
def test_two_processes_do_as_one(ranks: TrainerRanks, recipe: RunConfig, tmp_path: Path) -> None:
    groups = groups_of(recipe)
    alone = build_trainer(with_optimizer(NFT | LORA, samples_per_forward=4), tmp_path / "unused")
    assert ranks.rollout_label == alone.rollout_label == "old"
    assert all(torch.equal(t, alone.trained_weights()[n]) for n, t in ranks.trained_weights().items())

    for iteration in range(2):
        found, expected = ranks.train(groups, iteration), alone.train(groups, iteration)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-12)
    for one, two in (
        (alone.trained_weights(), ranks.trained_weights()),
        (alone.rollout_weights(), ranks.rollout_weights()),
        (alone.ema_weights(), ranks.ema_weights()),
    ):
        assert one.keys() == two.keys()
        flat = [torch.cat([weights[n].double().flatten() for n in sorted(one)]) for weights in (one, two)]
        assert float((flat[1] - flat[0]).norm() / flat[0].norm()) < 1e-6

    # Each reads what the other wrote: the same bits from there on, and nothing left behind.
    ranks.save(tmp_path / "two")
    alone.load(tmp_path / "two")
    assert all(torch.equal(t, alone.trained_weights()[n]) for n, t in ranks.trained_weights().items())
    alone.train(groups, 2)
    alone.save(tmp_path / "one")
    ranks.load(tmp_path / "one")
    assert all(torch.equal(t, alone.ema_weights()[n]) for n, t in ranks.ema_weights().items())
    build_trainer(config(GRPO), tmp_path).save(tmp_path / "other")
    with pytest.raises(TrainingError, match="does not fit this recipe"):  # on all ranks, which live on
        ranks.load(tmp_path / "other")
    assert ranks.rollout_weights().keys() == alone.rollout_weights().keys()


@pytest.mark.slow
def test_a_killed_rank_is_named_and_ends_the_others(ranks: TrainerRanks, recipe: RunConfig) -> None:
    trainer = ranks
    trainer.check()
    processes = [psutil.Process(pid) for pid in trainer.pids]
    os.kill(trainer.pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(TrainingError, match=r"trainer rank 1 of 2 was ended by signal 9"):
        trainer.train(groups_of(recipe), 0)
    assert time.monotonic() - began < 30.0
    assert not any(alive(process) for process in processes)
    with pytest.raises(
        TrainingError, match="rank 1 of 2 was ended by signal 9"
    ):  # it stays broken, and says why
        trainer.ema_weights()


@pytest.mark.slow
def test_an_error_of_one_rank_alone_is_raised_though_the_other_waits_for_it(
    ranks: TrainerRanks, recipe: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ERROR_SECONDS", 2.0)
    groups = groups_of(recipe)
    # The two groups of the first update, in its order: rank 1 has the second one's chunk.
    second = split(groups, recipe, 0)[0].groups[1][0]
    groups = [replace(g, prompt="nothing to draw") if g is second else g for g in groups]
    with pytest.raises(BadInputError, match="nothing to draw"):
        ranks.train(groups, 0)
    with pytest.raises(TrainingError, match="closed"):
        ranks.train(groups, 0)


@pytest.mark.slow
def test_a_model_that_cannot_be_built_is_the_recipes_error(tmp_path: Path) -> None:
    recipe = config(NFT | TWO, model={"type": "tiny", "weights": "no_such_file.safetensors"})
    trainer = TrainerRanks(recipe, tmp_path / "scratch")
    with pytest.raises(BadInputError, match="no_such_file"):
        trainer.check()
    trainer.close()


@pytest.mark.slow
def test_ranks_end_with_their_parent(tmp_path: Path, recipe: RunConfig) -> None:
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    program = """
        import pathlib, sys, time
        from spotlight_core.config import RunConfig
        from spotlight_core.learning.ranks import TrainerRanks
        recipe, scratch = map(pathlib.Path, sys.argv[1:])
        trainer = TrainerRanks(RunConfig.model_validate_json(recipe.read_text()), scratch)
        print(*trainer.pids, flush=True)
        time.sleep(120)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "recipe.json"), str(tmp_path / "s")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60.0  # they may be importing still
    while any(alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(child) for child in children)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
