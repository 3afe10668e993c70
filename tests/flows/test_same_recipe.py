"""Which recipes may follow another run's decisions."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from flows.same_recipe import replayed
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.errors import BadInputError
from spotlight_core.recipes import load_recipe
from spotlight_core.types import Decision
from tasks.run_folder import RunFolder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path / "live")
    folder.path.mkdir()
    config = load_recipe("quickstart", ["name=live", "iterations=2", "decisions=live"])
    folder.recipe.write_text(config.model_dump_json(), encoding="utf-8")
    data = config.data
    sampler = GroupSampler(prompts=read_prompts(data.prompts, "train"), rng_seed=config.rng_seed)
    batch = sampler.batch(data.prompts_per_iteration, data.prompts_per_iteration)
    seeds = tuple(range(3, 3 + data.seeds_per_prompt))
    selected = {prompt.occurrence: seeds for prompt in batch}
    decision = Decision(iteration=1, arm=None, selected=selected, complete={})
    folder.decisions.write_text(json.dumps(asdict(decision)) + "\n", encoding="utf-8")
    return tmp_path


def test_another_fleet_may_follow_a_run(runs: Path) -> None:
    config = load_recipe("quickstart", ["iterations=2", "fleet.spot_nodes=5", "fleet.trace=none"])
    followed = replayed(config, runs, "live")
    assert (followed.decisions, followed.replay) == ("replayed", runs / "live")
    assert followed.fleet.spot_nodes == 5


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=1e-5", r"optimizer\.lr = 0\.0004, now 1e-05"),
        ("rng_seed=4", "rng_seed = 0, now 4"),
        ("services.torch_threads=2", r"services\.torch_threads = 1, now 2"),
    ],
)
def test_another_training_may_not(runs: Path, override: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        replayed(load_recipe("quickstart", ["iterations=2", override]), runs, "live")


@pytest.mark.parametrize("override", ["decisions=live", "replay=runs/other"])
def test_what_replaying_sets_cannot_be_overridden(runs: Path, override: str) -> None:
    config = load_recipe("quickstart", ["iterations=2"])
    with pytest.raises(BadInputError, match=f"--override {override} beside --replay live"):
        replayed(config, runs, "live", ["rng_seed=0", override])


def test_a_run_that_is_not_there_or_has_not_gone_as_far_is_refused(runs: Path) -> None:
    config = load_recipe("quickstart", ["iterations=2"])
    with pytest.raises(BadInputError, match="no run 'other'"):
        replayed(config, runs, "other")
    log = runs / "live" / "decisions.jsonl"
    log.write_text(log.read_text().replace('"selected": {"', '"selected": {"x'), encoding="utf-8")
    with pytest.raises(BadInputError, match="other prompts for iteration 1"):
        replayed(config, runs, "live")
    log.write_text("", encoding="utf-8")
    with pytest.raises(BadInputError, match="none for iteration 1 of 2"):
        replayed(config, runs, "live")
