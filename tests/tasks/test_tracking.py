from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from spotlight_core.config import RunConfig
from spotlight_core.market.prices import PriceBook
from spotlight_core.recipes import load_recipe
from tasks.run_folder import RunFolder, append_record
from tasks.tracking import TrackedRun, parameters, target_metrics, tracking_uri


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def config() -> RunConfig:
    return load_recipe("quickstart", ["name=tracked"])


def record(iteration: int, **metrics: float) -> dict[str, Any]:
    return {"iteration": iteration, "at": 1000.5 + iteration, "metrics": metrics, "evaluation": None}


def opened(
    config: RunConfig, runs: Path, name: str, resume_id: str | None = None
) -> tuple[TrackedRun, RunFolder]:
    folder = RunFolder(runs / name)
    folder.create()
    return TrackedRun.open(config, folder, resume_id=resume_id, tags={"recipe": "quickstart"}), folder


def test_one_value_per_key_and_iteration_with_the_records_own_time(config: RunConfig, runs: Path) -> None:
    tracked, _ = opened(config, runs, "a")

    tracked.log_iteration(record(-1, **{"val/score": 0.5}))
    tracked.log_iteration(record(0, **{"train/loss": 0.25, "val/score": 0.75}))
    tracked.log_iteration(record(0, **{"train/loss": 9.0}))  # sent already: the first stands

    assert tracked.values("val/score") == [(-1, 0.5, 999500), (0, 0.75, 1000500)]
    assert tracked.values("train/loss") == [(0, 0.25, 1000500)]


def test_resume_sends_exactly_what_a_kill_kept_from_the_store(config: RunConfig, runs: Path) -> None:
    tracked, folder = opened(config, runs, "b")
    for iteration in range(3):
        append_record(
            folder.iterations, record(iteration, **{"train/loss": float(iteration), "cost/usd_total": 1.0})
        )
    tracked.log_iteration(record(0, **{"train/loss": 0.0, "cost/usd_total": 1.0}))
    tracked.log_iteration(record(1, **{"train/loss": 1.0}))  # as if killed in the middle of iteration 1

    for _ in range(2):  # a second resume changes nothing
        resumed, _ = opened(config, runs, "b", resume_id=tracked.run_id)
        resumed.catch_up()

    assert resumed.run_id == tracked.run_id
    assert resumed.values("train/loss") == [(0, 0.0, 1000500), (1, 1.0, 1001500), (2, 2.0, 1002500)]
    assert resumed.values("cost/usd_total") == [(0, 1.0, 1000500), (1, 1.0, 1001500), (2, 1.0, 1002500)]


def test_params_tags_artifacts_and_status_are_stored(config: RunConfig, runs: Path) -> None:
    tracked, folder = opened(config, runs, "c")
    folder.journal.write_text("{}\n")
    (folder.images / "base.png").write_bytes(b"png")
    weights = folder.weights / "ema-1.safetensors"
    weights.write_bytes(b"weights")

    tracked.tag(epoch="1")
    tracked.log_final({"iterations_to_target": 12.0})
    tracked.log_artifacts([weights])
    tracked.finish("FINISHED")

    client = MlflowClient(tracking_uri=tracking_uri(runs))
    run = client.get_run(tracked.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["loss.type"] == "nft"
    assert run.data.params["optimizer.lr"] == str(config.optimizer.lr)
    assert run.data.params["prices_digest"] == PriceBook(config.prices).digest()
    assert run.data.tags["recipe"] == "quickstart"
    assert run.data.tags["epoch"] == "1"
    assert run.data.metrics == {"iterations_to_target": 12.0}
    names = {item.path for item in client.list_artifacts(tracked.run_id)}
    assert names == {"journal.jsonl", "images", "weights"}
    assert [item.path for item in client.list_artifacts(tracked.run_id, "weights")] == [
        "weights/ema-1.safetensors"
    ]
    assert (runs / "mlartifacts").is_dir()


def test_the_trace_id_is_the_files_name(config: RunConfig) -> None:
    assert parameters(load_recipe("on_demand_only"))["trace_id"] == "none"


def test_the_target_counts_at_the_first_of_two_evaluations_that_hold_it() -> None:
    def evaluated(iteration: int, score: float) -> dict[str, Any]:
        return record(iteration, **{"cost/usd_total": 10.0 + iteration}) | {"evaluation": {"score": score}}

    lucky = [
        evaluated(-1, 0.5),
        evaluated(3, 0.92),
        evaluated(7, 0.85),
        record(8),
        evaluated(11, 0.9),
        evaluated(15, 0.95),
    ]

    assert target_metrics(lucky, 0.9) == {"iterations_to_target": 12.0, "usd_to_target": 21.0}
    assert target_metrics(lucky[:4], 0.9) == {}
