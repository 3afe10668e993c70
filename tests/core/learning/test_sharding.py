"""Two ranks over gloo equal one process: gradients, weights, metrics, decisions, checkpoints.

The scenarios of ``two_ranks`` run in two launches, since a process takes seconds to import.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spotlight_core.errors import TrainingError
from spotlight_core.learning.sharding import Ranks
from spotlight_core.learning.trainer import PolicyTrainer
from tests.core.learning.scenarios import small_model, state_digest
from tests.core.learning.two_ranks import DONE, FAST, SAVED, SCENARIOS, SLOW, run_all

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-6  # of norms: fp32 sums in another order
TIMEOUT_SECONDS = 200

Weights = Mapping[str, torch.Tensor]
Metrics = list[dict[str, float]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched(tmp_path_factory.mktemp("runs"), FAST)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launched(tmp_path_factory.mktemp("more"), SLOW)


def launched(folder: Path, names: tuple[str, ...]) -> Path:
    """``two``: the scenarios on two ranks; ``one``: in this process, while they import."""
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.core.learning.two_ranks"]
    logs = [(folder / f"rank-{rank}.log") for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("wb") as output:
            arguments = [*command, str(rank), "2", str(folder / "two"), *names]
            ranks.append(subprocess.Popen(arguments, env=env, cwd=ROOT, stderr=output))
    try:
        run_all(folder / "one", Ranks(), names)
        (folder / "one" / DONE).touch()
        codes = [rank.wait(TIMEOUT_SECONDS) for rank in ranks]
        assert codes == [0, 0], [log.read_text()[-2000:] for log in logs]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return folder


def both(runs: Path, name: str) -> tuple[Weights, Weights]:
    return load_file(runs / "one" / f"{name}.safetensors"), load_file(runs / "two" / f"{name}.safetensors")


def metrics_of(runs: Path, name: str) -> Metrics:
    """One process's metrics of each iteration, which are the two ranks' too."""
    alone, first, second = (
        json.loads((runs / which).read_text())
        for which in (f"one/{name}-0.json", f"two/{name}-0.json", f"two/{name}-1.json")
    )
    assert json.dumps(first) == json.dumps(second)  # to the bit: they cannot disagree on what to do
    for found, expected in zip(first, alone, strict=True):
        # A loss of policy gradients is a small difference of large terms; an approximate KL its square.
        assert found.pop("train/loss") == pytest.approx(expected.pop("train/loss"), rel=1e-5, abs=1e-7)
        assert found == pytest.approx(expected, rel=1e-2, abs=1e-14)
    return alone


def relative(found: Weights, expected: Weights, kind: str) -> float:
    """Norm of the difference over the norm, of all tensors of the kind together."""
    names = sorted(name for name in expected if name.startswith(f"{kind}."))
    one, two = (torch.cat([part[n].double().flatten() for n in names]) for part in (expected, found))
    return float((two - one).norm() / one.norm())


def assert_same_steps(runs: Path, name: str) -> None:
    one, two = both(runs, name)
    assert one.keys() == two.keys()
    for kind in ("grad", "raw", "old", "ema"):
        assert relative(two, one, kind) <= TOLERANCE
    assert metrics_of(runs, name)[-1]["train/grad_norm"] > 0


@pytest.mark.parametrize("name", [name for name in FAST if name != "not_finite"])
def test_two_ranks_take_the_steps_of_one(runs: Path, name: str) -> None:
    assert_same_steps(runs, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SLOW if name not in ("all_constant", "bf16")])
def test_two_ranks_take_the_steps_of_one_in_more_recipes(more: Path, name: str) -> None:
    assert_same_steps(more, name)


@pytest.mark.slow
def test_under_autocast_only_what_autograd_sums_in_bf16_differs(more: Path) -> None:
    one, two = both(more, "bf16")
    names = [name for name in one if name.startswith("grad.")]
    # Every block adds to the gradient of the time embedding, in bf16 and in the engine's order.
    time = [name for name in names if name.startswith("grad.time_text_embed.")]
    for part, tolerance in ((set(names) - set(time), TOLERANCE), (time, 2e-2)):
        found, expected = ({name: weights[name] for name in part} for weights in (two, one))
        assert relative(found, expected, "grad") <= tolerance
    assert relative(two, one, "raw") <= 1e-3
    found, expected = (json.loads((more / f"{of}/bf16-0.json").read_text())[0] for of in ("two", "one"))
    assert found["train/loss"] == expected["train/loss"]  # forwards agree to the bit


@pytest.mark.parametrize("name", ["nft", "nft_lora", "grpo_lora", "guard"])
def test_the_steps_themselves_agree_and_not_only_the_weights_they_start_from(runs: Path, name: str) -> None:
    recipe, _ = SCENARIOS[name]
    start = PolicyTrainer(small_model(recipe), recipe).trained_weights()
    moved = [
        {f"raw.{n}": weights[f"raw.{n}"].double() - start[n].double() for n in start}
        for weights in both(runs, name)
    ]
    # AdamW divides by the gradient's size, so the smallest gradients' rounding weighs as the largest's.
    assert relative(moved[1], moved[0], "raw") <= 2e-4


def test_a_constant_group_and_an_odd_number_of_chunks_keep_the_ranks_in_step(runs: Path) -> None:
    for metrics in metrics_of(runs, "constant"):
        assert metrics["train/zero_variance_groups"] == 1.0
        assert metrics["train/skipped_updates"] == 0.0


@pytest.mark.slow
def test_updates_that_teach_nothing_are_skipped_by_all_ranks(more: Path) -> None:
    for metrics in metrics_of(more, "all_constant"):
        assert metrics["train/skipped_updates"] == 2.0
    one, two = both(more, "all_constant")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_all_ranks_skip_what_is_not_finite_on_one(runs: Path) -> None:
    assert [m["train/non_finite_updates"] for m in metrics_of(runs, "not_finite")] == [1.0, 1.0]
    one, two = both(runs, "not_finite")
    recipe, _ = SCENARIOS["not_finite"]
    start = PolicyTrainer(small_model(recipe), recipe).trained_weights()
    for weights in (one, two):
        assert all(torch.equal(weights[f"raw.{name}"], start[name]) for name in start)


@pytest.mark.slow
def test_all_ranks_compute_anchors_again_and_heed_the_ceiling(more: Path) -> None:
    assert [m["train/old_log_probs_recomputed"] for m in metrics_of(more, "recomputed")] == [1.0, 1.0]
    assert metrics_of(more, "recomputed")[0]["train/ratio_max_deviation"] > 1e-3
    assert [m["train/stopped_early"] for m in metrics_of(more, "ceiling")] == [1.0, 1.0]


@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing(runs: Path, more: Path) -> None:
    plain, checkpointed = both(runs, "nft_lora")[1], both(more, "checkpointed")[1]
    for kind in ("grad", "raw"):
        assert relative(checkpointed, plain, kind) <= TOLERANCE


@pytest.mark.parametrize("name", SAVED)
def test_one_process_resumes_from_two_ranks_bit_for_bit(runs: Path, name: str, tmp_path: Path) -> None:
    recipe, groups = SCENARIOS[name]
    state = runs / "two" / f"{name}-state"
    assert sorted(file.name for file in state.iterdir()) == [
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    trainer = PolicyTrainer(small_model(recipe, seed=5), recipe)
    trainer.load(state)
    trainer.save(tmp_path)
    whole = load_file(tmp_path / "rank-00000.safetensors")
    shards = [load_file(state / f"rank-0000{rank}.safetensors") for rank in range(2)]
    assert {"adam.steps", "counters"} == shards[0].keys() - shards[1].keys()
    for key, tensor in whole.items():
        joined = torch.cat([part[key] for part in shards if key in part])  # sharded along the first dimension
        assert torch.equal(joined, tensor)
        assert key in ("adam.steps", "counters") or len(shards[0][key]) < len(tensor) or len(tensor) == 1
    assert trainer.optimizer_steps == 4
    trainer.train(groups(recipe), 2)
    assert trainer.optimizer_steps == 6


@pytest.mark.parametrize("name", SAVED)
def test_two_ranks_resume_from_one_process_bit_for_bit(runs: Path, name: str) -> None:
    recipe, _ = SCENARIOS[name]
    digests = []
    for state in (runs / "one" / f"{name}-state", runs / "two" / f"{name}-resaved"):
        trainer = PolicyTrainer(small_model(recipe, seed=6), recipe)
        trainer.load(state)
        digests.append(state_digest(trainer))
    assert digests[0] == digests[1]


def test_a_lost_shard_is_named(runs: Path, tmp_path: Path) -> None:
    recipe, _ = SCENARIOS["grpo_lora"]
    for rank, into in ((0, tmp_path / "first"), (1, tmp_path / "second")):
        into.mkdir()
        file = f"rank-0000{rank}.safetensors"
        (into / file).write_bytes((runs / "two" / "grpo_lora-state" / file).read_bytes())
    trainer = PolicyTrainer(small_model(recipe), recipe)
    with pytest.raises(TrainingError, match=r"does not fit this recipe \(tensor '.*' is float32 \[1, 16\]"):
        trainer.load(tmp_path / "first")
    with pytest.raises(TrainingError, match=r"shards of tensor '.*' are missing"):
        trainer.load(tmp_path / "second")


def test_a_place_alone_shards_and_gathers_nothing() -> None:
    recipe, _ = SCENARIOS["nft_lora"]
    model = small_model(recipe)
    kind = type(model.transformer)
    alone = Ranks()
    alone.shard([model.transformer])
    assert (alone.rank, alone.size, type(model.transformer)) == (0, 1, kind)
    values = torch.tensor([[1.0, float("nan")]], dtype=torch.float64)
    torch.testing.assert_close(alone.gather(values), values[None], equal_nan=True)
    assert alone.norm([torch.tensor([3.0]), torch.tensor([4.0])]).item() == 5.0
