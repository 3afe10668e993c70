"""The trainer on the embedded transformer: real updates, real resume, real guards."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spotlight_core.config import RunConfig
from spotlight_core.diffusion.engine import Arrays, DenoiseEngine, Generated
from spotlight_core.diffusion.tiny.model import TinyQwenImage, build_transformer
from spotlight_core.errors import TrainingError
from spotlight_core.learning.trainer import PolicyTrainer, TrainingGroup
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from spotlight_core.weights.digest import weights_digest
from spotlight_core.weights.store import write_durably

NFT = {"loss": {"type": "nft", "timesteps_per_sample": 2}, "sampler": {"type": "ode", "denoise_steps": 4}}
GRPO = {
    "loss": {"type": "grpo"},
    "sampler": {"type": "flow_sde", "denoise_steps": 4, "window": [0, 2]},
    "optimizer": {"lr": 1e-3, "updates_per_iteration": 2, "samples_per_forward": 4},
}


def _config(tree: dict[str, object], **changes: object) -> RunConfig:
    return RunConfig.model_validate({"name": "t", "iterations": 1, "data": {"prompts": "."}} | tree | changes)


def _model() -> TinyQwenImage:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return TinyQwenImage(build_transformer())


def _rollout(config: RunConfig, prompt: str, occurrence: str, model: TinyQwenImage | None = None) -> Arrays:
    request = GenerationRequest(
        id=occurrence,
        kind="rollout",
        prompts=(Prompt(occurrence=occurrence, text=prompt),),
        seeds=(0, 1, 2, 3),
        policy=PolicyVersion(label="old", number=0, digest=""),
        fidelity=Fidelity(denoise_steps=config.sampler.denoise_steps),
    )
    outcome = DenoiseEngine(model or _model(), config.sampler, config.rng_seed).generate(request)
    assert isinstance(outcome, Generated)
    return outcome.arrays


def _groups(
    config: RunConfig, model: TinyQwenImage | None = None, constant: tuple[int, ...] = ()
) -> list[TrainingGroup]:
    return [
        TrainingGroup(
            prompt=f'A "{number}7"',
            rewards=np.full(4, 0.5) if number in constant else np.array([0.0, 1.0, 0.25, 0.5]),
            arrays=_rollout(config, f'A "{number}7"', f"p{number}", model),
        )
        for number in range(3)
    ]


def _state_digest(trainer: PolicyTrainer) -> str:
    return weights_digest(trainer.state_tensors())


@pytest.mark.parametrize("tree", [NFT, GRPO], ids=["nft", "grpo"])
def test_training_repeats_to_the_bit_and_changes_the_weights(tree: dict[str, object]) -> None:
    config = _config(tree)
    groups = _groups(config)
    first, second = PolicyTrainer(_model(), config), PolicyTrainer(_model(), config)
    before = weights_digest(first.rollout_weights())
    metrics = first.train(groups, 0)
    torch.manual_seed(99)  # a global generator must not matter
    assert second.train(groups, 0) == metrics
    assert _state_digest(first) == _state_digest(second)
    assert weights_digest(first.rollout_weights()) != before
    assert metrics["train/reward_mean"] == 0.4375
    assert metrics["train/reward_std"] == pytest.approx(np.std([0.0, 1.0, 0.25, 0.5]))
    assert metrics["train/grad_norm"] > 0
    assert metrics["train/grad_rms"] == pytest.approx(
        metrics["train/grad_norm"] / sum(p.numel() for p in _model().transformer.parameters()) ** 0.5
    )
    assert first.optimizer_steps == 2


@pytest.mark.parametrize("tree", [NFT, GRPO], ids=["nft", "grpo"])
def test_resume_from_disk_is_bit_identical(tree: dict[str, object], tmp_path: Path) -> None:
    config = _config(tree)
    straight = PolicyTrainer(_model(), config)
    straight.train(_groups(config, straight.model), 0)
    write_durably(straight.state_tensors(), tmp_path / "state.safetensors")
    groups = _groups(config, straight.model) if tree is GRPO else _groups(config)
    expected = straight.train(groups, 1)

    resumed = PolicyTrainer(_model(), config)
    resumed.load_state_tensors(load_file(tmp_path / "state.safetensors"))
    assert resumed.train(groups, 1) == expected
    assert _state_digest(resumed) == _state_digest(straight)
    assert weights_digest(resumed.ema_weights()) == weights_digest(straight.ema_weights())
    assert weights_digest(resumed.rollout_weights()) == weights_digest(straight.rollout_weights())


def test_labels_and_what_is_published() -> None:
    nft, grpo = PolicyTrainer(_model(), _config(NFT)), PolicyTrainer(_model(), _config(GRPO))
    assert (nft.rollout_label, grpo.rollout_label) == ("old", "current")
    nft.train(_groups(_config(NFT)), 0)
    raw = {name: tensor.detach() for name, tensor in nft.model.transformer.state_dict().items()}
    start = _model().transformer.state_dict()
    # old_decay 1 after two optimizer steps: old = .002 old + .998 raw
    for name, old in nft.rollout_weights().items():
        torch.testing.assert_close(old, 0.002 * start[name] + 0.998 * raw[name])
    grpo.train(_groups(_config(GRPO)), 0)
    assert weights_digest(grpo.rollout_weights()) == weights_digest(dict(grpo.model.transformer.state_dict()))
    assert weights_digest(grpo.ema_weights()) != weights_digest(grpo.rollout_weights())


def test_constant_groups_give_no_update_and_are_counted() -> None:
    config = _config(NFT)
    trainer = PolicyTrainer(_model(), config)
    before = weights_digest(dict(trainer.model.transformer.state_dict()))
    metrics = trainer.train(_groups(config, constant=(0, 1, 2)), 0)
    assert metrics["train/zero_variance_groups"] == 3.0
    assert metrics["train/skipped_updates"] == 2.0
    assert metrics["train/loss"] == 0.0
    assert trainer.optimizer_steps == 0
    assert weights_digest(dict(trainer.model.transformer.state_dict())) == before


def test_a_constant_group_adds_no_gradient_and_does_not_raise_the_others_share() -> None:
    config = _config(GRPO, optimizer={"updates_per_iteration": 1, "samples_per_forward": 4})
    groups = _groups(config, constant=(1,))
    mixed, alone = PolicyTrainer(_model(), config), PolicyTrainer(_model(), config)
    with_constant = mixed.train(groups, 0)
    without = alone.train([groups[0], groups[2]], 0)
    assert with_constant["train/zero_variance_groups"] == 1.0
    assert with_constant["train/grad_norm"] == pytest.approx(without["train/grad_norm"] * 2 / 3, rel=1e-3)


def test_first_ratio_is_one_and_a_wrong_policy_stops_the_run() -> None:
    config = _config(GRPO)
    groups = _groups(config)
    metrics = PolicyTrainer(_model(), config).train(groups, 0)
    assert metrics["train/ratio_max_deviation"] < 1e-5
    other = _model()
    with torch.no_grad():
        for parameter in other.transformer.parameters():
            parameter.mul_(1.05)
    with pytest.raises(TrainingError, match="the first ratio is off 1"):
        PolicyTrainer(other, config).train(groups, 0)


@pytest.mark.parametrize("tree", [NFT, GRPO], ids=["nft", "grpo"])
def test_kl_weight_changes_the_gradient(tree: dict[str, object]) -> None:
    loss = tree["loss"]
    assert isinstance(loss, dict)
    plain = _config(tree)
    with_kl = _config(tree, loss=loss | {"kl_weight": 100.0})
    groups = [_groups(plain), _groups(plain)]
    without_metrics = PolicyTrainer(_model(), plain).train(groups[0], 0)
    metrics = PolicyTrainer(_model(), with_kl).train(groups[1], 0)
    assert "train/kl" not in without_metrics
    assert metrics["train/kl"] > 0  # 0 at the first update, where policy and reference are one
    assert metrics["train/grad_norm"] != without_metrics["train/grad_norm"]


def test_non_finite_updates_are_skipped_then_stop_the_run() -> None:
    config = _config(NFT)
    groups = _groups(config)
    for group in groups:
        group.arrays["x0"] = group.arrays["x0"].copy()
        group.arrays["x0"][0, 0, 0] = np.inf
    trainer = PolicyTrainer(_model(), config)
    before = weights_digest(dict(trainer.model.transformer.state_dict()))
    metrics = trainer.train(groups, 0)
    assert metrics["train/non_finite_updates"] == 2.0
    assert weights_digest(dict(trainer.model.transformer.state_dict())) == before
    with pytest.raises(TrainingError, match="3 updates in a row were not finite"):
        trainer.train(groups, 1)


def test_a_finite_update_resets_the_guard() -> None:
    config = _config(NFT)
    good, bad = _groups(config), _groups(config)
    for group in bad:
        group.arrays["x0"] = np.full_like(group.arrays["x0"], np.nan)
    trainer = PolicyTrainer(_model(), config)
    for iteration, groups in enumerate((bad, good, bad, good)):
        trainer.train(groups, iteration)
    assert trainer.optimizer_steps == 4


def test_a_checkpoint_of_another_loss_is_refused() -> None:
    state = PolicyTrainer(_model(), _config(NFT)).state_tensors()
    with pytest.raises(TrainingError, match="does not fit this recipe"):
        PolicyTrainer(_model(), _config(GRPO)).load_state_tensors(state)


def test_training_moves_rewarded_samples_closer() -> None:
    """After some updates the NFT loss at fixed noise falls for good samples and rises for bad ones."""
    config = _config(NFT, optimizer={"lr": 1e-3, "updates_per_iteration": 3})
    groups = _groups(config)
    trainer = PolicyTrainer(_model(), config)
    for iteration in range(4):
        trainer.train(groups, iteration)

    def error(model: TinyQwenImage, row: int) -> float:
        x0 = torch.from_numpy(np.stack([group.arrays["x0"][row] for group in groups]))
        noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
        t = torch.full((3,), 0.75)
        with torch.inference_mode():
            v = model.velocity(0.25 * x0 + 0.75 * noise, t, model.encode([group.prompt for group in groups]))
        return float((v - (noise - x0)).square().mean())

    model = trainer.model
    assert isinstance(model, TinyQwenImage)
    best, worst = 1, 0
    assert error(model, best) - error(_model(), best) < error(model, worst) - error(_model(), worst)
