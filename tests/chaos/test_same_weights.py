"""The embedded recipe ends with the same weights and scores, bit for bit, whatever is taken away from it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spotlight_core.journal import read_words
from spotlight_core.market.explain import ExplainedPreemption, explain
from spotlight_core.market.node_records import read_strikes
from spotlight_core.market.prices import PriceBook
from tasks.run_folder import RunFolder, read_records
from tests.flows.live import nothing_left, spotlight, train

# The quickstart in all but its length: its model, losses, batches, window and exploration.
RECIPE = """
extends = "quickstart"
iterations = 4
[exploration]
seeds_per_prompt = 16
seeds_per_request = 8
[evaluation]
every = 4
images = 48
final_images = 96
[fleet]
trace = "none"
spot_nodes = 1
"""
# Each spot node is struck once.  All of them have work in every phase, whatever their pace: eight requests
# of rollout, fourteen of exploration.
ROUGH = ("--override", "fleet.spot_nodes=6")


def strike(event: str, iteration: int, phase: str, node: str, nth: int, step: int) -> dict[str, Any]:
    point = {"event": event, "iteration": iteration, "phase": phase, "node": node}
    point |= {"nth_request": nth, "denoise_step": step}
    return point | ({"seconds_left": 20} if event == "notice" else {})


TRACE = [
    # Two at once, one of them without notice.
    strike("notice", 0, "rollout", "spot-0", 1, 3),
    strike("kill", 0, "rollout", "spot-1", 1, 3),
    # Beside training.
    strike("notice", 1, "explore", "spot-2", 1, 2),
    {"event": "return", "iteration": 1, "phase": "rollout", "node": "spot-0"},
    # While a commit is under way: one begins at every second step.
    strike("kill", 1, "rollout", "spot-3", 1, 6),
    strike("notice", 2, "rollout", "spot-4", 1, 9),
    # A node that holds a request and has another in hand, as many as a node ever holds.
    strike("kill", 3, "explore", "spot-5", 2, 4),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same-weights")
    (folder / "embedded.toml").write_text(RECIPE)
    (folder / "trace.jsonl").write_text("".join(json.dumps(point) + "\n" for point in TRACE))
    return folder / "runs"


@pytest.fixture(scope="module")
def calm(runs: Path) -> str:
    return train(runs, "calm", recipe="embedded", seconds=800)


def preemptions(folder: RunFolder) -> tuple[ExplainedPreemption, ...]:
    prices = PriceBook(json.loads(folder.recipe.read_text())["prices"])
    return explain(read_words(folder.journal), prices, read_strikes(folder.nodes)).preemptions


def scores(folder: RunFolder) -> list[Any]:
    return [record["evaluation"] for record in read_records(folder.iterations)]


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_preemptions_of_every_kind_change_no_bit_of_weights_and_scores(runs: Path, calm: str) -> None:
    trace = ("--trace", str(runs.parent / "trace.jsonl"))
    rough = train(runs, "rough", *ROUGH, *trace, recipe="embedded", seconds=800)

    folder = RunFolder(runs / "rough")
    assert rough == calm
    assert scores(folder) == scores(RunFolder(runs / "calm"))
    happened = preemptions(folder)
    causes = Counter(preemption.cause for preemption in happened)
    assert len(happened) >= 6
    assert causes["notice"] >= 2
    assert causes["killed"] >= 2
    # Nothing is lost with a notice, and without one no more than the recipe allows for each request.
    commit_every = json.loads(folder.recipe.read_text())["fleet"]["commit_every_steps"]
    for preemption in happened:
        limit = 0 if preemption.cause == "notice" else commit_every * len(preemption.requests)
        assert preemption.exact
        assert preemption.denoise_steps_lost <= limit, preemption
    assert "train" in {preemption.phase for preemption in happened}
    code, said = spotlight(runs, "audit", "rough")
    assert code == 0, said
    nothing_left(folder)


@pytest.mark.soak
@pytest.mark.timeout(1700)
def test_a_live_run_replayed_from_its_decision_log_ends_with_its_weights(runs: Path) -> None:
    much = ("--override", "exploration.seeds_per_prompt=64")
    live = ("--override", "decisions=live", "--override", "exploration_deadline_seconds=0.1")
    first = train(runs, "live", *much, *live, recipe="embedded", seconds=800)
    decided = list(read_records(RunFolder(runs / "live").decisions))
    whole = [all(decision["complete"].values()) for decision in decided[:-1]]
    assert not all(whole), "the deadline cut nothing off"

    trace = str(runs.parent / "trace.jsonl")
    again = train(
        runs, "replayed", *much, *ROUGH, "--replay", "live", "--trace", trace, recipe="embedded", seconds=800
    )

    assert again == first
    assert scores(RunFolder(runs / "replayed")) == scores(RunFolder(runs / "live"))
    # Nothing is explored in a replay, so only the strikes on rollouts happen.
    assert len(preemptions(RunFolder(runs / "replayed"))) == 4
