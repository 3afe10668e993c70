"""MLflow: one run per training run, one writer, exactly one value per key and iteration.

    iterations.jsonl (durable) ──► checkpoint (durable) ──► MLflow, with the record's own timestamp

The log is the outbox: what a kill kept from MLflow is found on resume by comparing the log with the
store, and sent then with the timestamps of the log.
"""

import getpass
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Read when mlflow is imported.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from spotlight_core.config import RunConfig, flattened
from spotlight_core.market.prices import PriceBook
from spotlight_core.simulator.compare import iterations_to_target
from tasks.run_folder import Record, RunFolder, file_lock, read_records

LOG = logging.getLogger(__name__)
EXPERIMENT = "spotlight"
ARTIFACTS = (
    "recipe.json",
    "journal.jsonl",
    "iterations.jsonl",
    "decisions.jsonl",
    "scores.jsonl",
    "report.html",
)
_PARAM_LENGTH = 6000  # MLflow's own limit of a parameter value


def tracking_uri(runs: Path) -> str:
    return f"sqlite:///{runs / 'mlflow.db'}"


def serve_command(runs: Path) -> str:
    """The command that shows the runs' store in a browser."""
    return (
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow server --host 127.0.0.1 --port 5000 --workers 1 "
        f"--backend-store-uri {tracking_uri(runs)}"
    )


def prepare(runs: Path) -> MlflowClient:
    """The client of the runs' store; makes database and experiment once.

    Under a lock: two first uses at once both migrate the empty database and one of them fails.
    """
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with file_lock(runs / ".mlflow.lock"):
        client = MlflowClient(tracking_uri=tracking_uri(runs))
        if client.get_experiment_by_name(EXPERIMENT) is None:
            client.create_experiment(EXPERIMENT, artifact_location=(runs / "mlartifacts").as_uri())
    return client


def parameters(config: RunConfig) -> dict[str, str]:
    """The flattened recipe, what names its trace, and the digest of its price table."""
    trace = config.fleet.trace
    return flattened(config) | {
        "trace_id": trace.stem if trace else "none",
        "prices_digest": PriceBook(config.prices).digest(),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's uid without a passwd entry
        return str(os.getuid())


def _page_tags(config: RunConfig, folder: RunFolder) -> dict[str, str]:
    """What MLflow's own page shows about a run: who, from what, and a note that says what it is."""
    fleet, exploration = config.fleet, config.exploration
    return {
        "mlflow.user": _user(),
        "mlflow.source.name": "spotlight train",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": (
            f"**{config.loss.type}** on **{config.reward.type}**, {config.iterations} iterations, "
            f"{fleet.reserved_nodes} reserved and {fleet.spot_nodes} spot nodes, "
            f"exploration `{exploration.type}`.\n\n"
            "Plot `val/score` against `cost/usd_total` (x-axis: metric) for score against dollars.\n\n"
            f"Report: `{folder.report}`"
        ),
    }


def _known(client: MlflowClient, run_id: str) -> bool:
    """Whether the store still has the run; one deleted by hand is begun anew and gets every line again."""
    try:
        client.get_run(run_id)
    except MlflowException:
        LOG.warning("MLflow run %s is gone: a new one takes its place", run_id)
        return False
    return True


class TrackedRun:
    """The MLflow run of one training run."""

    def __init__(self, client: MlflowClient, run_id: str, folder: RunFolder) -> None:
        self.run_id = run_id
        self._client = client
        self._folder = folder
        self._present: set[tuple[str, int]] = set()

    @classmethod
    def open(
        cls, config: RunConfig, folder: RunFolder, *, resume_id: str | None, tags: Mapping[str, str]
    ) -> "TrackedRun":
        """Begin a run, or continue ``resume_id`` if the store still has it."""
        client = prepare(folder.runs)
        if resume_id is not None and _known(client, resume_id):
            tracked = cls(client, resume_id, folder)
            client.update_run(resume_id, status="RUNNING")
            tracked._read_present()
        else:
            experiment = client.get_experiment_by_name(EXPERIMENT)
            about = _page_tags(config, folder)
            run = client.create_run(experiment.experiment_id, run_name=config.name, tags=about)
            tracked = cls(client, run.info.run_id, folder)
            params = [Param(key, value[:_PARAM_LENGTH]) for key, value in parameters(config).items()]
            client.log_batch(tracked.run_id, params=params)
        tracked.tag(**tags)
        return tracked

    def tag(self, **tags: str) -> None:
        self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in tags.items()])

    def log_iteration(self, record: Record) -> None:
        """Send one line of ``iterations.jsonl``; what the store holds already is left alone."""
        step, stamp = record["iteration"], round(record["at"] * 1000)
        fresh = {
            key: value
            for key, value in record["metrics"].items()
            if value is not None and (key, step) not in self._present
        }
        if fresh:
            metrics = [Metric(key, float(value), stamp, step) for key, value in fresh.items()]
            try:
                self._client.log_batch(self.run_id, metrics=metrics, synchronous=True)
            except MlflowException as error:  # the log is the outbox: catch_up sends it again
                LOG.warning("MLflow did not take iteration %d: %s", step, error)
            else:
                self._present.update((key, step) for key in fresh)

    def catch_up(self) -> None:
        """Send every line of the log that the store does not hold."""
        for record in read_records(self._folder.iterations):
            self.log_iteration(record)

    def log_final(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the whole run, without an iteration, after every line that is still missing."""
        self.catch_up()
        now = round(max((r["at"] for r in read_records(self._folder.iterations)), default=0.0) * 1000)
        missing = {key: value for key, value in metrics.items() if (key, 0) not in self._present}
        fresh = [Metric(key, value, now, 0) for key, value in missing.items()]
        self._client.log_batch(self.run_id, metrics=fresh, synchronous=True)
        self._present.update((metric.key, 0) for metric in fresh)

    def log_artifacts(self, extra: Iterable[Path] = ()) -> None:
        """The run folder's documents, image grids and ``extra`` files."""
        documents = [self._folder.path / name for name in ARTIFACTS]
        for path in documents + sorted(self._folder.images.glob("*.png")):
            if path.exists():
                self._client.log_artifact(self.run_id, str(path), "images" if path.suffix == ".png" else None)
        for path in extra:
            self._client.log_artifact(self.run_id, str(path), "weights")

    def finish(self, status: str) -> None:
        """FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self.run_id, status)

    def values(self, key: str) -> list[Any]:
        """Every stored ``(step, value, timestamp in ms)`` of a metric."""
        return [(m.step, m.value, m.timestamp) for m in self._client.get_metric_history(self.run_id, key)]

    def _read_present(self) -> None:
        for key in self._client.get_run(self.run_id).data.metrics:
            self._present.update((key, step) for step, _, _ in self.values(key))


def target_metrics(records: Sequence[Record], target: float) -> dict[str, float]:
    """``usd_to_target`` and ``iterations_to_target`` at the first of two successive evaluations that
    reach the target; empty when no such pair exists (a single crossing may be luck)."""
    crossed = iterations_to_target(list(records), target)
    if crossed is None:
        return {}
    usd = next(r["metrics"]["cost/usd_total"] for r in records if r["iteration"] + 1 == crossed)
    return {"iterations_to_target": float(crossed), "usd_to_target": float(usd)}
