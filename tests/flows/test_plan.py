"""What a plan says of a run before it starts."""

import logging
from pathlib import Path

from flows.plan import describe, warnings_of
from spotlight_core.config import RunConfig
from spotlight_core.executor.node_log import keep_warnings
from spotlight_core.recipes import load_recipe
from tasks.run_folder import RunFolder


def rows(config: RunConfig, gpu: str = "H100") -> dict[str, str]:
    text = describe(config, RunFolder(Path("/runs") / config.name), gpu)
    return dict(line.split(maxsplit=1) for line in text.splitlines())


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
    few = rows(load_recipe("sd3_nft", ["optimizer.updates_per_iteration=50", "data.prompts_per_iteration=4"]))
    assert few["updates"].startswith("4 optimizer steps an iteration on ")
    assert "× 33 frames" in rows(load_recipe("wan_dance"))["model"]
    assert rows(load_recipe("wan_dance"), "b200")["assumed"].startswith("B200 at 40% of 2250 TFLOPS")


def test_the_plan_of_the_embedded_model_stays_short() -> None:
    said = rows(load_recipe("quickstart"))
    first = ["run", "training", "batch", "exploration", "iteration"]
    assert list(said) == [*first, "prompts", "fleet", "price", "decisions"]


def test_what_nodes_warn_of_outlives_them_and_is_told_at_the_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    assert warnings_of(folder) == []
    logger = logging.getLogger("spotlight_core")
    before = list(logger.handlers)
    try:
        keep_warnings(folder.logs / "spot-0.log")
        commits = logging.getLogger("spotlight_core.executor.commits")
        commits.info("nothing to tell")
        assert not (folder.logs / "spot-0.log").exists()
        commits.warning("no commit of r before denoise step 2: the disk is full")
        assert "the disk is full" in (folder.logs / "spot-0.log").read_text()
    finally:
        for handler in set(logger.handlers) - set(before):
            logger.removeHandler(handler)
            handler.close()
    assert warnings_of(folder) == [f"warnings 1 in spot-0.log of {folder.logs}"]
