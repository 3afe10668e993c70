"""Paths that cannot be used, keys that are missing, recipes that differ: one line, and nothing is lost."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flows import cli, launch
from flows.preflight import check_file
from flows.same_recipe import check_same_recipe
from spotlight_core.config import RunConfig
from spotlight_core.errors import BadInputError
from spotlight_core.recipes import load_recipe
from tasks.run_folder import RunFolder
from tests.flows.command_line import Cli, refused


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of a run that was begun and not evaluated yet."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(load_recipe("quickstart", ["name=mine"]).model_dump_json())
    return folder


@pytest.mark.parametrize(
    ("command", "output", "said"),
    [
        ("evaluate", "/proc/grid.png", "cannot write the images to /proc ("),
        ("evaluate", "{here}/folder.png", "folder.png is a folder: give a file"),
        ("export", "/proc/out", "cannot write the export to /proc ("),
        ("export", "{here}/circle", "circle is a link that leads to itself"),
        ("export", "{here}/file", "file is a file: give a folder as --output"),
        ("export", "{here}/" + "x" * 300, "File name too long: check the path"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_first(
    spotlight: Cli, begun: Path, tmp_path: Path, command: str, output: str, said: str
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")

    code, out, err = spotlight(command, "mine", "--output", output.format(here=tmp_path))

    assert (code in (1, 2), out, err.count("\n")) == (True, "", 1)
    assert err.startswith("error: ")
    assert said in err
    assert "--resume" not in err


def test_a_file_that_may_not_be_written_over_is_refused(tmp_path: Path) -> None:
    check_file(tmp_path / "new.png", "the images")
    kept = tmp_path / "kept.png"
    shutil.copy(str(shutil.which("sleep")), kept)
    size = kept.stat().st_size
    check_file(kept, "the images")
    running = subprocess.Popen([kept, "60"])  # not even root may write over a program that runs
    try:
        with pytest.raises(BadInputError, match=r"kept\.png cannot be written over \(Text file busy\)"):
            check_file(kept, "the images")
    finally:
        running.kill()
        running.wait()
    assert kept.stat().st_size == size


@pytest.mark.parametrize(
    ("number", "started", "line"),
    [
        (errno.ENOSPC, True, "No space left on device: free some space and continue with --resume"),
        (errno.ENOSPC, False, "No space left on device: free some space and start again"),
        (errno.EROFS, True, "Read-only file system: make it writable and continue with --resume"),
        (errno.EACCES, True, "/there: Permission denied: check the path and its permissions"),
    ],
)
def test_a_disk_that_ends_a_run_is_one_line_with_its_own_remedy(
    spotlight: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, started: bool, line: str
) -> None:
    def fails(config: RunConfig, folder: RunFolder, **how: object) -> str:
        if started:
            folder.create()
            folder.recipe.write_text("{}")
        if number == errno.EACCES:
            raise OSError(number, os.strerror(number), "/there")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(launch, "train", fails)
    code, out, err = spotlight("train", "quickstart", "--override", "fleet.memory_gib=0.1")
    assert (code, out, err) == (1, "", f"error: {line}\n")


def test_a_fault_of_no_path_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(ConnectionResetError):
        cli.main()


@pytest.mark.parametrize(
    ("begun_with", "now", "said"),
    [
        (
            ["sampler.type=flow_sde", "sampler.denoise_steps=12"],
            ["sampler.type=dance_sde"],
            "sampler.type = 'flow_sde', now 'dance_sde'",
        ),
        ([], ["rng_seed=1", "reward.type=template"], "reward.type = 'ocr', now 'template'"),
        (
            [],
            ["evaluation.held_out_reward={type='jpeg_size'}"],
            "held_out_reward.type = 'template', now 'jpeg_",
        ),
        ([], ["model.lora.rank=4"], "model.lora = none, now a table"),
        (
            ["sampler={type='cps', window={type='fixed', end=2}}"],
            ["sampler={type='cps'}"],
            "sampler.window = a table of type 'fixed', now none",
        ),
        ([], ["optimizer.lr=0.5", "ema.decay=0.5"], "optimizer.lr = 0.0004, now 0.5"),
        ([], ["optimizer.betas=[0.9, 0.5]"], "optimizer.betas.1 = 0.999, now 0.5"),
        ([], ["services.torch_threads=2"], "services.torch_threads = 1, now 2"),
    ],
)
def test_a_resume_under_another_recipe_names_the_key_that_the_others_follow_from(
    begun_with: list[str], now: list[str], said: str
) -> None:
    old, new = load_recipe("no_exploration", begun_with), load_recipe("no_exploration", now)
    with pytest.raises(BadInputError) as caught:
        check_same_recipe(new, old)
    assert said in caught.value.problem
    assert caught.value.problem.startswith("the run was begun with ")
    check_same_recipe(load_recipe("no_exploration", [*begun_with, "services.ray_port=7000"]), old)


JUDGE = (
    "reward={type='vlm_judge', url='http://127.0.0.1:9', model='m', attempts=1, api_key_variable='NO_KEY'}"
)


@pytest.mark.parametrize("value", [None, "  "])
def test_a_key_that_is_not_in_the_environment_is_a_note_of_a_dry_run_and_ends_a_run(
    spotlight: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_KEY", value)
    said = "the environment variable NO_KEY of the judge's api_key_variable is empty: export the key in it"
    code, _, err = spotlight("train", "quickstart", "--dry-run", "--override", JUDGE)
    assert (code, err) == (0, f"note: {said}\n")
    assert refused(spotlight("train", "quickstart", "--override", JUDGE), tmp_path) == said
    monkeypatch.setenv("NO_KEY", "secret")
    assert spotlight("train", "quickstart", "--dry-run", "--override", JUDGE)[2] == ""


def test_a_vae_that_wants_larger_multiples_is_known_before_it_is_loaded(
    spotlight: Cli, tmp_path: Path
) -> None:
    def plan(height: int) -> tuple[int, str, str]:
        sizes = [f"model.height={height}", "model.path=Wan-AI/Wan2.2-TI2V-5B-Diffusers"]
        options = [part for each in sizes for part in ("--override", each)]
        return spotlight("train", "wan_dance", "--dry-run", *options)

    assert refused(plan(240), tmp_path) == "model.height = 240 is no multiple of 32: give 224 or 256"
    assert refused(plan(16), tmp_path) == "model.height = 16 is no multiple of 32: give 32"
    assert plan(256)[0] == 0
