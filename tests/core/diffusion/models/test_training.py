"""Each family from noise to an exported adapter: rollout, reward, training, export, at tiny size.

Rollouts come in batches of 4, training takes 3 rows at a time, so that replay never sees the rollout's
own batch shape.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spotlight_core.arrays import Arrays
from spotlight_core.config import DiffusersModelConfig, RunConfig
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.models.diffusers_model import DiffusersModel
from spotlight_core.diffusion.models.export import export_adapter
from spotlight_core.diffusion.policy import load_policy_weights
from spotlight_core.learning.losses.base import RATIO_DEVIATION
from spotlight_core.learning.trainer import PolicyTrainer
from spotlight_core.learning.updates import TrainingGroup
from spotlight_core.rewards.jpeg_size import JpegSizeReward
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from spotlight_core.windows import sde_window
from tests.core.diffusion.models.drawing import drawn, noise
from tests.core.diffusion.models.tiny_pipelines import recipe, stock_pipeline, stock_pixels

POLICY = PolicyVersion(label="current", number=0, digest="")
PROMPTS = ('A "42"', 'A longer prompt with a "7"')
STEPS = 5
RECOMPUTED = "train/old_log_probs_recomputed"
SAMPLERS: dict[str, dict[str, object]] = {
    "flow_sde": {"noise_level": 0.7, "window": {"type": "random", "size": 2}},
    "dance_sde": {"noise_level": 0.3},
    "cps": {"noise_level": 0.8, "window": {"type": "progressive", "size": 2, "iterations_per_move": 1}},
    "ode": {},
}


@dataclass(frozen=True)
class Rig:
    """A rollout engine and a trainer that share nothing but published weights."""

    config: RunConfig
    engine: DenoiseEngine
    trainer: PolicyTrainer

    def rollout(self, iteration: int, seeds: int = 4) -> list[TrainingGroup]:
        load_policy_weights(self.engine.model.transformer, self.trainer.rollout_weights())
        return [self._group(number, iteration, seeds) for number in range(len(PROMPTS))]

    def _group(self, number: int, iteration: int, seeds: int) -> TrainingGroup:
        occurrence = f"p{number}"
        window = sde_window(self.config.sampler, 0, iteration, occurrence)
        arrays = self.generate(number, window, tuple(range(iteration * seeds, (iteration + 1) * seeds)))
        rewards = np.asarray(_scores(arrays))
        return TrainingGroup(prompt=PROMPTS[number], rewards=rewards, arrays=arrays, sde_steps=window)

    def generate(self, number: int, window: tuple[int, int] | None, seeds: tuple[int, ...]) -> Arrays:
        request = GenerationRequest(
            id="r",
            kind="rollout",
            prompts=(Prompt(occurrence=f"p{number}", text=PROMPTS[number]),),
            seeds=seeds,
            policy=POLICY,
            fidelity=Fidelity(denoise_steps=STEPS, sde_steps=window),
        )
        outcome = self.engine.generate(request)
        assert isinstance(outcome, Generated)
        return outcome.arrays

    def score(self) -> float:
        """Mean reward of the trained policy on noise that training never saw."""
        load_policy_weights(self.engine.model.transformer, self.trainer.ema_weights())
        scores = [_scores(self.generate(number, None, tuple(range(1000, 1016)))) for number in (0, 1)]
        return float(np.mean(scores))


def _scores(arrays: Arrays) -> list[float]:
    """JPEG size of each image; of each video the mean over its frames."""
    images = arrays["images"]
    if images.ndim == 4:
        return JpegSizeReward().score(images, [])
    return [float(np.mean(JpegSizeReward().score(frames, []))) for frames in images]


def _rig(folder: Path, family: str, loss: str | dict[str, object], sampler: str, **changes: Any) -> Rig:
    model = recipe(family, folder, **({"lora": {"rank": 4, "alpha": 8.0}} | changes.pop("model", {})))
    config = RunConfig.model_validate(
        {
            "name": "t",
            "iterations": 8,
            "data": {"prompts": "."},
            "model": model.model_dump(),
            "sampler": {"type": sampler, "denoise_steps": STEPS, **SAMPLERS[sampler]},
            "loss": {"type": loss} if isinstance(loss, str) else loss,
            "optimizer": {"lr": 3e-3, "updates_per_iteration": 1, "samples_per_forward": 3},
            "ema": {"decay": 0.0},
        }
        | changes
    )
    means = config.loss.type == "grpo_guard"
    engine = DenoiseEngine(build_model(config.model, "rollout"), config.sampler, 0, record_means=means)
    return Rig(config, engine, PolicyTrainer(build_model(config.model, "training"), config))


@pytest.mark.parametrize(
    ("loss", "sampler"),
    [("grpo", "flow_sde"), ("grpo", "dance_sde"), ("grpo", "cps"), ("grpo_guard", "flow_sde")],
)
def test_replay_in_other_batch_sizes_gives_the_rollouts_log_probabilities(
    folders: dict[str, Path], family: str, loss: str, sampler: str
) -> None:
    rig = _rig(folders[family], family, loss, sampler)
    for iteration in range(2):
        metrics = rig.trainer.train(rig.rollout(iteration), iteration)
        clip = rig.config.loss.clip_low  # type: ignore[union-attr]
        assert metrics[RATIO_DEVIATION] < min(1e-5, 0.1 * clip)
        assert metrics[RECOMPUTED] == 0
        assert metrics["train/grad_norm"] > 0


def test_a_bf16_rollout_is_anchored_again_under_fp32_training(folders: dict[str, Path], family: str) -> None:
    corrected = {"type": "grpo", "importance_correction": "truncated"}
    rig = _rig(folders[family], family, corrected, "flow_sde", model={"rollout_dtype": "bf16"})
    metrics = rig.trainer.train(rig.rollout(0), 0)
    assert metrics[RECOMPUTED] == 1
    assert rig.trainer.optimizer_steps == 1


def test_a_stock_pipeline_draws_what_training_exported(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    rig = _rig(folders[family], family, "grpo", "flow_sde", optimizer={"lr": 0.05})
    files = []
    for iteration in range(2):
        rig.trainer.train(rig.rollout(iteration), iteration)
        weights = rig.trainer.ema_weights()
        files += [
            export_adapter(rig.config.model, weights, tmp_path / f"{iteration}-{again}") for again in "ab"
        ]
    first, again, second, _ = (file.read_bytes() for file in files)
    assert first == again
    assert first != second

    load_policy_weights(rig.engine.model.transformer, weights)
    assert isinstance(rig.engine.model, DiffusersModel)
    assert isinstance(rig.config.model, DiffusersModelConfig)
    own, stock = drawn(rig.engine.model, PROMPTS, STEPS), stock_pipeline(family, folders[family])
    call = {
        "prompt": list(PROMPTS),
        "num_inference_steps": STEPS,
        "latents": rig.engine.model.native_latents(noise(rig.engine.model)),
    }
    before = stock_pixels(stock, rig.config.model, **call)
    stock.load_lora_weights(tmp_path / "1-a")
    assert (stock_pixels(stock, rig.config.model, **call) - before).abs().max() > 1e-3
    torch.testing.assert_close(stock_pixels(stock, rig.config.model, **call), own, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_the_reward_rises(folders: dict[str, Path], family: str) -> None:
    """JPEG size on noise that was never trained on; all weights, since a tiny adapter moves little."""
    optimizer = {"lr": 5e-3, "updates_per_iteration": 2, "samples_per_forward": 8}
    rig = _rig(folders[family], family, "nft", "ode", model={"lora": None}, optimizer=optimizer)
    before = rig.score()
    for iteration in range(12):
        rig.trainer.train(rig.rollout(iteration, seeds=8), iteration)
    assert rig.score() > before + 5e-4
