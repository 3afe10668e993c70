"""The live fleet: it offers the machines that the market has, boots what is acquired, plays the trace.

    availability ─► Offered ─► (planner) ─► Acquire ─► boot ─► NodeJoined | BootFailed
         ▲                                                         │            │
         ├────────── Lost that was not the trace's doing ◄─────────┘            │
         └───────────────────────── a machine that is still there ◄─────────────┘

A machine that a clock-keyed trace takes before it was acquired is Withdrawn.

A node is booted in a thread of its own: raylet, NodeScheduler, its actors.  Progress-keyed points
travel with the node; their returns, and everything of a clock-keyed trace, happen here.
"""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray

from spotlight_core.config import RunConfig
from spotlight_core.errors import FleetError
from spotlight_core.events import (
    Acquire,
    BootFailed,
    Event,
    Lost,
    NodeKey,
    Notice,
    Offered,
    Phase,
    Withdrawn,
)
from spotlight_core.executor.availability import Availability, pool_of
from spotlight_core.executor.burial import burial
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.gpus import gpus_of, local_gpus
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.messages import NodeSetup
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.executor.node_scheduler import create_node_scheduler
from spotlight_core.executor.ray import RayExecutor
from spotlight_core.market.progress import ProgressTrace
from spotlight_core.market.traces import ClockTrace, SlotEvent
from spotlight_core.parallel.rendezvous import meeting_place

LOG = logging.getLogger(__name__)
BOOT_SECONDS = 120.0
OFFER_SECONDS = 30.0  # an offered node is acquired within this, or nobody decides


@dataclass(slots=True, kw_only=True)
class _Boot:
    node: str
    incarnation: int
    thread: threading.Thread
    error: Exception | None = None


class LiveFleet:
    """Nodes on one machine, each its own Ray node.

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
        self._market = Availability(config.fleet, trace)
        self._boots: dict[str, _Boot] = {}  # the last one of each node
        self._lock = threading.RLock()
        elastic = config.elastic
        together = config.fleet.gpus_per_node > 1 and elastic.sp_degree != 1
        self._meeting_place = meeting_place(run_folder) if together else None
        self._closing = threading.Event()
        self._config_json = config.model_dump_json()
        self._joined: set[NodeKey] = set()
        executor.attach(self.acquire, self._observe)

    # -- the run's side -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start Ray and the Tensor Store and offer the first nodes; returns when they have joined.

        Spot nodes that do not come up are tried again later, and not waited for.

        Raises:
            BadInputError: Ray's port is taken, or the Tensor Store cannot be opened.
            FleetError: a reserved node did not come up, or none was acquired.
        """
        self._cluster.start_head()
        self._cluster.connect()
        self._executor.store.start()
        nodes = self._market.first()
        for node in nodes:
            self._offer(node)
        for node in nodes:
            self._wait_for_first_life(node)
        if self._market.timeline:
            threading.Thread(
                target=self._play, args=(self._market.timeline,), name="availability-trace", daemon=True
            ).start()

    def on_phase(self, phase: Phase, iteration: int) -> None:
        """The run came to a phase of an iteration: nodes that the trace returns then are offered."""
        for node in self._market.reach(phase, iteration):
            if self.present(node):
                LOG.info("%s returns in iteration %d, but it is there", node, iteration)
            else:
                self._offer(node)

    def acquire(self, command: Acquire) -> None:
        """Bring up the node's next life in the background; NodeJoined or BootFailed follows."""
        if self._closing.is_set():
            return
        if self.present(command.node):
            LOG.warning("%s is acquired, but it is there", command.node)
            return
        with self._lock:  # against a clock-keyed trace that takes the machine at this moment
            there = self._market.has(command.node)
            if there:
                self._boot(command)
        if not there:
            self._inbox.post(
                BootFailed(node=command.node, pool=command.pool, error="the market has no machine")
            )

    def present(self, node: str) -> bool:
        """Whether a life of the node is there or on its way."""
        with self._lock:
            boot = self._boots.get(node)
        booting = boot is not None and boot.error is None and boot.thread.is_alive()
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

    # -- the market -----------------------------------------------------------------------------------

    def _offer(self, node: str) -> None:
        self._inbox.post(Offered(node=node, pool=pool_of(node)))

    def _observe(self, event: Event) -> None:
        """After each event of a node, on the executor's loop."""
        match event:
            case Notice(source="trace"):
                self._market.struck(event.node)
            case Lost():
                if self._log.struck(event.node, event.incarnation):
                    self._market.struck(event.node)
                self._offer_again(event.node)

    def _offer_again(self, node: str) -> None:
        if self._closing.is_set() or pool_of(node) == "on_demand" or not self._market.has(node):
            return
        self._offer(node)

    def _wait_for_first_life(self, node: str) -> None:
        deadline = time.monotonic() + OFFER_SECONDS
        while node not in self._boots:
            if time.monotonic() > deadline:
                raise FleetError(f"node {node} was offered and not acquired", "see the coordinator's log")
            time.sleep(0.02)
        boot = self._boots[node]
        boot.thread.join()
        if boot.error is not None and pool_of(node) == "reserved":
            raise FleetError(f"node {node} did not start ({boot.error})", "see the run's log") from boot.error

    # -- booting --------------------------------------------------------------------------------------

    def _boot(self, command: Acquire) -> None:
        node, fleet = command.node, self._config.fleet
        with self._lock:
            former = self._boots.get(node)
            setup = NodeSetup(
                node=node,
                incarnation=max(self._log.next_incarnation(node), 1 + (former.incarnation if former else 0)),
                pool=command.pool,
                gpus=fleet.gpus_per_node,
                epoch=self._inbox.epoch,
                config=self._config_json,
                weights=self._weights.absolute(),
                nodes=self._log.folder.absolute(),
                store=self._executor.store.name,
                warnings=(self._log.folder.parent / "logs").absolute() / f"{node}.log",
                devices=gpus_of(node, fleet.reserved_nodes, local_gpus(), fleet.gpus_per_node),
                points=self._market.points(node),
                meeting_place=self._meeting_place,
            )
            thread = threading.Thread(target=self._bring_up, args=(setup,), name=f"boot-{node}", daemon=True)
            self._boots[node] = _Boot(node=node, incarnation=setup.incarnation, thread=thread)
            thread.start()

    def _bring_up(self, setup: NodeSetup) -> None:
        try:
            self._cluster.add_node(setup.node, setup.incarnation, setup.devices)
            scheduler = create_node_scheduler(setup)
            started_at = float(self._wait_for(scheduler.joined.options(concurrency_group="boot").remote()))
            actors = self._wait_for(scheduler.actors.options(concurrency_group="control").remote())
        except Exception as error:  # whatever it was, start() must not take the node for ready
            if not self._closing.is_set():
                self._boot_failed(setup, error)
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
            self._executor.join(life, scheduler, actors)

    def _boot_failed(self, setup: NodeSetup, error: Exception) -> None:
        LOG.warning("node %s-%d did not start: %s", setup.node, setup.incarnation, error)
        self._cluster.kill_node(setup.node, setup.incarnation)
        said = str(error).strip().splitlines() or [repr(error)]
        failed = BootFailed(node=setup.node, pool=setup.pool, error=said[-1])
        life = self._log.life(setup.node, setup.incarnation)
        if life is not None:  # what ran of it is paid for
            failed = msgspec.structs.replace(
                failed,
                incarnation=life.incarnation,
                gpus=life.gpus,
                started_at=life.started_at,
                stopped_at=self._log.stop(life, self._inbox.clock.now(), "coordinator"),
            )
        # From here on it may be acquired again.
        self._boots[setup.node].error = error
        self._inbox.post(failed)
        self._offer_again(setup.node)

    def _wait_for(self, answer: Any) -> Any:
        """The answer of a booting actor; looks up now and then, since close() must not wait for it."""
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            if self._closing.is_set():
                raise TimeoutError("the run ends")
            ready, _ = ray.wait([answer], timeout=0.2)
            if ready:
                return ray.get(answer)
        raise TimeoutError(f"the node was not ready after {BOOT_SECONDS:g} s")

    def _bury(self, cause: str) -> None:
        """Lives that have begun and will not end by themselves: stop record, and the word for it."""
        for life in self._log.lives():
            joined = (life.node, life.incarnation) in self._joined
            if life.stopped_at is None:
                self._inbox.post(burial(life, self._log, self._inbox.clock.now(), cause, joined))

    # -- a clock-keyed trace --------------------------------------------------------------------------

    def _play(self, timeline: Iterable[SlotEvent]) -> None:
        """Joins and notices of a clock-keyed trace, in a thread of its own."""
        began = time.monotonic()
        for event in timeline:
            if self._closing.wait(max(0.0, began + event.at_seconds - time.monotonic())):
                return
            node = f"spot-{event.slot}"
            with self._lock:
                self._market.change(event)
                there = self.present(node)
            if event.change == "join":
                if not there:
                    self._offer(node)
            elif not there:
                self._inbox.post(Withdrawn(node=node, pool=pool_of(node)))
            else:
                threading.Thread(target=self._take, args=(node,), name=f"notice-{node}", daemon=True).start()

    def _take(self, node: str) -> None:
        """Notice now, or as soon as a booting node is there; it is killed when its grace is over."""
        with self._lock:
            boot = self._boots.get(node)
        if boot is None:
            return
        boot.thread.join()
        grace_seconds = self._config.fleet.grace_seconds
        self._executor.give_notice(boot.node, boot.incarnation, grace_seconds)
        if not self._closing.wait(grace_seconds):
            self._executor.lose(boot.node, boot.incarnation, "killed")
