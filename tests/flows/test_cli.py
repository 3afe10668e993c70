"""The command line from outside: what it says, how it exits, what it leaves behind."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spotlight_core.recipes import RECIPES
from tests.flows.command_line import Cli, refused


def prompts(folder: Path, train: str = 'A "12"\n', test: str = 'A "34"\n') -> str:
    folder.mkdir()
    (folder / "train.txt").write_text(train)
    (folder / "test.txt").write_text(test)
    return f"data.prompts={folder}"


SMALL = ("--override", "evaluation.images=1", "--override", "evaluation.final_images=1")


def test_help_answers_within_half_a_second_and_loads_nothing_heavy() -> None:
    heavy = "'torch', 'ray', 'prefect', 'mlflow', 'diffusers', 'pandas', 'plotly', 'numpy'"
    probe = (
        "import sys, time; began = time.perf_counter(); sys.argv = ['spotlight', '--help']\n"
        "from flows import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        f"print(sorted(set(sys.modules) & {{{heavy}}}), time.perf_counter() - began, file=sys.stderr)"
    )
    best = 9.0
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        loaded, _, seconds = result.stderr.strip().rpartition(" ")
        assert loaded == "[]"
        assert "pretrain-tiny" in result.stdout
        best = min(best, float(seconds))
    assert best < 0.5


def test_a_missing_recipe_names_the_shipped_ones(spotlight: Cli, tmp_path: Path) -> None:
    assert "no recipe 'quickstrat': give a TOML file or one of" in refused(
        spotlight("train", "quickstrat"), tmp_path
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.learning_rate=1", "quickstart.toml: unknown key 'optimizer.learning_rate'"),
        (
            "iterations=many",
            "quickstart.toml: iterations = 'many' is not usable: Input should be a valid integer",
        ),
        ("fleet.trace=/nowhere/trace.csv", "/nowhere/trace.csv"),
        (
            "data.prompts=/nowhere",
            "no prompt folder /nowhere: set data.prompts to a folder with a train and a test file",
        ),
        ("model.weights=/nowhere.safetensors", "no model weights at /nowhere.safetensors: "),
        ("loss.timesteps_per_sample=99", "loss.timesteps_per_sample = 99 exceeds sampler.denoise_steps = 10"),
        ("fleet.memory_gib=9999", "GiB of memory are free, fleet.memory_gib = 9999 are needed: "),
        ("loss={type='grpo'}", "loss grpo needs log-probabilities"),
        ("no-equals-sign", "override 'no-equals-sign' is not key=value: write for example optimizer.lr=1e-4"),
    ],
)
def test_a_bad_setting_is_one_line(spotlight: Cli, tmp_path: Path, override: str, said: str) -> None:
    assert said in refused(spotlight("train", "quickstart", "--override", override), tmp_path)


def test_a_price_missing_for_a_pool_says_which(spotlight: Cli, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    text = f'iterations = 1\n[data]\nprompts = "{RECIPES}/prompts/digits"\n[prices]\nreserved = 1.0\n'
    recipe.write_text(text)

    said = refused(spotlight("train", str(recipe)), tmp_path)

    assert "prices has no entry for pool 'spot': add prices.spot = USD per GPU-hour" in said


def test_a_prompt_without_a_quoted_target_names_its_line(spotlight: Cli, tmp_path: Path) -> None:
    override = prompts(tmp_path / "p", train='A "12"\nno quotes here\n')

    said = refused(spotlight("train", "quickstart", *SMALL, "--override", override), tmp_path)

    assert f"{tmp_path / 'p' / 'train.txt'}:2: no quoted target in prompt 'no quotes here'" in said


def test_a_prompt_that_the_model_cannot_draw_is_refused(spotlight: Cli, tmp_path: Path) -> None:
    override = prompts(tmp_path / "p", test='A "hello"\n')

    said = refused(spotlight("train", "quickstart", *SMALL, "--override", override), tmp_path)

    assert f'{tmp_path / "p" / "test.txt"}: the embedded model cannot draw "hello"' in said


def test_a_trace_with_a_broken_line_names_it(spotlight: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,n1\n5,explode,n1\n")

    assert f"{trace}:2: " in refused(spotlight("train", "quickstart", "--trace", str(trace)), tmp_path)


def test_a_trace_of_unknown_nodes_is_refused(spotlight: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    kill = '"phase": "rollout", "event": "kill", "node": "spot-7", "nth_request": 1, "denoise_step": 3'
    trace.write_text('{"iteration": 1, ' + kill + "}\n")

    said = refused(spotlight("train", "quickstart", "--trace", str(trace)), tmp_path)

    assert f"{trace} names node 'spot-7', the fleet has spot-0, spot-1" in said


@pytest.mark.parametrize("key", ["services.prefect_port", "services.ray_port"])
def test_a_port_in_use_is_named(spotlight: Cli, tmp_path: Path, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        said = refused(spotlight("train", "quickstart", "--override", f"{key}={port}"), tmp_path)

    assert said.startswith(f"{key} = {port}: the port is in use")


def test_an_unwritable_run_folder_is_refused(spotlight: Cli, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder would be")

    code, _, err = spotlight("train", "quickstart")

    assert code == 2
    assert err.startswith("error: cannot write runs to ")
    assert (tmp_path / "runs").read_text() == "a file where the folder would be"


def test_there_is_nothing_to_resume(spotlight: Cli, tmp_path: Path) -> None:
    said = refused(spotlight("train", "quickstart", "--resume"), tmp_path)

    assert said.startswith(f"no run to resume in {tmp_path / 'runs' / 'quickstart'}: drop --resume")


def test_a_dry_run_tells_the_plan_and_leaves_nothing(spotlight: Cli, tmp_path: Path) -> None:
    code, out, err = spotlight(
        "train", "no_exploration", "--dry-run", "--override", "iterations=3", "--trace", "none"
    )

    assert (code, err) == (0, "")
    assert "nft on ocr, 3 iterations, rng_seed 0" in out
    assert "8 rollout, 0 exploration requests" in out
    assert "1 reserved and 2 spot nodes, trace none" in out
    assert "$15.82 per hour" in out  # 10.08 + 2 x 2.87
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_reaches_for_no_store(spotlight: Cli, tmp_path: Path) -> None:
    store = "fleet.store.url=/proc/no/store"
    code, _, err = spotlight("train", "no_exploration", "--dry-run", "--override", store, "--trace", "none")
    assert (code, err) == (0, "note: fleet.store.url = /proc/no/store is tried when the run starts\n")

    said = refused(spotlight("train", "no_exploration", "--override", store, "--trace", "none"), tmp_path)
    assert said.startswith("fleet.store.url = '/proc/no/store/no_exploration-")


def test_facts_that_are_garbage_stop_a_resume_with_one_line(spotlight: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "quickstart"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text("{}")
    (folder / "run.json").write_text("{")

    code, _, err = spotlight("train", "quickstart", "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert "run.json cannot be read" in err


def test_a_run_that_exists_is_not_overwritten(spotlight: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "quickstart"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text("{}")

    code, _, err = spotlight("train", "quickstart", "--name", "quickstart")
    assert code == 2
    assert "was begun in" in err
    assert "give --resume to continue it, another --name, or --fresh to replace it" in err

    (folder / "run.json").write_text('{"status": "finished"}')
    code, _, err = spotlight("train", "quickstart", "--resume")
    assert code == 2
    assert "run quickstart has finished" in err


def test_fewer_held_out_prompts_than_images_are_a_note(spotlight: Cli) -> None:
    code, _, err = spotlight("train", "quickstart", "--dry-run", "--override", "evaluation.final_images=9999")
    assert code == 0
    assert "note: evaluations use all 400 prompts of test.txt, fewer than the 9999 images asked for" in err


def test_an_unnamed_run_takes_the_first_free_number(spotlight: Cli, tmp_path: Path) -> None:
    for name in ("quickstart", "quickstart-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.json").write_text("{}")

    code, out, _ = spotlight("train", "quickstart", "--dry-run")

    assert code == 0
    assert f"run          quickstart-3 in {tmp_path / 'runs' / 'quickstart-3'}" in out


def test_a_folder_of_something_else_is_left_alone(spotlight: Cli, tmp_path: Path) -> None:
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "thesis.tex").write_text("x")

    code, _, err = spotlight("train", "quickstart")

    assert code == 2
    assert "exists and is no run of ours" in err


def test_an_unknown_run_lists_the_known_ones(spotlight: Cli, tmp_path: Path) -> None:
    for command in ("report", "evaluate", "down"):
        assert "no run 'x' in" in refused(spotlight(command, "x"), tmp_path)


def test_recipes_are_listed_with_their_first_line(spotlight: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flows.cli", "recipes"], capture_output=True, text=True, check=True
    )

    lines = result.stdout.splitlines()
    assert any(line.startswith("no_exploration ") and "plain seeds" in line for line in lines)
    assert any(line.startswith("on_demand_only ") for line in lines)


def test_a_refusal_is_quick(tmp_path: Path) -> None:
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "flows.cli", "train", "nope"], capture_output=True, text=True, check=False
    )

    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert time.monotonic() - began < 10
