"""The machinery of a live run: started together, since each part boots for seconds, and closed in order.

Prefect API ─┐
Ray, fleet ──┤
MLflow ──────┼─► phases
scorer ──────┤
trainer ─────┘
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import RunConfig
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.requirements import row_checks
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Lost, NodeJoined, Word
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.coordinator import Coordinator, Journal
from spotlight_core.executor.fleet import LiveFleet
from spotlight_core.executor.inbox import Clock, Inbox
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.executor.processes import reap
from spotlight_core.executor.ray import RayExecutor
from spotlight_core.journal import last_position, read_words
from spotlight_core.learning.ranks import Trainer, TrainerRanks, build_trainer
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.prices import PriceBook
from spotlight_core.market.traces import read_trace
from spotlight_core.rewards.scorer import ScorerPool
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.tensor_store import TensorStore
from spotlight_core.types import PolicyVersion
from spotlight_core.weights.store import WeightStore
from tasks import checkpoints, tracking
from tasks.display import Display
from tasks.phases import LivePhases
from tasks.recovery import sweep
from tasks.run_folder import RunFolder
from tasks.services import PrefectServer

T = TypeVar("T")
LOG = logging.getLogger(__name__)


class LiveLedger:
    """The ledger behind a lock: the coordinator's thread writes it, the phases' reads it."""

    def __init__(self, ledger: CostLedger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()

    def __call__(self, word: Word) -> None:
        with self._lock:
            self._ledger.apply(word)

    def read(self, question: Callable[[CostLedger], T]) -> T:
        with self._lock:
            return question(self._ledger)


class _SpotNodes:
    """Tells the display how many spot nodes there are."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._present: set[tuple[str, int]] = set()

    def __call__(self, word: Word) -> None:
        if isinstance(word, NodeJoined) and word.pool == "spot":
            self._present.add((word.node, word.incarnation))
        elif isinstance(word, Lost):
            self._present.discard((word.node, word.incarnation))
        else:
            return
        self._display.nodes(len(self._present))


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
        self._fleet_open = False
        self.clock = Clock()
        self.epoch = 0
        self.planner: BatchPlanner
        self.ledger: LiveLedger
        self.trainer: Trainer
        self.phases: LivePhases

    def start(self) -> checkpoints.Checkpoint | None:
        """Clean up after a former driver, start everything, return what to resume from.

        Raises:
            SpotlightError: a part did not start.
        """
        self.display.stage("starting Prefect, Ray and the scorer")
        sweep(self.folder)
        checkpoint = checkpoints.latest(self.folder)
        begin = -1
        if checkpoint:
            begin = checkpoint.state.iteration
            checkpoints.check_fits(checkpoint.saved, self.config)
        for problem in checkpoint.damaged if checkpoint else ():
            self.display.stage(f"note: {problem}: using checkpoint {begin}")
        checkpoints.rewind(self.folder, begin)
        self.epoch = last_position(self.folder.journal)[0] + 1
        self.folder.note(run_id=self.folder.run_id, epoch=self.epoch, started_at=self.clock.now())
        fleet = self._assemble()
        starts: dict[str, Callable[[], object]] = {
            "Prefect": self._prefect.start,
            "fleet": fleet.start,
            "scorer": self._scorer.check,
            "MLflow": lambda: tracking.prepare(self.folder.runs),
        }
        if isinstance(self.trainer, TrainerRanks):
            starts["trainer"] = self.trainer.check
        self._together(starts)
        return checkpoint

    def close_fleet(self) -> None:
        """End the nodes, then the coordinator: each node's end is in the journal.  Safe to call twice."""
        if self._fleet_open:
            self._fleet_open = False
            self._fleet.close()
            self._coordinator.close()

    def dead_part(self) -> SpotlightError | None:
        """A server that the run cannot go on without and that has ended by itself, if one has."""
        for part, alive in (("Prefect API", self._prefect.alive), ("Ray head", self._fleet.alive)):
            if not alive():
                return SpotlightError(
                    f"the {part} has ended by itself",
                    f"continue with --resume (see {self.folder.logs})",
                )
        return None

    def close(self) -> None:
        """End everything, in order, whatever of it was started; nothing of the run stays."""
        failures: list[Exception] = []
        for close in reversed(self._closers):
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

    def _assemble(self) -> LiveFleet:
        """Make the parts; what takes long of them is left to ``_together``."""
        config, folder = self.config, self.folder
        prompts, checks = config.data.prompts, row_checks(config)
        self.planner = BatchPlanner(
            config=config,
            sampler=GroupSampler(prompts=read_prompts(prompts, "train", checks), rng_seed=config.rng_seed),
        )
        self._scorer = ScorerPool(config.reward, config.evaluation.held_out_reward)
        self._closers.append(self._scorer.close)
        self.ledger = LiveLedger(CostLedger.replayed(PriceBook(config.prices), read_words(folder.journal)))
        inbox = Inbox(self.epoch, self.clock)
        executor = self._build_fleet(inbox)
        rules = SchedulingRules(
            lease_seconds=config.fleet.lease_seconds, max_attempts=config.fleet.max_attempts
        )
        self._coordinator = Coordinator(
            decider=RequestScheduler(rules=rules),
            nodes=executor,
            inbox=inbox,
            journal=Journal(folder.journal, [self.ledger, _SpotNodes(self.display)]),
        )
        self._coordinator.start()
        self._fleet_open = True
        self._closers.append(self.close_fleet)
        self._weights = WeightStore(folder.weights)
        self.trainer = build_trainer(config, folder.trainer)
        self._closers.append(self.trainer.close)
        self.phases = LivePhases(
            planner=self.planner,
            coordinator=self._coordinator,
            results=executor.results,
            scorer=self._scorer,
            trainer=self.trainer,
            store=self._weights,
            fleet=self._fleet,
            held_out=read_prompts(prompts, "test", checks),
            clock=self.clock,
        )
        return self._fleet

    def _build_fleet(self, inbox: Inbox) -> RayExecutor:
        config, folder = self.config, self.folder
        cluster = RayCluster(folder.run_id, port=config.services.ray_port)
        executor = RayExecutor(
            cluster=cluster,
            inbox=inbox,
            tensor_store=TensorStore(folder.tensor_store),
            node_log=NodeLog(folder=folder.nodes),
        )
        self._fleet = LiveFleet(
            config=config,
            cluster=cluster,
            executor=executor,
            inbox=inbox,
            run_folder=folder.path,
            trace=read_trace(config.fleet.trace) if config.fleet.trace else None,
        )
        return executor

    def _together(self, starts: Mapping[str, Callable[[], object]]) -> None:
        """Run all at once; the first failure is raised when all have ended.

        Not before: Ray aborts this process when its head is ended while a thread connects to it.
        """
        with ThreadPoolExecutor(max_workers=len(starts), thread_name_prefix="start") as pool:
            pending = [pool.submit(_timed, name, start) for name, start in starts.items()]
        for future in pending:
            future.result()


def _timed(name: str, start: Callable[[], object]) -> None:
    began = time.monotonic()
    start()
    LOG.info("%s started in %.1f s", name, time.monotonic() - began)
