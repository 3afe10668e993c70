"""The plan of a large model: what follows from the recipe, and what is estimated from published sizes."""

import json
import struct
from pathlib import Path

import pytest

from flows.estimate import (
    GPUS,
    Work,
    disk_of,
    guided,
    memory_of,
    seconds_of,
    token_counts,
    trained_parameters,
    trained_timesteps,
    untrained_forwards,
    work_of,
)
from flows.layers import forward_flops
from flows.model_size import size_of
from flows.plan import describe
from spotlight_core.config import DiffusersModelConfig, RunConfig
from spotlight_core.recipes import load_recipe
from tasks.run_folder import RunFolder


def recipe(name: str, *overrides: str) -> tuple[RunConfig, DiffusersModelConfig]:
    config = load_recipe(name, overrides)
    assert isinstance(config.model, DiffusersModelConfig)
    return config, config.model


def rows(config: RunConfig, gpu: str = "H100") -> dict[str, str]:
    text = describe(config, RunFolder(Path("/runs") / config.name), gpu)
    return dict(line.split(maxsplit=1) for line in text.splitlines())


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
    _, settings = size_of(model)
    assert token_counts(model) == (1024, 64)
    flops = forward_flops("qwen_image", settings, 1024, 64)
    used = 989e12 * 0.4
    seconds = seconds_of(config, model, settings, GPUS["H100"])
    assert seconds.rollout == pytest.approx(512 * 10 * 2 * flops / used / 10)
    # A forward, twice that backward, and a forward again under gradient checkpointing.
    assert seconds.train == pytest.approx(512 * 2 * 2 * 4 * flops / used / 4)
    assert seconds.iteration == seconds.rollout + seconds.train + seconds.evaluate
    twice, _ = recipe("qwen_image_ocr", "trainer.ranks=4", "fleet.spot_nodes=12")
    assert seconds_of(twice, model, settings, GPUS["H100"]).rollout == pytest.approx(seconds.rollout / 2)
    fp32, exact = recipe("qwen_image_ocr", "model.rollout_dtype=fp32", "fleet.spot_nodes=2")
    assert seconds_of(fp32, exact, settings, GPUS["H100"]).rollout == pytest.approx(
        seconds.rollout * 989 / 67
    )


def test_memory_is_sharded_over_ranks_and_depends_on_what_is_trained() -> None:
    config, model = recipe("sd3_nft", "trainer.ranks=2")
    size, settings = size_of(model)
    lora = trained_parameters(model, size, settings)
    memory = memory_of(config, model, size, settings)
    assert memory.frozen == size.transformer * 2 / 2
    assert memory.text_encoders == 2 * size.text_encoders
    assert (memory.trained, memory.gradients, memory.average) == (4 * lora / 2,) * 3
    assert (memory.optimizer, memory.kept) == (8 * lora / 2, 4 * lora / 2)
    assert memory.rollout == 2 * size.total
    # Everything trained: no frozen weights, and the old policy and the reference are whole copies.
    whole, full = recipe("sd3_nft", "trainer.ranks=2", "model.lora=none")
    memory = memory_of(whole, full, size, settings)
    assert memory.frozen == 0
    assert memory.trained == 4 * size.transformer / 2
    assert memory.kept == 2 * 4 * size.transformer / 2
    assert disk_of(whole, size.transformer) == 4 * size.transformer * (3 * 5 + 4)


def test_activations_follow_rows_guidance_and_checkpointing() -> None:
    config, model = recipe("sd3_flow_grpo", "optimizer.samples_per_forward=2")
    size, settings = size_of(model)
    one = memory_of(config, model, size, settings).activations
    assert one == 24 * 34 * 2 * 2 * (1024 + 333) * 1536
    for override, factor in (
        ("optimizer.samples_per_forward=4", 2.0),
        ("optimizer.timesteps_per_forward=3", 3.0),
        ("model.guidance=1.0", 0.5),
        ("model.training_dtype=fp32", 2.0),
        ("trainer.gradient_checkpointing=true", (24 * 2 + 34) / (24 * 34)),
    ):
        other, changed = recipe("sd3_flow_grpo", "optimizer.samples_per_forward=2", override)
        assert memory_of(other, changed, size, settings).activations == pytest.approx(factor * one), override


def test_the_plan_says_what_is_trained_how_and_what_it_is_thought_to_cost() -> None:
    said = rows(load_recipe("qwen_image_ocr"))
    assert said["model"].startswith("qwen_image Qwen/Qwen-Image, 512 × 512 pixels, rollout in bf16")
    assert said["parameters"] == (
        "transformer ~20.4 B, text encoders ~8.29 B, VAE ~127 M (published Qwen/Qwen-Image)"
    )
    assert said["trained"] == (
        "LoRA, rank 64, alpha 128: ~425 M parameters, 2.1 % of the transformer's ~20.4 B"
    )
    assert said["guidance"] == "4, two forwards a velocity"
    assert said["sampler"] == (
        "flow_sde, noise level 1.2, 2 SDE steps somewhere in [0, 5) for each group; "
        "schedule of the model at this size"
    )
    assert said["samples"] == "512 an iteration, 2 trained timesteps of each: 1024"
    assert said["forwards"].startswith("10240 rows of rollout, 0 of exploration, 2048 with backward")
    assert said["evaluation"].startswith("64 images of 50 ODE steps every 20 iterations, 100 first and last")
    assert said["price"] == "$103.60 per hour with every node there"
    assert said["assumed"].startswith("H100 at 40% of 989 TFLOPS (bf16), every node there")
    for row in ("memory", "seconds", "cost", "disk"):
        numbers = [word for word in said[row].replace("$", "").split() if word[0].isdigit()]
        assert numbers == [], f"{row} states an estimate without ~"


def test_the_plan_follows_the_recipe_and_the_gpu() -> None:
    mixed = rows(load_recipe("flux_mixgrpo"))
    assert "4 SDE steps from [0, 4) on, moving by 1 every 25 iterations" in mixed["sampler"]
    assert mixed["training"].startswith("grpo on 1 × pickscore + 1 × clip_score, 300 iterations")
    assert mixed["guidance"] == "3.5, an input of the transformer"
    assert rows(load_recipe("sd3_nft", ["sampler.shift=3"]))["sampler"] == (
        "ode, no stochastic step; schedule shifted by 3"
    )
    whole = rows(load_recipe("sd3_nft", ["model.lora=none"]))
    assert whole["trained"] == "all ~2.24 B parameters of the transformer"
    crowded = rows(load_recipe("qwen_image_ocr", ["model.lora=none", "trainer.ranks=1"]))
    assert "more than the 80 GiB of one H100 together" in crowded["memory"]
    assert "× 33 frames" in rows(load_recipe("wan_dance"))["model"]
    assert rows(load_recipe("wan_dance"), "b200")["assumed"].startswith("B200 at 40% of 2250 TFLOPS")


def test_a_model_in_a_folder_is_counted_in_its_files(tmp_path: Path) -> None:
    part = tmp_path / "transformer"
    part.mkdir()
    settings = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
    (part / "config.json").write_text(json.dumps(settings))
    header = json.dumps({"w": {"dtype": "F32", "shape": [10, 300], "data_offsets": [0, 12000]}}).encode()
    (part / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12000))
    _, model = recipe("qwen_image_ocr", f"model.path={tmp_path}")
    size, found = size_of(model)
    assert (size.transformer, size.source) == (3000, f"files in {tmp_path}")
    assert found == settings
    # Two blocks of 16 channels: eight square layers and four of an MLP, at rank 64.
    assert trained_parameters(model, size, found) == 2 * 64 * (8 * 32 + 4 * (16 + 64))


def test_the_plan_of_the_embedded_model_stays_short() -> None:
    said = rows(load_recipe("quickstart"))
    first = ["run", "training", "batch", "exploration", "iteration"]
    assert list(said) == [*first, "prompts", "fleet", "price", "decisions"]
