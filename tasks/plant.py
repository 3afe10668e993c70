"""The machinery of a live run: started together, since each part boots for seconds, and closed in order.

Prefect API ──────────┐
coordinator ─► nodes ─┤
MLflow ───────────────┼─► phases
scorer ───────────────┤
trainer ──────────────┘

The coordinator is a process of its own, which owns Ray and the nodes; here is its client, and the
ledger that follows its journal.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from spotlight_core.batches import BatchPlanner
from spotlight_core.child_process import python_path
from spotlight_core.config import RunConfig
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.requirements import row_checks
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.errors import SpotlightError
from spotlight_core.executor.client import CoordinatorClient, find
from spotlight_core.executor.inbox import Clock
from spotlight_core.executor.processes import reap, spawn
from spotlight_core.exploration.decision_log import DecisionLog, read_decision_log
from spotlight_core.journal import JournalFollower
from spotlight_core.learning.ranks import Trainer, TrainerRanks, build_trainer
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.prices import PriceBook
from spotlight_core.rewards.scorer import ScorerPool
from spotlight_core.types import PolicyVersion
from spotlight_core.weights.store import WeightStore
from tasks import checkpoints, tracking
from tasks.accounts import ExploredOn, LiveLedger, SpotNodes
from tasks.display import Display
from tasks.phases import LivePhases
from tasks.recovery import begin_epoch, sweep
from tasks.run_folder import RunFolder
from tasks.services import PrefectServer
from tasks.supply import MeasuredSupply

LOG = logging.getLogger(__name__)


class Plant:
    """See the module's text.

    ``prefect`` comes from outside, since it must exist before Prefect is imported, as here.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        prefect: PrefectServer,
        display: Display,
    ) -> None:
        self.config = config
        self.folder = folder
        self.display = display
        self._prefect = prefect
        self._closers: list[Callable[[], None]] = [prefect.stop]
        self._coordinator: CoordinatorClient | None = None  # while its nodes are wanted
        self.clock = Clock()
        self.epoch = 0
        self.planner: BatchPlanner
        self.ledger: LiveLedger
        self.explored_on: ExploredOn
        self.trainer: Trainer
        self.phases: LivePhases

    def start(self) -> checkpoints.Checkpoint | None:
        """Clean up after a former driver, start everything, return what to resume from.

        Raises:
            SpotlightError: a part did not start.
        """
        self.display.stage("starting Prefect, the coordinator and the scorer")
        # First: a coordinator of before must not write beside the sweep.
        self.epoch = begin_epoch(self.folder)
        sweep(self.folder)
        checkpoint = checkpoints.latest(self.folder)
        begin = -1
        if checkpoint:
            begin = checkpoint.state.iteration
            checkpoints.check_fits(checkpoint.saved, self.config)
        for problem in checkpoint.damaged if checkpoint else ():
            self.display.stage(f"note: {problem}: using checkpoint {begin}")
        checkpoints.rewind(self.folder, begin)
        self.folder.note(started_at=self.clock.now())
        coordinator = self._start_coordinator()
        self._assemble(coordinator)
        starts: dict[str, Callable[[], object]] = {
            "Prefect": self._prefect.start,
            "nodes": coordinator.wait_ready,
            "scorer": self._scorer.check,
            "MLflow": lambda: tracking.prepare(self.folder.runs),
        }
        if isinstance(self.trainer, TrainerRanks):
            starts["trainer"] = self.trainer.check
        self._together(starts)
        return checkpoint

    def close_fleet(self) -> None:
        """End the nodes, then the coordinator: each node's end is in the journal.  Safe to call twice."""
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.close()

    def dead_part(self) -> SpotlightError | None:
        """What the run cannot go on without and has ended by itself, or failed, if something has."""
        coordinator = self._coordinator
        if not self._prefect.alive():
            return self._ended("Prefect API")
        if coordinator is None:
            return None
        if not coordinator.alive():
            return self._ended("coordinator")
        return coordinator.failure

    def _ended(self, part: str) -> SpotlightError:
        return SpotlightError(
            f"the {part} has ended by itself", f"continue with --resume (see {self.folder.logs})"
        )

    def close(self) -> None:
        """End everything, in order, whatever of it was started; nothing of the run stays."""
        failures: list[Exception] = []
        # The fleet first: it costs most.
        for close in (self.close_fleet, *reversed(self._closers)):
            try:
                close()
            except Exception as error:  # the others must be closed all the same
                failures.append(error)
        self._closers.clear()
        reap(self.folder.run_id)
        if failures:
            raise failures[0]

    def prune_weights(self, *, rollout: Iterable[int], evaluated: Iterable[int]) -> None:
        """Drop published weights but those of the given version numbers."""
        label = self.trainer.rollout_label
        kept = [PolicyVersion(label=label, number=number, digest="") for number in rollout]
        kept += [PolicyVersion(label="ema", number=number, digest="") for number in evaluated]
        kept.append(PolicyVersion(label="base", number=0, digest=""))
        self._weights.prune(kept)

    def _start_coordinator(self) -> CoordinatorClient:
        """Start its process; returns once it listens, while its nodes boot."""
        module = "spotlight_core.executor.coordinator_process"
        process = spawn(
            [sys.executable, "-m", module, str(self.folder.path), "--epoch", str(self.epoch)],
            self.folder.run_id,
            self.folder.logs / "coordinator.log",
            {"PYTHONPATH": python_path()},
        )
        coordinator = CoordinatorClient(find(self.folder.coordinator, self.epoch, process), process)
        self._coordinator = coordinator
        return coordinator

    def _assemble(self, coordinator: CoordinatorClient) -> None:
        """Make the other parts; what takes long of them is left to ``_together``."""
        config, folder = self.config, self.folder
        prompts, checks = config.data.prompts, row_checks(config)
        self.planner = BatchPlanner(
            config=config,
            sampler=GroupSampler(prompts=read_prompts(prompts, "train", checks), rng_seed=config.rng_seed),
            log=self._followed_log(),
        )
        self._scorer = ScorerPool(config.reward, config.evaluation.held_out_reward)
        self._closers.append(self._scorer.close)
        follower = JournalFollower(folder.journal)
        self.explored_on = ExploredOn()
        self.ledger = LiveLedger(
            CostLedger(PriceBook(config.prices)), follower, SpotNodes(self.display), self.explored_on
        )
        self.ledger.start()
        self._closers.append(self.ledger.close)
        self._weights = WeightStore(folder.weights)
        self.trainer = build_trainer(config, folder.trainer)
        self._closers.append(self.trainer.close)
        self.phases = LivePhases(
            planner=self.planner,
            coordinator=coordinator,
            scorer=self._scorer,
            trainer=self.trainer,
            store=self._weights,
            held_out=read_prompts(prompts, "test", checks),
            clock=self.clock,
            supply=MeasuredSupply(
                config, self.planner.explorer, self.ledger, self.clock.now, self._seconds_per_image
            ),
        )

    def _seconds_per_image(self) -> float | None:
        return self._scorer.seconds_per_image

    def _followed_log(self) -> DecisionLog | None:
        """With replayed decisions, those of the other run."""
        if self.config.replay is None:
            return None
        return read_decision_log(RunFolder(self.config.replay).decisions, self.config.iterations)

    def _together(self, starts: Mapping[str, Callable[[], object]]) -> None:
        """Run all at once; the first failure is raised when all have ended, so that what is closed then is
        not still starting."""
        with ThreadPoolExecutor(max_workers=len(starts), thread_name_prefix="start") as pool:
            pending = [pool.submit(_timed, name, start) for name, start in starts.items()]
        for future in pending:
            future.result()


def _timed(name: str, start: Callable[[], object]) -> None:
    began = time.monotonic()
    start()
    LOG.info("%s started in %.1f s", name, time.monotonic() - began)
