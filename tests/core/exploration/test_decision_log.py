"""A recorded decision log chooses the seeds of another run, or is refused for what is wrong with it."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import RunConfig
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.errors import BadInputError
from spotlight_core.exploration.decision_log import DecisionLog, read_decision_log
from spotlight_core.recipes import load_recipe
from spotlight_core.types import Decision, PolicyVersion, RunState, SeedScore


@pytest.fixture
def config() -> RunConfig:
    return load_recipe("quickstart", ["iterations=3", "data.seeds_per_prompt=2"])


def planner(config: RunConfig, log: DecisionLog | None = None) -> BatchPlanner:
    prompts = read_prompts(config.data.prompts, "train")
    sampler = GroupSampler(prompts=prompts, rng_seed=config.rng_seed)
    return BatchPlanner(config=config, sampler=sampler, log=log)


def first_state(planner: BatchPlanner) -> RunState:
    policy = PolicyVersion(label="base", number=0, digest="d")
    return RunState(iteration=0, policy=policy, batch=planner.plain(0, 0), sampler_position=0)


def write(path: Path, *decisions: Decision) -> Path:
    path.write_text("".join(json.dumps(asdict(decision)) + "\n" for decision in decisions), encoding="utf-8")
    return path


def test_a_replayed_batch_has_the_seeds_that_were_chosen_and_explores_nothing(
    config: RunConfig, tmp_path: Path
) -> None:
    live = planner(config)
    upcoming = live.upcoming(first_state(live))
    explored = {
        planned.prompt.occurrence: tuple(
            SeedScore(seed=seed, reward=float(-seed)) for seed in range(index + 2)
        )
        for index, planned in enumerate(upcoming.prompts[:3])  # a deadline left the others unexplored
    }
    batch, decision = live.select(upcoming, explored)
    log = read_decision_log(write(tmp_path / "decisions.jsonl", decision), iterations=2)

    again = planner(config, log)
    assert again.explore(upcoming, PolicyVersion(label="old", number=1, digest="d")) == ()
    replayed, said = again.select(upcoming, {})
    assert said == decision
    assert [planned.seeds for planned in replayed.prompts] == [planned.seeds for planned in batch.prompts]
    assert [planned.prompt for planned in replayed.prompts] == [planned.prompt for planned in batch.prompts]


def test_the_last_line_counts_and_a_cut_one_does_not(tmp_path: Path) -> None:
    old = Decision(iteration=1, arm=None, selected={"a": (0,)}, complete={"a": False})
    new = Decision(iteration=1, arm=(8, 4), selected={"a": (3,)}, complete={"a": True})
    path = write(tmp_path / "decisions.jsonl", old, new)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"iteration": 1, "arm"')
    assert read_decision_log(path, 2).decisions == {1: new}


def test_a_log_that_ends_early_or_is_about_something_else_is_refused(
    config: RunConfig, tmp_path: Path
) -> None:
    path = write(tmp_path / "d", Decision(iteration=1, arm=None, selected={"a": (0,)}, complete={}))
    with pytest.raises(BadInputError, match="none for iteration 2 of 3"):
        read_decision_log(path, 3)
    other = planner(config, read_decision_log(path, 2))
    with pytest.raises(BadInputError, match="other prompts for iteration 1"):
        other.select(other.upcoming(first_state(other)), {})


@pytest.mark.parametrize("seeds", [(0,), (1, 1), (0, -7), (0, 1, 2)])
def test_seeds_that_are_no_choice_of_the_recipes_number_are_refused(
    config: RunConfig, seeds: tuple[int, ...]
) -> None:
    live = planner(config)
    upcoming = live.upcoming(first_state(live))
    selected = {planned.prompt.occurrence: planned.seeds for planned in upcoming.prompts}
    selected[upcoming.prompts[1].prompt.occurrence] = seeds
    log = DecisionLog({1: Decision(iteration=1, arm=None, selected=selected, complete={})})
    with pytest.raises(BadInputError, match="not 2 different ones from 0 on"):
        log.batch(upcoming)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"iteration": 1}', '{"iteration": 1, "arm": [1], "selected": {}}']
)
def test_a_line_that_is_no_decision_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"decisions\.jsonl:1 is no decision"):
        read_decision_log(path, 2)
    with pytest.raises(BadInputError, match="cannot read the decision log"):
        read_decision_log(tmp_path / "absent", 2)
