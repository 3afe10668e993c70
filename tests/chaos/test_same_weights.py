"""The embedded recipe ends with the same weights and scores, bit for bit, whatever is taken away from it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spotlight_core.journal import read_words
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.preemptions import Preemption
from spotlight_core.market.prices import PriceBook
from tasks.run_folder import RunFolder, read_records
from tests.flows.live import nothing_left, spotlight, train

# The quickstart in all but its length: its model, losses, batches, window and exploration.
RECIPE = """
extends = "quickstart"
iterations = 9
[data]
prompts_per_iteration = 6
[exploration]
seeds_per_prompt = 16
seeds_per_request = 8
[evaluation]
every = 9
images = 48
final_images = 96
[fleet]
trace = "none"
spot_nodes = 4
"""


def strike(event: str, iteration: int, phase: str, node: str, nth: int, step: int) -> dict[str, Any]:
    point = {"event": event, "iteration": iteration, "phase": phase, "node": node}
    point |= {"nth_request": nth, "denoise_step": step}
    return point | ({"seconds_left": 20} if event == "notice" else {})


def back(iteration: int, node: str) -> dict[str, Any]:
    return {"event": "return", "iteration": iteration, "phase": "rollout", "node": node}


TRACE = [
    # Two at once, one of them without notice.
    strike("notice", 0, "rollout", "spot-0", 1, 3),
    strike("kill", 0, "rollout", "spot-1", 1, 3),
    # Beside training.
    strike("notice", 1, "explore", "spot-2", 1, 2),
    # The only spot node left, which holds a request and another in hand, while a commit is under way:
    # one begins at every second step.
    strike("kill", 2, "explore", "spot-3", 2, 6),
    *(back(2, "spot-0"), back(2, "spot-1"), back(3, "spot-2"), back(3, "spot-3")),
    # They boot for some iterations.
    strike("kill", 7, "explore", "spot-0", 1, 5),
    strike("kill", 7, "explore", "spot-1", 1, 1),
    strike("notice", 8, "rollout", "spot-2", 1, 1),
    strike("notice", 8, "rollout", "spot-3", 1, 9),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same-weights")
    (folder / "embedded.toml").write_text(RECIPE)
    (folder / "trace.jsonl").write_text("".join(json.dumps(point) + "\n" for point in TRACE))
    return folder / "runs"


@pytest.fixture(scope="module")
def calm(runs: Path) -> str:
    return train(runs, "calm", recipe="embedded")


def preemptions(folder: RunFolder) -> list[Preemption]:
    config = json.loads(folder.recipe.read_text())
    return CostLedger.replayed(PriceBook(config["prices"]), read_words(folder.journal)).preemptions


def scores(folder: RunFolder) -> list[Any]:
    return [record["evaluation"] for record in read_records(folder.iterations)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_preemptions_of_every_kind_change_no_bit_of_weights_and_scores(runs: Path, calm: str) -> None:
    rough = train(runs, "rough", "--trace", str(runs.parent / "trace.jsonl"), recipe="embedded")

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
        limit = 0 if preemption.cause == "notice" else commit_every * len(preemption.in_flight)
        assert preemption.denoise_steps_lost <= limit, preemption
    code, said = spotlight(runs, "audit", "rough")
    assert code == 0, said
    nothing_left(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_live_run_replayed_from_its_decision_log_ends_with_its_weights(runs: Path) -> None:
    live = ("--override", "decisions=live", "--override", "exploration_deadline_seconds=0.3")
    first = train(runs, "live", *live, recipe="embedded")
    decided = list(read_records(RunFolder(runs / "live").decisions))
    whole = [all(decision["complete"].values()) for decision in decided[:-1]]
    assert not all(whole), "the deadline cut nothing off"

    trace = str(runs.parent / "trace.jsonl")
    again = train(runs, "replayed", "--replay", "live", "--trace", trace, recipe="embedded")

    assert again == first
    assert scores(RunFolder(runs / "replayed")) == scores(RunFolder(runs / "live"))
    assert len(preemptions(RunFolder(runs / "replayed"))) >= 3
