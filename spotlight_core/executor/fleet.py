"""The live fleet: which nodes there are, and what the availability trace does to them.

A node is booted in a thread of its own: raylet, actor, ``NodeJoined``.  Progress-keyed points travel
with the actor; their returns, and everything of a clock-keyed trace, happen here.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import ray

from spotlight_core.config import Pool, RunConfig
from spotlight_core.errors import FleetError
from spotlight_core.events import Lost, NodeJoined
from spotlight_core.executor.actors import ActorSetup
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.gpus import gpu_of, local_gpus
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.executor.ray import RayExecutor, create_actor
from spotlight_core.market.progress import ProgressPoint, ProgressTrace
from spotlight_core.market.replay import points_of
from spotlight_core.market.traces import ClockTrace, SlotEvent, slots

LOG = logging.getLogger(__name__)
BOOT_SECONDS = 120.0


@dataclass(slots=True, kw_only=True)
class _Boot:
    node: str
    incarnation: int
    thread: threading.Thread
    error: Exception | None = None


class LiveFleet:
    """Nodes on one machine, each its own Ray node with one actor.

    ``run_folder`` holds ``weights/`` and ``nodes/``; ``trace`` None leaves every node in peace.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        cluster: RayCluster,
        executor: RayExecutor,
        inbox: Inbox,
        run_folder: Path,
        trace: ClockTrace | ProgressTrace | None = None,
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._executor = executor
        self._inbox = inbox
        self._weights = run_folder / "weights"
        self._log = NodeLog(folder=run_folder / "nodes")
        self._trace = trace
        self._boots: dict[str, _Boot] = {}  # the last one of each node
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._clockwork: threading.Thread | None = None
        self._config_json = config.model_dump_json()
        self._joined: set[tuple[str, int]] = set()

    # -- the run's side -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start Ray and boot the first nodes, all at once; returns when they have joined.

        Raises:
            BadInputError: Ray's port is taken.
            FleetError: a node did not come up.
        """
        self._cluster.start_head()
        self._cluster.connect()
        fleet = self._config.fleet
        timeline = self._timeline()
        there = {event.slot for event in timeline if event.at_seconds <= 0 and event.change == "join"}
        spots = range(fleet.spot_nodes) if not isinstance(self._trace, ClockTrace) else sorted(there)
        boots = [self._boot(f"reserved-{index}", "reserved") for index in range(fleet.reserved_nodes)]
        boots += [self._boot(f"spot-{slot}", "spot") for slot in spots]
        for boot in boots:
            boot.thread.join()
        for boot in boots:
            if boot.error is not None:
                raise FleetError(
                    f"node {boot.node} did not start ({boot.error})", "see the run's log"
                ) from boot.error
        later = [event for event in timeline if event.at_seconds > 0]
        if later:
            self._clockwork = threading.Thread(
                target=self._play, args=(later,), name="availability-trace", daemon=True
            )
            self._clockwork.start()

    def on_phase(self, phase: str, iteration: int) -> None:
        """A phase (``rollout`` or ``explore``) of an iteration begins: nodes that return then are booted."""
        for point in self._points():
            if (point.event, point.phase, point.iteration) != ("return", phase, iteration):
                continue
            if self.present(point.node):
                LOG.info("%s returns in iteration %d, but it is there", point.node, iteration)
            else:
                self._boot(point.node, "spot", (iteration, phase))

    def present(self, node: str) -> bool:
        """Whether a life of the node is there or on its way."""
        with self._lock:
            boot = self._boots.get(node)
        booting = boot is not None and boot.thread.is_alive()
        return booting or any(name == node for name, _ in self._executor.nodes())

    def alive(self) -> bool:
        """Whether Ray's head runs, or has been ended by ``close``: without it nothing goes on for long."""
        return self._closing.is_set() or self._cluster.head_alive()

    def close(self) -> None:
        """Stop every actor, post each node's Lost, end Ray.  Do it before the coordinator closes."""
        self._closing.set()
        self._executor.shut_down()
        with self._lock:
            boots = list(self._boots.values())
        self._cluster.stop()
        for boot in boots:
            boot.thread.join(timeout=5.0)
        self._cluster.stop()
        self._executor.close()
        self._bury("shutdown")

    # -- booting --------------------------------------------------------------------------------------

    def _boot(self, node: str, pool: Pool, since: tuple[int, str] | None = None) -> _Boot:
        """Bring up the node's next life in the background."""
        with self._lock:
            former = self._boots.get(node)
            incarnation = max(self._log.next_incarnation(node), 1 + (former.incarnation if former else 0))
            setup = ActorSetup(
                node=node,
                incarnation=incarnation,
                pool=pool,
                gpus=1,
                gpu=gpu_of(node, self._config.fleet.reserved_nodes, local_gpus()),
                config=self._config_json,
                weights=self._weights.absolute(),
                nodes=self._log.folder.absolute(),
                points=tuple(points_of(self._points(), node, since)),
            )
            thread = threading.Thread(target=self._bring_up, args=(setup,), name=f"boot-{node}", daemon=True)
            boot = self._boots[node] = _Boot(node=node, incarnation=incarnation, thread=thread)
        thread.start()
        return boot

    def _bring_up(self, setup: ActorSetup) -> None:
        try:
            self._cluster.add_node(setup.node, setup.incarnation, setup.gpu)
            actor = create_actor(setup, self._inbox.epoch)
            started_at = self._wait_for(actor)
        except Exception as error:  # whatever it was, start() must not take the node for ready
            if not self._closing.is_set():
                LOG.warning("node %s-%d did not start: %s", setup.node, setup.incarnation, error)
                self._boots[setup.node].error = error
                self._cluster.kill_node(setup.node, setup.incarnation)
                self._bury("failed to start", only=(setup.node, setup.incarnation))
            return
        life = NodeLife(
            node=setup.node,
            incarnation=setup.incarnation,
            pool=setup.pool,
            gpus=setup.gpus,
            started_at=started_at,
            stopped_at=None,
        )
        with self._lock:
            if self._closing.is_set():
                return
            self._joined.add((setup.node, setup.incarnation))
            self._executor.join(life, actor)

    def _wait_for(self, actor: object) -> float:
        """``started_at`` of a ready actor; looks up now and then, since close() must not wait for it."""
        answer = actor.started_at.remote()  # type: ignore[attr-defined]
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            if self._closing.is_set():
                raise TimeoutError("the run ends")
            ready, _ = ray.wait([answer], timeout=0.2)
            if ready:
                return float(ray.get(answer))
        raise TimeoutError(f"the actor was not ready after {BOOT_SECONDS:g} s")

    def _bury(self, cause: str, only: tuple[str, int] | None = None) -> None:
        """Lives that have begun and will not end by themselves: stop record, and the events for it."""
        for life in self._log.lives():
            key = (life.node, life.incarnation)
            if life.stopped_at is not None or (only is not None and key != only):
                continue
            for event in _burial(life, self._log, self._inbox.clock.now(), cause, key in self._joined):
                self._inbox.post(event)

    # -- the trace ------------------------------------------------------------------------------------

    def _points(self) -> tuple[ProgressPoint, ...]:
        return self._trace.points if isinstance(self._trace, ProgressTrace) else ()

    def _timeline(self) -> list[SlotEvent]:
        if not isinstance(self._trace, ClockTrace):
            return []
        return slots(self._trace, self._config.fleet.spot_nodes, self._config.fleet.trace_speedup)

    def _play(self, timeline: Iterable[SlotEvent]) -> None:
        """Joins and notices of a clock-keyed trace, in a thread of its own."""
        began = time.monotonic()
        for event in timeline:
            if self._closing.wait(max(0.0, began + event.at_seconds - time.monotonic())):
                return
            node = f"spot-{event.slot}"
            if event.change == "join":
                self._boot(node, "spot")
            else:
                self._give_notice(node)

    def _give_notice(self, node: str) -> None:
        """Notice now, or as soon as a booting node is there; it is killed when its grace is over."""
        with self._lock:
            boot = self._boots.get(node)
        if boot is not None:
            self._later(0.0, lambda: self._notice(boot), f"notice-{node}")

    def _notice(self, boot: _Boot) -> None:
        boot.thread.join()
        grace_seconds = self._config.fleet.grace_seconds
        self._executor.give_notice(boot.node, boot.incarnation, grace_seconds)
        if not self._closing.wait(grace_seconds):
            self._executor.lose(boot.node, boot.incarnation, "killed")

    def _later(self, seconds: float, action: Callable[[], None], name: str) -> None:
        timer = threading.Timer(seconds, action)
        timer.name, timer.daemon = name, True
        timer.start()


def _burial(life: NodeLife, log: NodeLog, at: float, cause: str, joined: bool) -> list[NodeJoined | Lost]:
    """The events that bring the ledger to what the node's log says, with a stop record if there is none."""
    stopped_at = log.stop(life, at, "coordinator")
    node, incarnation = life.node, life.incarnation
    birth = NodeJoined(
        node=node, incarnation=incarnation, pool=life.pool, gpus=life.gpus, started_at=life.started_at
    )
    lost = Lost(node=node, incarnation=incarnation, cause=cause, stopped_at=stopped_at)
    return [lost] if joined else [birth, lost]


def bury_open_nodes(run_folder: Path, stopped_at: float) -> list[NodeJoined | Lost]:
    """Close the books of a run whose driver was killed: to be called once its processes are gone.

    Nodes without a stop record get one at ``stopped_at`` (wall-clock seconds).  Returned are the
    events that the journal lacks, unstamped and in order: the Lost of every such node and of those
    whose own last words the driver did not live to hear, with a NodeJoined before it for a node that
    was still booting.  Called again after they were appended it returns nothing.
    """
    log = NodeLog(folder=run_folder / "nodes")
    joined, lost = _journaled(run_folder / "journal.jsonl")
    events: list[NodeJoined | Lost] = []
    for life in log.lives():
        key = (life.node, life.incarnation)
        if key not in lost:
            events += _burial(life, log, stopped_at, "killed", key in joined)
    return events


def _journaled(journal: Path) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """Nodes whose NodeJoined, and whose Lost, the journal holds."""
    found: dict[str, set[tuple[str, int]]] = {"NodeJoined": set(), "Lost": set()}
    if journal.is_file():
        for line in journal.read_text(encoding="utf-8").splitlines(keepends=True):
            record = json.loads(line) if line.endswith("\n") else {}
            if record.get("word") in found:
                found[record["word"]].add((record["node"], record["incarnation"]))
    return found["NodeJoined"], found["Lost"]
