"""The command line with large models: plans of every recipe, models that are not here, evaluation, export."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spotlight_core.recipes import load_recipe, recipe_names
from tests.flows.command_line import Cli, refused


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_has_a_plan_on_any_machine_without_torch_or_a_network(
    spotlight: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    def no_network(*arguments: object) -> None:
        raise AssertionError("a dry run reaches out")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))

    code, out, err = spotlight("train", recipe, "--dry-run")

    assert code == 0
    assert all(line.startswith("note: ") for line in err.splitlines())
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert rows["run"] == f"{recipe} in {tmp_path / 'runs' / recipe}"
    large = {"memory", "seconds", "cost", "assumed", "disk", "guidance", "evaluation", "samples"}
    assert large & rows.keys() == (large if "model" in rows else set())
    if "model" in rows:
        assert rows["cost"].count("~") == 3
        assert "will be downloaded" in err or "forbids to download" in err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from flows import cli\n"
        f"sys.argv = ['spotlight', 'train', 'qwen_image_ocr', '--dry-run', '--runs', {str(tmp_path)!r}]\n"
        "try: cli.main()\n"
        "except SystemExit as stop: code = stop.code\n"
        "print(code, sorted({'torch', 'diffusers', 'ray'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "0 []"


def test_what_a_machine_lacks_is_a_note_of_a_dry_run(spotlight: Cli) -> None:
    code, out, err = spotlight("train", "quickstart", "--dry-run", "--override", "fleet.memory_gib=9999")
    assert code == 0
    assert "note: " in err
    assert "fleet.memory_gib = 9999 are needed" in err
    assert "$15.82 per hour" in out


def test_an_unknown_gpu_names_the_known_ones(spotlight: Cli) -> None:
    code, _, err = spotlight("train", "sd3_ocr", "--dry-run", "--gpu", "tpu")
    assert code == 2
    assert "error: no speed is known for GPU 'tpu': give one of A100, L40S, H100" in err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sampler.type=cps"], "loss grpo_guard regulates the ratio with flow_sde's step std and -dt"),
        (["model.lora.rnak=8"], "unknown key 'model.lora.rnak': did you mean 'rank'?"),
        (["model.path=./nowhere"], "model.path './nowhere' is no folder here and no hub id: give a folder"),
    ],
)
def test_a_bad_setting_of_a_large_model_is_one_line(
    spotlight: Cli, tmp_path: Path, overrides: list[str], said: str
) -> None:
    options = [part for override in overrides for part in ("--override", override)]
    assert said in refused(spotlight("train", "flux_grpo_guard", "--dry-run", *options), tmp_path)


def test_a_local_model_must_be_a_pipeline_of_its_family(spotlight: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    options = ("train", "flux_grpo_guard", "--dry-run", "--override", f"model.path={folder}")
    assert f"model.path {folder} has no model_index.json: give a folder" in refused(
        spotlight(*options), tmp_path
    )
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    assert (
        f"model.path {folder} holds a StableDiffusion3Pipeline, no FluxPipeline: set model.type = 'sd3'"
        in refused(spotlight(*options), tmp_path)
    )
    (folder / "model_index.json").write_text("[")
    assert "model_index.json is not readable" in refused(spotlight(*options), tmp_path)


def test_a_cached_model_is_not_announced_as_a_download(
    spotlight: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    missing = f"note: black-forest-labs/FLUX.1-dev is not in {tmp_path}: it will be downloaded at the start"
    assert missing in spotlight("train", "flux_grpo_guard", "--dry-run")[2]
    repository = tmp_path / "models--black-forest-labs--FLUX.1-dev"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert missing in spotlight("train", "flux_grpo_guard", "--dry-run")[2]
    (snapshot / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    code, _, err = spotlight("train", "flux_grpo_guard", "--dry-run")
    assert code == 0
    assert "black-forest-labs" not in err


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of a run that was begun and not evaluated yet."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(load_recipe("quickstart", ["name=mine"]).model_dump_json())
    return folder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "run mine has no evaluated weights yet: continue it with"),
        (["--images", "401"], "401 images exceed the 400 prompts of "),
        (["--output", "grid.jpg"], "--output grid.jpg is no .png: give a file such as grid.png"),
        (["--output", "/nowhere/grid.png"], "no folder /nowhere: make it first"),
        (["--prompts", "/nowhere"], "cannot read prompts /nowhere: check the path"),
        (["--prompts", "{here}/words.txt"], 'words.txt: the embedded model cannot draw "hello"'),
        (["--prompts", "{here}/plain.txt"], "plain.txt:1: no quoted target in prompt 'A bus'"),
        (["--prompts", "{here}"], "holds no prompts: there is no test split"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_at_once(
    spotlight: Cli, begun: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    (tmp_path / "words.txt").write_text('A sign "hello"\n')
    (tmp_path / "plain.txt").write_text("A bus\n")

    code, out, err = spotlight("evaluate", "mine", *(option.format(here=tmp_path) for option in options))

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_an_export_of_nothing_is_refused(spotlight: Cli, begun: Path, tmp_path: Path) -> None:
    code, _, err = spotlight("export", "mine", "--output", str(tmp_path / "out"))
    assert code == 2
    assert "run mine has no evaluated weights yet" in err
    code, _, err = spotlight("export", str(begun / "checkpoints" / "3"), "--output", str(tmp_path / "out"))
    assert code == 2
    assert "run mine has no checkpoint 3 (there: none)" in err
    assert not (tmp_path / "out").exists()
