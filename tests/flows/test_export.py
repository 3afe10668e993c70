"""Exports: stock diffusers loads them as their card says, and two of one policy are equal to the byte."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from safetensors.torch import load_file

from flows.export import check_output, export_policy
from flows.targets import Target, chosen_weights, find_target
from spotlight_core.config import RunConfig
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.policy import policy_weights
from spotlight_core.durable import write_text
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.recipes import load_recipe
from spotlight_core.types import Batch, Evaluation, PolicyVersion, RunState
from spotlight_core.weights.store import WeightStore
from tasks import checkpoints
from tasks.run_folder import RunFolder, append_record, write_json
from tests.core.diffusion.models.tiny_pipelines import FRAMES, HEIGHT, WIDTH, save_pipeline

RECIPES = {
    "qwen_image": "qwen_image_ocr",
    "flux": "flux_grpo_guard",
    "sd3": "sd3_ocr",
    "wan": "wan_dance",
}
LORA = ("model.lora.rank=4", "model.lora.alpha=8")
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def moved_weights(config: RunConfig) -> Weights:
    """A policy that is not the base model."""
    generator = torch.Generator().manual_seed(5)
    weights = policy_weights(build_model(config.model, "training").transformer)
    return {name: w + 0.05 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def finished(runs: Path, config: RunConfig, weights: Weights) -> Target:
    """The folder of a finished run of three iterations that published ``weights``."""
    folder = RunFolder(runs / config.name)
    folder.create()
    write_text(folder.recipe, config.model_dump_json())
    policy = WeightStore(folder.weights).publish("ema", 3, weights)
    base = PolicyVersion(label="base", number=0, digest="b")
    for iteration, version, score in ((-1, base, 0.25), (2, policy, 0.75)):
        evaluation = Evaluation(policy=version, images=4, score=score, held_out=score / 2, grey_share=0.0)
        metrics = {"cost/usd_total": 1.5 * (iteration + 2)}
        append_record(
            folder.iterations, {"iteration": iteration, "metrics": metrics, "evaluation": asdict(evaluation)}
        )
    write_json(folder.run_json, {"usd_total": 7.25, "status": "finished"})
    return find_target(runs, config.name)


def family_config(family: str, base: Path, *overrides: str) -> RunConfig:
    sizes = [f"model.height={HEIGHT}", f"model.width={WIDTH}", "model.max_text_tokens=16"]
    if family == "wan":
        sizes.append(f"model.frames={FRAMES}")
    same = ["model.rollout_dtype=fp32", "model.training_dtype=fp32", "evaluation.denoise_steps=2"]
    own = [f"model.path={base}", "iterations=3", "model.lora.target_modules=[]", *LORA, *overrides]
    return load_recipe(RECIPES[family], [*sizes, *same, *own])


def python_of(folder: Path) -> str:
    [code] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return str(code)


def followed(folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the card's own lines define when they are run inside the export, beside the base model."""
    monkeypatch.chdir(folder)
    Path(base.name).symlink_to(base)
    names: dict[str, Any] = {}
    exec(compile(python_of(folder), "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("family", RECIPES)
def test_the_card_of_an_adapter_loads_it_into_the_stock_pipeline(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_pipeline(family, tmp_path / f"base-{family}")
    config = family_config(family, base)
    weights = moved_weights(config)
    output = export_policy(finished(tmp_path / "runs", config, weights), tmp_path / "out")

    assert sorted(path.name for path in output.iterdir()) == [
        "README.md",
        "pytorch_lora_weights.safetensors",
        "recipe.json",
    ]
    pipeline = followed(output, base, monkeypatch)["pipeline"]
    loaded = {
        re.sub(r"\.lora_([AB])\.\w+\.", r".lora_\1.", name): parameter.detach()
        for name, parameter in pipeline.transformer.named_parameters()
        if ".lora_" in name
    }
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    [adapter] = pipeline.transformer.peft_config.values()
    assert (adapter.r, adapter.lora_alpha) == (4, 8)
    picture = output / ("first_frame.png" if family == "wan" else "image.png")
    assert Image.open(picture).size == (WIDTH, HEIGHT)


def test_the_card_of_a_whole_transformer_loads_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_pipeline("sd3", tmp_path / "base")
    config = family_config("sd3", base, "model.lora=none", "sampler.shift=2.0")
    weights = moved_weights(config)
    output = export_policy(finished(tmp_path / "runs", config, weights), tmp_path / "out")

    assert {path.name for path in output.iterdir()} == {"README.md", "recipe.json", "transformer"}
    assert str(tmp_path) not in (output / "transformer" / "config.json").read_text()
    pipeline = followed(output, base, monkeypatch)["pipeline"]
    loaded = dict(pipeline.transformer.named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert pipeline.scheduler.config.shift == 2.0


@pytest.mark.parametrize("lora", [(), LORA])
def test_the_embedded_model_is_exported_as_a_transformer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: tuple[str, ...]
) -> None:
    config = load_recipe("quickstart", ["iterations=3", *lora])
    weights = moved_weights(config)
    output = export_policy(finished(tmp_path / "runs", config, weights), tmp_path / "out")

    monkeypatch.chdir(output)
    names: dict[str, Any] = {}
    exec(compile(python_of(output), "README.md", "exec"), names)
    transformer = names["transformer"]
    assert isinstance(transformer, QwenImageTransformer2DModel)
    if not lora:
        assert all(torch.equal(p, weights[name]) for name, p in transformer.named_parameters())
    else:
        assert load_file(output / "pytorch_lora_weights.safetensors").keys() == {
            f"transformer.{name}" for name in weights
        }
        assert sum(".lora_" in name for name, _ in transformer.named_parameters()) == len(weights)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_two_exports_are_equal_to_the_byte_and_name_no_path_of_the_machine(tmp_path: Path) -> None:
    config = load_recipe("quickstart", ["iterations=3", *LORA])
    weights = moved_weights(config)
    first = export_policy(finished(tmp_path / "here", config, weights), tmp_path / "one")
    second = export_policy(finished(tmp_path / "there", config, weights), tmp_path / "two")

    assert bytes_of(first) == bytes_of(second)
    assert len(bytes_of(first)) == 5
    for name, data in bytes_of(first).items():
        if not name.endswith(".safetensors"):
            assert b"/work" not in data
            assert str(tmp_path).encode() not in data
            assert str(Path.home()).encode() + b"/" not in data
    recipe = json.loads((first / "recipe.json").read_text())
    assert recipe["data"]["prompts"] == "digits"
    assert recipe["fleet"]["trace"] == "quickstart.jsonl"
    assert "services" not in recipe
    # Another policy gives other bytes.
    other = {name: weight + 1.0 for name, weight in weights.items()}
    third = export_policy(finished(tmp_path / "other", config, other), tmp_path / "three")
    changed = {name for name, data in bytes_of(third).items() if data != bytes_of(first)[name]}
    assert changed == {"README.md", "pytorch_lora_weights.safetensors"}


def test_the_card_says_where_it_comes_from_and_what_it_scores(tmp_path: Path) -> None:
    base = save_pipeline("sd3", tmp_path / "base")
    config = family_config("sd3", base)
    target = finished(tmp_path / "runs", config, moved_weights(config))
    card = (export_policy(target, tmp_path / "out") / "README.md").read_text()
    assert "base_model" not in card  # a folder is on no hub
    assert "library_name: diffusers\npipeline_tag: text-to-image\ntags:\n- lora\n- text-to-image\n" in card
    assert "| ocr (trained for) | 0.2500 | 0.7500 |" in card
    assert "| pickscore (never) | 0.1250 | 0.3750 |" in card
    assert "| cost | $7.25 at the recipe's prices |" in card
    assert "| iterations | 3 of 3 |" in card
    assert "| seed | 0 |" in card


def test_a_hub_id_is_named_as_the_base_model(tmp_path: Path) -> None:
    base = save_pipeline("flux", tmp_path / "base")
    weights = moved_weights(family_config("flux", base))
    config = family_config("flux", base, "model.path=black-forest-labs/FLUX.1-dev", "model.revision=abc")
    card = (
        export_policy(finished(tmp_path / "runs", config, weights), tmp_path / "out") / "README.md"
    ).read_text()
    assert "base_model: black-forest-labs/FLUX.1-dev\nbase_model_relation: adapter\n" in card
    assert 'base = "black-forest-labs/FLUX.1-dev"\n' in card
    assert 'FluxPipeline.from_pretrained(base, revision="abc", ' in card


def test_what_is_not_ours_is_left_alone_and_an_earlier_export_replaced(tmp_path: Path) -> None:
    config = load_recipe("quickstart", ["iterations=3"])
    target = finished(tmp_path / "runs", config, moved_weights(config))
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "README.md").write_text("my thesis")
    (thesis / "recipe.json").write_text("{}")
    with pytest.raises(BadInputError, match="exists and is no export of ours: give another --output"):
        export_policy(target, thesis)
    assert (thesis / "README.md").read_text() == "my thesis"
    with pytest.raises(BadInputError, match="is a file: give a folder"):
        check_output(thesis / "README.md")
    with pytest.raises(BadInputError, match=r"no folder .*absent: make it first"):
        check_output(tmp_path / "absent" / "out")

    output = tmp_path / "empty"
    output.mkdir()
    before = bytes_of(export_policy(target, output))
    (output / "transformer" / "diffusion_pytorch_model.fp16.safetensors").write_text("of an earlier version")
    assert bytes_of(export_policy(target, output)) == before
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".tmp", ".old"))]


@pytest.mark.parametrize(
    "place", ["notes.txt", "transformer/notes.txt", "figures/one.png", "transformer/more/config.json"]
)
def test_files_of_the_users_beside_an_export_are_never_deleted(tmp_path: Path, place: str) -> None:
    config = load_recipe("quickstart", ["iterations=3"])
    target = finished(tmp_path / "runs", config, moved_weights(config))
    output = export_policy(target, tmp_path / "out")
    (output / place).parent.mkdir(exist_ok=True)
    (output / place).write_text("mine")
    before = bytes_of(output)

    with pytest.raises(BadInputError, match=rf"out holds .*{place} beside an export of ours: move them away"):
        export_policy(target, output)
    assert bytes_of(output) == before
    for number in range(5):
        (output / f"a{number}").write_text("mine")
    with pytest.raises(BadInputError, match="holds a0, a1, a2 and "):
        check_output(output)


def test_links_are_followed_and_those_inside_belong_to_the_user(tmp_path: Path) -> None:
    config = load_recipe("quickstart", ["iterations=3"])
    target = finished(tmp_path / "runs", config, moved_weights(config))
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "out")  # not there yet
    for _ in range(2):
        assert export_policy(target, link) == link
        assert link.is_symlink()
        assert (tmp_path / "disk" / "out" / "README.md").is_file()
    (tmp_path / "base").mkdir()
    (tmp_path / "disk" / "out" / "base").symlink_to(tmp_path / "base")
    with pytest.raises(BadInputError, match="link holds base beside an export of ours"):
        export_policy(target, link)

    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises(BadInputError, match="circle is a link that leads to itself"):
        check_output(circle)
    with pytest.raises(BadInputError, match="cannot write the export to /proc"):
        check_output(Path("/proc/out"))


def test_damaged_weights_of_a_finished_run_lead_to_its_newest_checkpoint(tmp_path: Path) -> None:
    config = load_recipe("quickstart", ["iterations=3"])
    target = finished(tmp_path / "runs", config, moved_weights(config))
    (weights,) = target.folder.weights.iterdir()
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SpotlightError) as caught:
        chosen_weights(target)
    assert str(caught.value).startswith(f"cannot read policy version ema-3 from {weights}")
    assert caught.value.remedy == (
        "restore the file from a backup: the run has finished, and holds no usable checkpoint"
    )

    policy = PolicyVersion(label="current", number=3, digest="d")
    state = RunState(iteration=3, policy=policy, batch=Batch(iteration=3, prompts=()), sampler_position=24)
    saved = checkpoints.saved(config, state, planner={}, mlflow_run_id=None)
    where = checkpoints.save(target.folder, saved, lambda folder: None)
    assert where == target.folder.checkpoints / "3"
    with pytest.raises(SpotlightError) as caught:
        chosen_weights(target)
    assert caught.value.remedy == f"the run has finished: give its newest checkpoint, {where}"
    # One that can go on is told to.
    write_json(target.folder.run_json, {"status": "interrupted"})
    with pytest.raises(SpotlightError, match="or resume the run from a checkpoint"):
        chosen_weights(target)


def test_a_run_without_weights_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    config = load_recipe("quickstart", ["iterations=3"])
    folder = RunFolder(tmp_path / "runs" / config.name)
    folder.create()
    write_text(folder.recipe, config.model_dump_json())
    with pytest.raises(BadInputError, match="run quickstart has no evaluated weights yet"):
        export_policy(find_target(tmp_path / "runs", config.name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_recipe("quickstart", ["iterations=3"])
    target = finished(tmp_path / "runs", config, moved_weights(config))
    (target.folder.checkpoints / "2").mkdir()
    monkeypatch.chdir(tmp_path)
    found = find_target(Path("elsewhere"), "runs/quickstart/checkpoints/2")
    assert (found.folder.path, found.checkpoint) == (target.folder.path, 2)
    assert find_target(tmp_path / "runs", "quickstart").checkpoint is None
    with pytest.raises(BadInputError, match=r"run quickstart has no checkpoint 7 \(there: 2\): give one of"):
        find_target(Path("runs"), "runs/quickstart/checkpoints/7")
    with pytest.raises(BadInputError, match=r"no run 'nope/checkpoints/7' in runs \(there: quickstart\)"):
        find_target(Path("runs"), "nope/checkpoints/7")
