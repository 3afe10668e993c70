"""One live run, as the flow sees it: where to begin, what to write down after each iteration, how to end.

The order of an iteration's durable writes is told in ``checkpoints``: logs, checkpoint, tracker.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import asdict

from prefect import runtime

from spotlight_core.diffusion.cpu import cpu_capability
from spotlight_core.durable import write_text
from spotlight_core.errors import SpotlightError
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.ledger_rows import csv_lines, ledger_rows
from spotlight_core.seed_bank import SeedBank, entries_of
from spotlight_core.types import Decision, Evaluation, IterationReport, RunState
from spotlight_core.weights.digest import weights_digest
from tasks import checkpoints
from tasks.accounts import check_ends
from tasks.artifacts import (
    ProgressArtifact,
    image_artifact,
    iteration_artifacts,
    save_grid,
    tracking_artifact,
)
from tasks.logs import hush_console
from tasks.metrics import cost_metrics, evaluation_metrics, overlap_share, remainder_seconds
from tasks.phases import LivePhases
from tasks.plant import Plant
from tasks.reporting import write_report
from tasks.run_folder import Record, append_record, read_records
from tasks.tracking import TrackedRun, serve_command, target_metrics

BASE = -1  # the "iteration" of the base model's evaluation


class LiveRun:
    """State and bookkeeping of a run over its ``Plant``."""

    def __init__(self, plant: Plant, checkpoint: checkpoints.Checkpoint | None) -> None:
        self.plant = plant
        self.config = plant.config
        self.folder = plant.folder
        self.weights_digest: str | None = None
        self._checkpoint = checkpoint
        self._state: RunState | None = None
        self._record: Record | None = None
        self._tracked: TrackedRun | None = None
        self._progress: ProgressArtifact | None = None
        self._began = plant.clock.now()

    @property
    def phases(self) -> LivePhases:
        return self.plant.phases

    @property
    def state(self) -> RunState:
        assert self._state is not None, "begin() comes first"
        return self._state

    @contextlib.asynccontextmanager
    async def tracked(self) -> AsyncIterator[None]:
        """The MLflow run around the loop; its end says how the loop ended."""
        hush_console()  # here, since Prefect sets its handlers when its first flow starts
        resume_id = self.folder.facts().get("mlflow_run_id")
        if resume_id is None and self._checkpoint is not None:
            resume_id = self._checkpoint.saved.mlflow_run_id
        tags = {"prefect_flow_run_id": str(runtime.flow_run.id), "recipe": self.config.name}
        tags |= {"epoch": str(self.plant.epoch), "cpu_capability": cpu_capability()}
        self._tracked = await asyncio.to_thread(
            TrackedRun.open, self.config, self.folder, resume_id=resume_id, tags=tags
        )
        self.folder.note(
            mlflow_run_id=self._tracked.run_id,
            prefect_flow_run_id=tags["prefect_flow_run_id"],
            cpu_capability=tags["cpu_capability"],
            status="running",
        )
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, asyncio.CancelledError)
            with contextlib.suppress(Exception):  # a full disk must not hide why the run ends
                self.folder.note(status="interrupted" if interrupted else "failed")
            with contextlib.suppress(Exception):
                self._tracked.finish("KILLED" if interrupted else "FAILED")
            raise
        else:
            self._tracked.finish("FINISHED")
        finally:
            await self.phases.close()

    # -- the loop's three stations --------------------------------------------------------------------

    async def begin(self) -> RunState:
        """The state to go on from: the last checkpoint's, or a new run's after the base evaluation."""
        state = await (self._restore(self._checkpoint) if self._checkpoint else self._fresh())
        self._state = state
        self.plant.display.begin(state.iteration, self.config.iterations)
        self._progress = await ProgressArtifact.begin(
            self.config.name, state.iteration, self.config.iterations
        )
        assert self._tracked is not None
        await tracking_artifact(
            self.config.name, self._tracked.run_id, serve_command(self.folder.runs), self.folder.report
        )
        self._began = self.plant.clock.now()
        return state

    async def show(self, report: IterationReport) -> None:
        """Measure the iteration and put its numbers and images on its Prefect page."""
        now = self.plant.clock.now()
        metrics = dict(report.metrics) | self.phases.measured | evaluation_metrics(report.evaluation)
        metrics |= self.plant.ledger.read(lambda ledger: cost_metrics(ledger, now))
        segments = self.plant.ledger.read(lambda ledger: ledger.segments(now))
        metrics |= overlap_share(segments, self.phases.windows) | remainder_seconds(self.phases.windows)
        metrics["seconds/iteration"] = now - self._began
        self._began = now
        self._record = self._line(
            report.iteration, now, metrics, report.decision, report.evaluation, report.state
        )
        await iteration_artifacts(self.config.name, report, metrics)
        if self.phases.gallery is not None:
            seen = "held-out images" if report.evaluation else "rollouts"
            await image_artifact(
                self.config.name, self.phases.gallery, f"Iteration {report.iteration}: {seen}"
            )

    async def checkpoint(self, report: IterationReport) -> RunState:
        """Make the iteration durable; a kill at any line of this leaves one value per iteration."""
        assert self._record is not None
        assert self._record["iteration"] == report.iteration
        await asyncio.to_thread(self._write_down, self._record, report.decision, report.state)
        self._state = report.state
        if self._progress is not None:
            await self._progress.advance(report.state.iteration, report.evaluation)
        self.plant.display.iteration(self._record)
        return report.state

    async def finish(self) -> None:
        """End the fleet, so that the last dollar is counted, and write the report."""
        self.plant.display.stage("writing the report")
        await asyncio.to_thread(self._conclude)

    # -- beginning ------------------------------------------------------------------------------------

    async def _fresh(self) -> RunState:
        self.plant.display.stage("evaluating the base model")
        policy = await self.phases.publish_now(0)
        evaluation = await self.phases.evaluate_now("base", 0, self.config.evaluation.final_images)
        assert self.phases.gallery is not None
        save_grid(self.phases.gallery, self.folder.images / "base.png")
        state = RunState(iteration=0, policy=policy, batch=self.plant.planner.plain(0, 0), sampler_position=0)
        now = self.plant.clock.now()
        metrics = self.phases.measured | evaluation_metrics(evaluation)
        metrics |= self.plant.ledger.read(lambda ledger: cost_metrics(ledger, now))
        record = self._line(BASE, now, metrics, None, evaluation, state)
        await asyncio.to_thread(self._write_down, record, None, state)
        self.plant.display.iteration(record)
        return state

    async def _restore(self, checkpoint: checkpoints.Checkpoint) -> RunState:
        self.plant.display.stage(f"resuming at iteration {checkpoint.state.iteration + 1}")
        await asyncio.to_thread(self.plant.trainer.load, checkpoint.trainer)
        self.plant.planner.explorer.load_state_dict(checkpoint.saved.planner)
        policy = await self.phases.publish_now(checkpoint.state.policy.number)
        if policy != checkpoint.state.policy:
            saved = checkpoint.state.policy.digest
            raise SpotlightError(
                f"the restored policy is {policy.digest[:12]}, the checkpoint's was {saved[:12]}",
                "resume on the same packages and kind of machine, or start another --name",
            )
        assert self._tracked is not None
        await asyncio.to_thread(self._tracked.catch_up)
        return checkpoint.state

    # -- durable writes -------------------------------------------------------------------------------

    def _line(
        self,
        iteration: int,
        now: float,
        metrics: dict[str, float],
        decision: Decision | None,
        evaluation: Evaluation | None,
        state: RunState,
    ) -> Record:
        return {
            "iteration": iteration,
            "at": now,
            "metrics": metrics,
            "decision": asdict(decision) if decision else None,
            "evaluation": asdict(evaluation) if evaluation else None,
            "state": asdict(state),
        }

    def _write_down(self, record: Record, decision: Decision | None, state: RunState) -> None:
        if state.iteration == self.config.iterations and self.phases.gallery is not None:
            save_grid(self.phases.gallery, self.folder.images / "final.png")
        append_record(self.folder.iterations, record)
        if decision is not None:
            append_record(self.folder.decisions, asdict(decision))
            append_record(
                self.folder.scores, {"iteration": record["iteration"], "scores": self.phases.scores}
            )
        self._bank(state, record["at"])
        assert self._tracked is not None
        planner = self.plant.planner.explorer.state_dict()
        saved = checkpoints.saved(self.config, state, planner=planner, mlflow_run_id=self._tracked.run_id)
        checkpoints.save(self.folder, saved, self.plant.trainer.save)
        self._tracked.log_iteration(record)
        self._prune(state)

    def _bank(self, state: RunState, at: float) -> None:
        """Keep what exploration has scored for the next batch."""
        arm, policy = self.plant.planner.arm(state.iteration), self.phases.explored_by
        if arm is not None and policy is not None:
            nodes = self.plant.explored_on.nodes(state.iteration)
            entries = entries_of(state.batch, arm, policy, at, nodes)
            SeedBank(self.folder.seed_bank).write(state.iteration, entries)

    def _prune(self, state: RunState) -> None:
        """Keep the weights of this and the previous checkpoint, and the last evaluated ones."""
        records = list(read_records(self.folder.iterations))
        numbers = {state.policy.number, state.policy.number - 1}
        evaluated = [record["evaluation"]["policy"]["number"] for record in records if record["evaluation"]]
        self.plant.prune_weights(rollout=numbers, evaluated=evaluated[-1:])

    def _conclude(self) -> None:
        trainer = self.plant.trainer
        both = {"raw": trainer.trained_weights(), "ema": trainer.ema_weights()}
        # Equal hashes of two runs say that they trained the same policy.
        self.weights_digest = weights_digest(
            {f"{kind}.{name}": tensor for kind, part in both.items() for name, tensor in part.items()}
        )
        self.plant.close_fleet()
        self.plant.ledger.read(check_ends)
        assert self._tracked is not None
        records = list(read_records(self.folder.iterations))
        reached = target_metrics(records, self.config.evaluation.target)
        self._tracked.log_final(reached)
        self._tracked.tag(weights_digest=self.weights_digest)
        self.plant.ledger.read(self._write_accounts)
        self.folder.note(
            weights_digest=self.weights_digest,
            usd_total=self.plant.ledger.read(lambda ledger: ledger.usd(self.plant.clock.now())),
            finished_at=time.time(),
            **reached,
        )
        write_report(self.folder.path)
        final = self.folder.weights / f"ema-{self.config.iterations}.safetensors"
        self._tracked.log_artifacts([final])
        # Last: a finished run is not resumed, and everything above may be done again.
        self.folder.note(status="finished")

    def _write_accounts(self, ledger: CostLedger) -> None:
        lines = csv_lines(ledger_rows(ledger, self.plant.clock.now()))
        write_text(self.folder.accounts, "".join(f"{line}\n" for line in lines))


_CURRENT: ContextVar[LiveRun] = ContextVar("current_run")


def set_current_run(run: LiveRun) -> None:
    """Make ``run`` the one that flows started from this context work on."""
    _CURRENT.set(run)


def current_run() -> LiveRun:
    """The run that this flow belongs to.

    Raises:
        SpotlightError: the flow was started by itself.
    """
    try:
        return _CURRENT.get()
    except LookupError:
        raise SpotlightError(
            "this flow runs inside a run only", "start it with `spotlight train RECIPE`"
        ) from None
