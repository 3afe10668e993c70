"""A video model from a recipe to an export, through the flow on a real fleet, and what is asked of it after.

`spotlight evaluate` gives the run's own scores; `spotlight export` what stock diffusers loads.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tasks.run_folder import RunFolder, read_records
from tests.core.diffusion.models.tiny_pipelines import (
    FRAMES,
    HEIGHT,
    MAX_TEXT_TOKENS,
    WIDTH,
    save_pipeline,
    stock_pipeline,
)
from tests.flows.live import environment, nothing_left, train, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXACT = """
import dataclasses, json, sys
from pathlib import Path
from flows.launch import evaluate_target
from flows.preflight import evaluation_prompts
from flows.targets import find_target
target = find_target(Path(sys.argv[1]), sys.argv[2])
heard = []
found = evaluate_target(target, evaluation_prompts(target.config, None, None), None, heard.append)
print(json.dumps({"evaluation": dataclasses.asdict(found.evaluation), "parts": found.parts, "heard": heard}))
"""


RECIPE = f"""
extends = "lora"
iterations = 2
[model]
type = "wan"
path = "wan"
height = {HEIGHT}
width = {WIDTH}
frames = {FRAMES}
max_text_tokens = {MAX_TEXT_TOKENS}
guidance = 2.0
[model.lora]
rank = 4
alpha = 8
[sampler]
type = "cps"
denoise_steps = 4
[sampler.window]
type = "progressive"
size = 2
iterations_per_move = 1
[reward]
type = "weighted"
parts = [
    {{ weight = 1.0, reward = {{ type = "jpeg_size" }} }},
    {{ weight = 0.5, reward = {{ type = "function", file = "ink.py" }} }},
]
[optimizer]
lr = 1e-2
[trainer]
gradient_checkpointing = true
[evaluation]
denoise_steps = 5
[evaluation.held_out_reward]
type = "function"
file = "ink.py"
"""
INK = "def score(image, prompt):\n    return float((image < 128).mean())\n"


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of a video model's LoRA under a weighted reward."""
    runs = write_inputs(tmp_path_factory.mktemp("evaluate"))
    save_pipeline("wan", runs.parent / "wan")
    (runs.parent / "ink.py").write_text(INK)
    (runs.parent / "video.toml").write_text(RECIPE)
    train(runs, "tuned", recipe="video")
    return RunFolder(runs / "tuned")


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def exact(folder: RunFolder, target: str) -> dict[str, Any]:
    found = json.loads(run("-c", EXACT, str(folder.runs), target).splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_a_run_and_its_last_checkpoint_score_what_the_run_itself_did(tuned: RunFolder) -> None:
    recorded = list(read_records(tuned.iterations))[-1]["evaluation"]
    assert recorded["policy"]["number"] == 2

    found = exact(tuned, "tuned")

    assert found["evaluation"] == recorded
    assert found["heard"] == [2, 2]
    assert found["parts"].keys() == {"jpeg_size", "function"}
    weighted = found["parts"]["jpeg_size"] + 0.5 * found["parts"]["function"]
    assert recorded["score"] == pytest.approx(weighted, abs=1e-12)
    assert exact(tuned, str(tuned.checkpoints / "2")) == found
    # Another checkpoint is another policy.
    earlier = exact(tuned, str(tuned.checkpoints / "1"))["evaluation"]["policy"]
    assert (earlier["label"], earlier["number"]) == ("ema", 1)
    assert earlier["digest"] != recorded["policy"]["digest"]
    nothing_left(tuned)


def test_the_command_says_scores_parts_and_where_the_images_are(tuned: RunFolder, tmp_path: Path) -> None:
    prompts, grid = tmp_path / "mine.txt", tmp_path / "grid.png"
    prompts.write_text('A bib with "12"\nA bus with "345"\nA door with "6"')
    evaluate = ["-m", "flows.cli", "evaluate", "tuned", "--runs", str(tuned.runs)]

    said = run(*evaluate, "--prompts", str(prompts), "--images", "2", "--output", str(grid)).splitlines()

    number = r"-?\d\.\d{4}"
    assert re.fullmatch(
        f"ema-2: score {number}, held out {number}, grey share {number} over 2 images", said[-4]
    )
    assert re.fullmatch(f"  jpeg_size {number}", said[-3])
    assert re.fullmatch(f"  function {number}", said[-2])
    assert said[-1] == f"images {grid}"
    assert Image.open(grid).width > 100

    default = run(*evaluate, "--images", "1").splitlines()[-1]
    assert default == f"images {tuned.images / 'evaluate-ema-2.png'}"
    assert Image.open(tuned.images / "evaluate-ema-2.png").width > 100


def test_a_run_and_its_last_checkpoint_export_the_same_bytes(tuned: RunFolder, tmp_path: Path) -> None:
    written = {}
    for name, target in (("run", "tuned"), ("checkpoint", str(tuned.checkpoints / "2"))):
        output = tmp_path / name
        said = run("-m", "flows.cli", "export", target, "--runs", str(tuned.runs), "--output", str(output))
        assert said == f"export {output}\n"
        written[name] = {str(p.relative_to(output)): p.read_bytes() for p in output.rglob("*") if p.is_file()}
    assert written["run"] == written["checkpoint"]
    assert "pytorch_lora_weights.safetensors" in written["run"]
    pipeline = stock_pipeline("wan", tuned.runs.parent / "wan")
    pipeline.load_lora_weights(tmp_path / "run")
    assert next(iter(pipeline.transformer.peft_config.values())).r == 4
    recorded = list(read_records(tuned.iterations))[-1]["evaluation"]
    assert f"| {recorded['score']:.4f} |" in written["run"]["README.md"].decode()
