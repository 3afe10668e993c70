"""`spotlight calibrate`: a table of the embedded model, and a recipe that explores by it."""

import sys
from pathlib import Path

import pytest

from flows import cli
from spotlight_core.batches import BatchPlanner
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.diffusion.caching.files import read_table
from spotlight_core.errors import BadInputError
from spotlight_core.recipes import load_recipe
from spotlight_core.types import PolicyVersion

POLICY = PolicyVersion(label="old", number=0, digest="")


def planner(*overrides: str) -> BatchPlanner:
    config = load_recipe("quickstart", overrides)
    prompts = read_prompts(config.data.prompts, "train")
    return BatchPlanner(config=config, sampler=GroupSampler(prompts=prompts, rng_seed=0))


def test_previews_skip_what_the_table_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "steps.json"
    options = ["--prompts", "2", "--seeds", "1", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["spotlight", "calibrate", "quickstart", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert capsys.readouterr().out.splitlines()[-1] == f"steps {output}"
    table = read_table(output)
    with_table = planner(f"exploration.steps={output}")
    (first, *_) = with_table.explore(with_table.plain(1, 8), POLICY)
    assert first.fidelity.reused_steps == table.reused_steps(8)
    assert first.fidelity.effective_steps >= 8
    (ruled, *_) = planner().explore(planner().plain(1, 8), POLICY)
    assert ruled.fidelity.reused_steps == (7, 9)
    with pytest.raises(BadInputError, match=r"is of 10 denoise steps, and sampler\.denoise_steps = 12"):
        planner(f"exploration.steps={output}", "sampler.denoise_steps=12")


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no step table at .*: write it with `spotlight calibrate`"):
        planner(f"exploration.steps={tmp_path / 'none.json'}")
