"""The trainer's rules on learning rate, KL ceiling, old log-probabilities and resuming, with numbers."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from spotlight_core.config import RunConfig
from spotlight_core.learning.losses import build_loss
from spotlight_core.learning.trainer import PolicyTrainer
from spotlight_core.learning.updates import TrainingGroup, chunks, split
from spotlight_core.weights.digest import weights_digest
from tests.core.learning.scenarios import (
    GRPO,
    GUARD,
    LORA,
    NFT,
    Tree,
    small_groups,
    small_model,
    spoilt,
    state_digest,
    with_optimizer,
)

ONE = {"updates_per_iteration": 1, "samples_per_forward": 12}


def test_the_learning_rate_rises_over_the_warm_up_and_then_stays() -> None:
    recipe = with_optimizer(NFT | LORA, warmup_steps=4, **ONE)
    groups = small_groups(recipe)
    trainer = PolicyTrainer(small_model(recipe), recipe)
    rates = [trainer.train(groups, iteration)["train/lr"] for iteration in range(6)]
    assert rates == [0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3]
    assert PolicyTrainer(small_model(recipe), with_optimizer(NFT | LORA)).train(groups, 0)["train/lr"] == 1e-3


def test_warm_up_scales_the_first_step() -> None:
    """AdamW's first step is lr in size whatever the gradient: a quarter of lr moves a quarter as far."""
    plain = with_optimizer(NFT | LORA, weight_decay=0.0, **ONE)
    warm = with_optimizer(NFT | LORA, weight_decay=0.0, warmup_steps=4, **ONE)
    moved = []
    for recipe in (plain, warm):
        trainer = PolicyTrainer(small_model(recipe), recipe)
        before = trainer.trained_weights()
        trainer.train(small_groups(recipe), 0)
        after = trainer.trained_weights()
        moved.append(torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)]))
    torch.testing.assert_close(moved[1], moved[0] / 4, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("tree", [NFT, GRPO], ids=["nft", "grpo"])
def test_the_kl_ceiling_ends_the_iterations_updates(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    free = with_optimizer(tree, updates_per_iteration=3, kl_ceiling=1e3)
    groups = small_groups(free)
    trainer = PolicyTrainer(small_model(free), free)
    metrics = trainer.train(groups, 0)
    assert (trainer.optimizer_steps, metrics["train/stopped_early"]) == (3, 0.0)

    tight = with_optimizer(tree, updates_per_iteration=3, kl_ceiling=1e-30)
    stopped = PolicyTrainer(small_model(tight), tight)
    metrics = stopped.train(groups, 0)
    # The first update measures exactly 0, the second what the first moved.
    assert (stopped.optimizer_steps, metrics["train/stopped_early"]) == (2, 1.0)
    assert metrics["train/approx_kl"] > 0
    assert ours(caplog)[0].message.startswith("iteration 0: KL ")
    assert stopped.train(groups, 1)["train/stopped_early"] == 1.0  # it goes on with the next iteration


@pytest.mark.parametrize("tree", [GRPO, GUARD], ids=["grpo", "grpo_guard"])
def test_recomputed_log_probs_make_the_first_ratio_exactly_one(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = with_optimizer(tree, **ONE)
    others = small_groups(recipe, model=small_model(recipe, seed=1))
    metrics = PolicyTrainer(small_model(recipe), recipe).train(others, 0)
    assert metrics["train/ratio_max_deviation"] > 1e-3
    assert metrics["train/old_log_probs_recomputed"] == 1.0
    assert metrics["train/approx_kl"] == 0.0  # mean of ln(r)² / 2: every ratio is 1 to the bit
    assert metrics["train/clip_fraction"] == 0.0
    assert len(ours(caplog)) == 1


def test_recomputing_is_told_once_and_reaches_the_later_updates(caplog: pytest.LogCaptureFixture) -> None:
    recipe = with_optimizer(GRPO, updates_per_iteration=3)
    others = small_groups(recipe, model=small_model(recipe, seed=1))
    metrics = PolicyTrainer(small_model(recipe), recipe).train(others, 0)
    assert metrics["train/old_log_probs_recomputed"] == 1.0
    assert len(ours(caplog)) == 1
    # Against the rollout's own log-probabilities the later updates would be off by as much as the first.
    assert metrics["train/approx_kl"] < 0.01 * metrics["train/ratio_max_deviation"] ** 2


def test_a_first_update_that_is_not_finite_leaves_the_check_to_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe = with_optimizer(GRPO, updates_per_iteration=3)
    groups = small_groups(recipe)
    first = next(i for i, g in enumerate(groups) if g is split(groups, recipe, 0)[0].groups[0][0])
    trainer = PolicyTrainer(small_model(recipe), recipe)
    metrics = trainer.train(spoilt(groups, first), 0)
    assert metrics["train/non_finite_updates"] == 1.0
    assert trainer.optimizer_steps == 2
    assert metrics["train/old_log_probs_recomputed"] == 1.0  # nan is no ratio of 1: tried once, told once
    assert len(ours(caplog)) == 1


def bf16_groups(recipe: RunConfig) -> list[TrainingGroup]:
    return small_groups(recipe, model=small_model(recipe, role="rollout"))


@pytest.mark.parametrize("cap", [1.0, 2.0])
def test_truncated_correction_of_a_bf16_rollout_is_the_named_formula(cap: float) -> None:
    """``L = mean(-A min(exp(logp_old - logp_rollout), cap))`` where the ratio is 1."""
    recipe = with_optimizer(
        GRPO
        | {
            "model": {"type": "tiny", "rollout_dtype": "bf16"},
            "loss": {"type": "grpo", "importance_correction": "truncated", "importance_cap": cap},
        },
        **ONE,
    )
    groups = bf16_groups(recipe)
    metrics = PolicyTrainer(small_model(recipe), recipe).train(groups, 0)

    model = small_model(recipe)
    (chunk,) = chunks(split(groups, recipe, 0)[0], 12, torch.device("cpu"))
    loss = build_loss(model, recipe, model.sigmas(4, None))
    difference = (loss.anchors(model, chunk)["logp_BT"] - chunk.arrays["logp_BT"]).double().numpy()
    weights = np.minimum(np.exp(difference), cap)
    expected = float((-chunk.advantages_B.double().numpy()[:, None] * weights).mean())
    ratios = np.exp(difference)
    assert ratios.min() < 1.0 - 1e-5 < 1.0 + 1e-5 < ratios.max()  # a cap of 1 takes some of them
    assert expected > 1e-5  # without weights it is 0: advantages of a group sum to 0
    assert metrics["train/loss"] == pytest.approx(expected, abs=5e-8)  # fp32 sums of terms near 1
    assert metrics["train/ratio_max_deviation"] == pytest.approx(np.abs(ratios - 1.0).max(), rel=1e-2)
    assert metrics["train/old_log_probs_recomputed"] == 1.0
    assert metrics["train/approx_kl"] == 0.0


def test_a_bf16_rollout_without_correction_trains_on_ratios_of_one() -> None:
    recipe = with_optimizer(GRPO | {"model": {"type": "tiny", "rollout_dtype": "bf16"}}, **ONE)
    metrics = PolicyTrainer(small_model(recipe), recipe).train(bf16_groups(recipe), 0)
    assert metrics["train/loss"] == pytest.approx(0.0, abs=1e-7)  # advantages of a group sum to 0
    assert metrics["train/grad_norm"] > 0


def test_a_run_resumed_in_the_middle_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    """LoRA and GRPO; the warm-up ends and the average moves for the first time after the resume."""
    tree = GRPO | LORA | {"ema": {"interval": 8, "decay": 0.9}}
    recipe = with_optimizer(tree, warmup_steps=9)

    def go_on(trainer: PolicyTrainer, iterations: range) -> list[dict[str, float]]:
        return [trainer.train(on_policy(trainer, recipe), iteration) for iteration in iterations]

    straight = PolicyTrainer(small_model(recipe), recipe)
    expected = go_on(straight, range(6))
    interrupted = PolicyTrainer(small_model(recipe), recipe)
    start = weights_digest(interrupted.ema_weights())
    seen = go_on(interrupted, range(3))
    interrupted.save(tmp_path / "state")
    assert weights_digest(interrupted.ema_weights()) == start
    resumed = PolicyTrainer(small_model(recipe, seed=3), recipe)
    resumed_frozen = [p for p in resumed.model.transformer.parameters() if not p.requires_grad]
    with torch.no_grad():  # the base weights come from the model's own files, not from the checkpoint
        for mine, base in zip(resumed_frozen, frozen(straight), strict=True):
            mine.copy_(base)
    resumed.load(tmp_path / "state")
    seen += go_on(resumed, range(3, 6))

    assert seen == expected
    assert resumed.optimizer_steps == 12
    assert weights_digest(resumed.ema_weights()) != start
    assert state_digest(resumed) == state_digest(straight)


def test_the_norm_and_the_clipping_are_torchs_own() -> None:
    recipe = with_optimizer(NFT, max_grad_norm=1e-2, **ONE)
    trainer = PolicyTrainer(small_model(recipe), recipe)
    metrics = trainer.train(small_groups(recipe), 0)
    free = with_optimizer(NFT, max_grad_norm=1e9, **ONE)
    whole = PolicyTrainer(small_model(free), free)
    whole.train(small_groups(free), 0)
    parameters = list(whole.model.transformer.parameters())
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1e-2).item()
    assert metrics["train/grad_norm"] == norm > 1e-2
    for ours_, theirs in zip(trainer.model.transformer.parameters(), parameters, strict=True):
        assert (ours_.grad is None) == (theirs.grad is None)
        assert ours_.grad is None or torch.equal(ours_.grad, theirs.grad)


def on_policy(trainer: PolicyTrainer, recipe: RunConfig) -> list[TrainingGroup]:
    return small_groups(recipe, model=trainer.model)  # type: ignore[arg-type]


def frozen(trainer: PolicyTrainer) -> list[torch.nn.Parameter]:
    return [p for p in trainer.model.transformer.parameters() if not p.requires_grad]


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "spotlight_core.learning.trainer"]
