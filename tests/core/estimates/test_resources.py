"""What a run will take: exact counts, and estimates that follow from them and from published sizes."""

import json
import struct
from pathlib import Path

import pytest

from spotlight_core.config import DiffusersModelConfig, FamilyConfig, RunConfig
from spotlight_core.diffusion.models.families import guided
from spotlight_core.estimates.layers import forward_flops
from spotlight_core.estimates.resources import (
    GPUS,
    Work,
    disk_of,
    memory_of,
    seconds_of,
    token_counts,
    trained_parameters,
    trained_timesteps,
    untrained_forwards,
    work_of,
)
from spotlight_core.estimates.sizes import model_size
from spotlight_core.recipes import load_recipe


def recipe(name: str, *overrides: str) -> tuple[RunConfig, FamilyConfig]:
    config = load_recipe(name, overrides)
    assert isinstance(config.model, DiffusersModelConfig)
    return config, config.model


def test_forwards_count_guidance_samples_and_trained_timesteps() -> None:
    # 48 x 24 samples, 10 steps, two forwards under guidance; 9 SDE steps trained, the KL wants one more each.
    assert work_of(*recipe("sd3_flow_grpo")) == Work(
        rollout=1152 * 10 * 2,
        explore=0,
        evaluate=64 * 40 * 2 / 20,
        trained=1152 * 9 * 2,
        untrained=1152 * 9 * 2,
    )
    # No guidance, 9 timesteps of each final image; the old policy and the reference beside.
    assert work_of(*recipe("sd3_nft")) == Work(
        rollout=11520, explore=0, evaluate=128.0, trained=10368, untrained=20736
    )
    arm = ("exploration.type=fixed_arm", "exploration.seeds_per_prompt=32", "exploration.effective_steps=5")
    assert work_of(*recipe("qwen_image_fast", *arm)).explore == 31 * 32 * 5


@pytest.mark.parametrize(
    ("name", "doubled", "timesteps", "beside"),
    [
        ("qwen_image_ocr", True, 2, 0),
        ("qwen_image_fast", False, 3, 0),
        ("flux_grpo_guard", False, 9, 0),
        ("flux_mixgrpo", False, 4, 0),
        ("wan_dance", True, 4, 0),
        ("sd3_flow_grpo", True, 9, 1),
        ("sd3_nft", False, 9, 2),
    ],
)
def test_what_is_trained_of_a_sample(name: str, doubled: bool, timesteps: int, beside: int) -> None:
    config, model = recipe(name)
    assert guided(model) is doubled
    assert trained_timesteps(config) == timesteps
    assert untrained_forwards(config) == beside
    mixed, _ = recipe(name, "model.training_dtype=fp32")
    assert untrained_forwards(mixed) == beside + (mixed.loss.type != "nft")


def test_seconds_are_operations_over_the_used_share_of_the_gpus() -> None:
    config, model = recipe("qwen_image_ocr", "trainer.ranks=4", "fleet.spot_nodes=2")
    size = model_size(model)
    assert token_counts(model, size) == (1024, 64)
    flops = forward_flops("qwen_image", size.settings, 1024, 64)
    used = 989e12 * 0.4
    seconds = seconds_of(config, model, size, GPUS["H100"])
    assert seconds.rollout == pytest.approx(512 * 10 * 2 * flops / used / 10)
    # A forward, twice that backward, and a forward again under gradient checkpointing.
    assert seconds.train == pytest.approx(512 * 2 * 2 * 4 * flops / used / 4)
    assert seconds.iteration == seconds.rollout + seconds.train + seconds.evaluate
    twice, _ = recipe("qwen_image_ocr", "trainer.ranks=4", "fleet.spot_nodes=12")
    assert seconds_of(twice, model, size, GPUS["H100"]).rollout == pytest.approx(seconds.rollout / 2)
    fp32, exact = recipe("qwen_image_ocr", "model.rollout_dtype=fp32", "fleet.spot_nodes=2")
    assert seconds_of(fp32, exact, size, GPUS["H100"]).rollout == pytest.approx(seconds.rollout * 989 / 67)


def test_memory_is_sharded_over_ranks_and_depends_on_what_is_trained() -> None:
    config, model = recipe("sd3_nft", "trainer.ranks=2")
    size = model_size(model)
    lora = trained_parameters(model, size)
    memory = memory_of(config, model, size)
    assert memory.frozen == size.transformer * 2 / 2
    assert memory.text_encoders == 2 * size.text_encoders
    assert (memory.trained, memory.gradients, memory.average) == (4 * lora / 2,) * 3
    assert (memory.optimizer, memory.kept) == (8 * lora / 2, 4 * lora / 2)
    assert memory.rollout == 2 * (size.transformer + size.text_encoders) + 4 * size.vae
    # Everything trained: no frozen weights, and the old policy and the reference are whole copies.
    whole, full = recipe("sd3_nft", "trainer.ranks=2", "model.lora=none")
    memory = memory_of(whole, full, size)
    assert memory.frozen == 0
    assert memory.trained == 4 * size.transformer / 2
    assert memory.kept == 2 * 4 * size.transformer / 2
    assert disk_of(whole, size.transformer) == 4 * size.transformer * (3 * 5 + 4)


def test_activations_follow_rows_guidance_and_checkpointing() -> None:
    config, model = recipe("sd3_flow_grpo", "optimizer.samples_per_forward=2")
    size = model_size(model)
    one = memory_of(config, model, size).activations
    assert one == 24 * 34 * 2 * 2 * (1024 + 333) * 1536
    for override, factor in (
        ("optimizer.samples_per_forward=4", 2.0),
        ("optimizer.timesteps_per_forward=3", 3.0),
        ("model.guidance=1.0", 0.5),
        ("model.training_dtype=fp32", 2.0),
        ("trainer.gradient_checkpointing=true", (24 * 2 + 34) / (24 * 34)),
    ):
        other, changed = recipe("sd3_flow_grpo", "optimizer.samples_per_forward=2", override)
        assert memory_of(other, changed, size).activations == pytest.approx(factor * one), override


def test_a_model_in_a_folder_is_counted_in_its_files(tmp_path: Path) -> None:
    part = tmp_path / "transformer"
    part.mkdir()
    settings = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
    (part / "config.json").write_text(json.dumps(settings))
    header = json.dumps({"w": {"dtype": "F32", "shape": [10, 300], "data_offsets": [0, 12000]}}).encode()
    (part / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12000))
    _, model = recipe("qwen_image_ocr", f"model.path={tmp_path}")
    size = model_size(model)
    assert (size.transformer, size.source) == (3000, f"files in {tmp_path}")
    assert size.settings == settings
    # Two blocks of 16 channels: eight square layers and four of an MLP, at rank 64.
    assert trained_parameters(model, size) == 2 * 64 * (8 * 32 + 4 * (16 + 64))
