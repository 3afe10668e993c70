"""The trainer on a small transformer: real updates, real resume, real guards."""

from pathlib import Path

import numpy as np
import pytest
import torch

from spotlight_core.diffusion.tiny.model import TinyQwenImage
from spotlight_core.errors import BadInputError, TrainingError
from spotlight_core.learning.trainer import PolicyTrainer
from spotlight_core.weights.digest import weights_digest
from tests.core.learning.scenarios import (
    GRPO,
    LORA,
    NFT,
    Tree,
    config,
    small_groups,
    small_model,
    spoilt,
    state_digest,
)


@pytest.mark.parametrize("tree", [NFT, GRPO], ids=["nft", "grpo"])
def test_training_repeats_to_the_bit_and_changes_the_weights(tree: Tree) -> None:
    recipe = config(tree)
    groups = small_groups(recipe)
    first, second = PolicyTrainer(small_model(recipe), recipe), PolicyTrainer(small_model(recipe), recipe)
    before = weights_digest(first.rollout_weights())
    metrics = first.train(groups, 0)
    torch.manual_seed(99)  # a global generator must not matter
    assert second.train(groups, 0) == metrics
    assert state_digest(first) == state_digest(second)
    assert weights_digest(first.rollout_weights()) != before
    assert metrics["train/reward_mean"] == 0.4375
    assert metrics["train/reward_std"] == pytest.approx(np.std([0.0, 1.0, 0.25, 0.5]))
    assert metrics["train/grad_norm"] > 0
    assert metrics["train/grad_rms"] == pytest.approx(
        metrics["train/grad_norm"] / sum(p.numel() for p in first.model.transformer.parameters()) ** 0.5
    )
    assert first.optimizer_steps == 2


@pytest.mark.parametrize("tree", [NFT, GRPO], ids=["nft", "grpo"])
def test_resume_from_disk_is_bit_identical(tree: Tree, tmp_path: Path) -> None:
    recipe = config(tree)
    straight = PolicyTrainer(small_model(recipe), recipe)
    straight.train(small_groups(recipe, model=straight.model), 0)
    straight.save(tmp_path / "state")
    groups = small_groups(recipe, model=straight.model) if tree is GRPO else small_groups(recipe)
    expected = straight.train(groups, 1)

    resumed = PolicyTrainer(small_model(recipe), recipe)
    resumed.load(tmp_path / "state")
    assert resumed.train(groups, 1) == expected
    assert state_digest(resumed) == state_digest(straight)
    assert weights_digest(resumed.ema_weights()) == weights_digest(straight.ema_weights())
    assert weights_digest(resumed.rollout_weights()) == weights_digest(straight.rollout_weights())


def test_labels_and_what_is_published() -> None:
    nft, grpo = (
        PolicyTrainer(small_model(config(NFT)), config(NFT)),
        PolicyTrainer(small_model(config(GRPO)), config(GRPO)),
    )
    assert (nft.rollout_label, grpo.rollout_label) == ("old", "current")
    nft.train(small_groups(config(NFT)), 0)
    raw = {name: tensor.detach() for name, tensor in nft.model.transformer.state_dict().items()}
    start = small_model(config(NFT)).transformer.state_dict()
    # old_decay 1 after two optimizer steps: old = .002 old + .998 raw
    for name, old in nft.rollout_weights().items():
        torch.testing.assert_close(old, 0.002 * start[name] + 0.998 * raw[name])
    grpo.train(small_groups(config(GRPO)), 0)
    assert weights_digest(grpo.rollout_weights()) == weights_digest(dict(grpo.model.transformer.state_dict()))
    assert weights_digest(grpo.ema_weights()) != weights_digest(grpo.rollout_weights())


def test_constant_groups_give_no_update_and_are_counted() -> None:
    recipe = config(NFT)
    trainer = PolicyTrainer(small_model(recipe), recipe)
    before = weights_digest(dict(trainer.model.transformer.state_dict()))
    metrics = trainer.train(small_groups(recipe, constant=(0, 1, 2)), 0)
    assert metrics["train/zero_variance_groups"] == 3.0
    assert metrics["train/skipped_updates"] == 2.0
    assert metrics["train/loss"] == 0.0
    assert trainer.optimizer_steps == 0
    assert weights_digest(dict(trainer.model.transformer.state_dict())) == before


def test_a_constant_group_adds_no_gradient_and_does_not_raise_the_others_share() -> None:
    recipe = config(GRPO, optimizer={"updates_per_iteration": 1, "samples_per_forward": 4})
    groups = small_groups(recipe, constant=(1,))
    mixed, alone = PolicyTrainer(small_model(recipe), recipe), PolicyTrainer(small_model(recipe), recipe)
    with_constant = mixed.train(groups, 0)
    without = alone.train([groups[0], groups[2]], 0)
    assert with_constant["train/zero_variance_groups"] == 1.0
    assert with_constant["train/grad_norm"] == pytest.approx(without["train/grad_norm"] * 2 / 3, rel=1e-3)


def test_the_first_ratio_is_one_and_another_policys_log_probs_are_computed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = config(GRPO)
    groups = small_groups(recipe)
    metrics = PolicyTrainer(small_model(recipe), recipe).train(groups, 0)
    assert metrics["train/ratio_max_deviation"] < 1e-5
    assert metrics["train/old_log_probs_recomputed"] == 0.0
    assert not caplog.records
    other = small_model(recipe)
    with torch.no_grad():
        for parameter in other.transformer.parameters():
            parameter.mul_(1.05)
    metrics = PolicyTrainer(other, recipe).train(groups, 0)
    assert metrics["train/ratio_max_deviation"] > 1e-4  # what the rollout's own log-probabilities gave
    assert metrics["train/old_log_probs_recomputed"] == 1.0
    messages = [record.message for record in caplog.records if record.name.startswith("spotlight_core")]
    assert [message[:37] for message in messages] == ["iteration 0: the first ratio is off 1"]


@pytest.mark.parametrize("tree", [NFT, GRPO], ids=["nft", "grpo"])
def test_kl_weight_changes_the_gradient(tree: Tree) -> None:
    loss = tree["loss"]
    assert isinstance(loss, dict)
    plain = config(tree)
    with_kl = config(tree, loss=loss | {"kl_weight": 100.0})
    groups = [small_groups(plain), small_groups(plain)]
    without_metrics = PolicyTrainer(small_model(plain), plain).train(groups[0], 0)
    metrics = PolicyTrainer(small_model(with_kl), with_kl).train(groups[1], 0)
    assert "train/kl" not in without_metrics
    assert metrics["train/kl"] > 0  # 0 at the first update, where policy and reference are one
    assert metrics["train/grad_norm"] != without_metrics["train/grad_norm"]


def test_non_finite_updates_are_skipped_then_stop_the_run() -> None:
    recipe = config(NFT)
    groups = small_groups(recipe)
    for which in range(3):
        groups = spoilt(groups, which)
    trainer = PolicyTrainer(small_model(recipe), recipe)
    before = weights_digest(dict(trainer.model.transformer.state_dict()))
    metrics = trainer.train(groups, 0)
    assert metrics["train/non_finite_updates"] == 2.0
    assert weights_digest(dict(trainer.model.transformer.state_dict())) == before
    with pytest.raises(TrainingError, match="3 updates in a row were not finite"):
        trainer.train(groups, 1)


def test_a_finite_update_resets_the_guard() -> None:
    recipe = config(NFT)
    good = bad = small_groups(recipe)
    for which in range(3):
        bad = spoilt(bad, which)
    trainer = PolicyTrainer(small_model(recipe), recipe)
    for iteration, groups in enumerate((bad, good, bad, good)):
        trainer.train(groups, iteration)
    assert trainer.optimizer_steps == 4


def test_a_checkpoint_of_another_loss_or_lora_rank_is_refused(tmp_path: Path) -> None:
    recipe = config(NFT)
    PolicyTrainer(small_model(recipe), recipe).save(tmp_path / "nft")
    other = PolicyTrainer(small_model(config(GRPO)), config(GRPO))
    with pytest.raises(TrainingError, match=r"does not fit this recipe \(tensor 'old\."):
        other.load(tmp_path / "nft")
    four = config(GRPO | LORA, model={"type": "tiny", "lora": {"rank": 4}})
    PolicyTrainer(small_model(four), four).save(tmp_path / "four")
    two = config(GRPO | LORA)
    with pytest.raises(TrainingError, match=r"\(tensor 'raw\..*float32 \[4, 16\], here float32 \[2, 16\]\)"):
        PolicyTrainer(small_model(two), two).load(tmp_path / "four")


def test_a_recipe_for_another_device_is_refused() -> None:
    recipe = config(NFT, trainer={"device": "cuda"})
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BadInputError, match=r"trainer\.device = 'cuda' and the model is on 'cpu'"):
        PolicyTrainer(small_model(recipe), recipe)


def test_training_moves_rewarded_samples_closer() -> None:
    """After some updates the NFT loss at fixed noise falls for good samples and rises for bad ones."""
    recipe = config(NFT, optimizer={"lr": 1e-3, "updates_per_iteration": 3})
    groups = small_groups(recipe)
    trainer = PolicyTrainer(small_model(recipe), recipe)
    for iteration in range(4):
        trainer.train(groups, iteration)

    def error(model: TinyQwenImage, row: int) -> float:
        x0 = torch.from_numpy(np.stack([group.arrays["x0"][row] for group in groups]))
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
        t = torch.full((3,), 0.75)
        with torch.inference_mode():
            v = model.velocity(0.25 * x0 + 0.75 * noise, t, model.encode([group.prompt for group in groups]))
        return float((v - (noise - x0)).square().mean())

    model, start = trainer.model, small_model(recipe)
    assert isinstance(model, TinyQwenImage)
    best, worst = 1, 0
    assert error(model, best) - error(start, best) < error(model, worst) - error(start, worst)
