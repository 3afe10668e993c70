"""The machinery of a live run: started together, since each part boots for seconds, and closed in order.

Prefect API ─┐
Ray, fleet ──┤
MLflow ──────┼─► phases
scorer ──────┤
trainer ─────┘
"""

import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol, TypeVar

from spotlight_core.batches import BatchPlanner
from spotlight_core.config import RunConfig
from spotlight_core.data.prompts import read_prompts
from spotlight_core.data.sampler import GroupSampler
from spotlight_core.diffusion.models import build_model
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Command, Event, Lost, NodeJoined
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.coordinator import Coordinator, Journal
from spotlight_core.executor.fleet import LiveFleet
from spotlight_core.executor.inbox import Clock, Inbox
from spotlight_core.executor.processes import reap
from spotlight_core.executor.ray import RayExecutor
from spotlight_core.learning.trainer import PolicyTrainer
from spotlight_core.market.ledger import CostLedger
from spotlight_core.market.prices import PriceBook
from spotlight_core.rewards.scorer import ScorerPool
from spotlight_core.scheduling.requests import RequestScheduler, SchedulingRules
from spotlight_core.tensor_store import TensorStore
from spotlight_core.types import PolicyVersion
from spotlight_core.weights.store import WeightStore
from tasks import checkpoints, tracking
from tasks.phases import LivePhases
from tasks.recovery import journal_words, last_position, sweep
from tasks.run_folder import RunFolder
from tasks.services import PrefectServer

T = TypeVar("T")


class Display(Protocol):
    """Who is told how the run goes."""

    def stage(self, text: str) -> None: ...

    def begin(self, done: int, iterations: int) -> None: ...

    def iteration(self, record: dict[str, object]) -> None: ...

    def nodes(self, spot: int) -> None: ...


class LiveLedger:
    """The ledger behind a lock: the coordinator's thread writes it, the phases' reads it."""

    def __init__(self, ledger: CostLedger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()

    def __call__(self, word: Event | Command) -> None:
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

    def __call__(self, word: Event | Command) -> None:
        if isinstance(word, NodeJoined) and word.pool == "spot":
            self._present.add((word.node, word.incarnation))
        elif isinstance(word, Lost):
            self._present.discard((word.node, word.incarnation))
        else:
            return
        self._display.nodes(len(self._present))
