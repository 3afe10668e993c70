"""NodeScheduler: the arm of the fleet on one node.  It lives as long as the node.

It writes the node's start record, makes a DenoiseActor for each GPU and another for one that died,
listens for the provider's notice, and ends the node when nobody renews its lease: a node that the
coordinator cannot reach may finish work that was given away, and is paid for.

Without torch, so that the node is billed and watched a second after its process began.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from spotlight_core.config import RunConfig
from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.config.fleet import NoNoticesConfig, NoticesConfig
from spotlight_core.executor.actors import DenoiseActor
from spotlight_core.executor.cluster import SHARE, node_resource
from spotlight_core.executor.messages import NodeSetup, Noticed, RanksBack
from spotlight_core.executor.node_log import NodeLife, NodeLog, keep_warnings
from spotlight_core.executor.processes import kill_own_node
from spotlight_core.executor.store import RayStore
from spotlight_core.parallel.rendezvous import NodeRendezvous
from spotlight_core.parallel.watchdog import Watchdog

LOG = logging.getLogger(__name__)

NEWS_SECONDS = 10.0  # one question for news waits this long
FIRST_LEASE_SECONDS = 300.0  # until the first renewal: models are built before a node joins
STREAMS = 4  # a request that runs, one behind it, and those whose results are on their way


def create_node_scheduler(setup: NodeSetup) -> Any:
    """Start a node's scheduler on it; it answers ``joined`` once all models are built."""
    remote = ray.remote(concurrency_groups={"control": 4, "news": 1, "boot": 2})(NodeScheduler)
    actor = remote.options(
        name=f"{setup.name}-node",
        num_cpus=0,
        resources={node_resource(setup.node, setup.incarnation): SHARE},
        max_restarts=0,
        max_task_retries=0,
    )
    return actor.remote(setup)


def create_denoise_actor(setup: NodeSetup, rank: int, attempt: int) -> Any:
    """Start the process of one rank on its node; it answers ``ready`` once its model is built."""
    remote = ray.remote(concurrency_groups={"denoise": STREAMS, "control": 4, "life": 1})(DenoiseActor)
    actor = remote.options(
        name=f"{setup.name}-rank-{rank}-{attempt}",
        num_cpus=0,
        num_gpus=min(1.0, len(setup.devices) / setup.gpus),
        resources={node_resource(setup.node, setup.incarnation): SHARE},
        max_restarts=0,
        max_task_retries=0,
    )
    return actor.remote(setup, rank, RayStore(setup.store))


def _store_of_groups(rendezvous: NodeRendezvous, elastic: ElasticConfig, device: str) -> Any:
    """What torch's own groups meet over, kept here since ranks come and go; None where there are none."""
    if not elastic.needs_store(device):
        return None
    from spotlight_core.parallel.torch_groups import host_store  # with torch, which else is not needed here

    return host_store(rendezvous)


class NodeScheduler:
    """See the module's text.  ``spawn`` makes the process of a rank."""

    def __init__(
        self,
        setup: NodeSetup,
        spawn: Callable[[NodeSetup, int, int], Any] = create_denoise_actor,
        die: Callable[[], None] = kill_own_node,
    ) -> None:
        started_at = time.time()
        keep_warnings(setup.warnings)
        config = RunConfig.model_validate_json(setup.config)
        self._log = NodeLog(folder=setup.nodes)
        self._log.start(setup.node, setup.incarnation, setup.pool, setup.gpus, started_at)
        self._life = NodeLife(
            node=setup.node,
            incarnation=setup.incarnation,
            pool=setup.pool,
            gpus=setup.gpus,
            started_at=started_at,
            stopped_at=None,
        )
        self._setup = setup
        self._spawn = spawn
        self._die = die
        fleet, elastic = config.fleet, config.elastic
        self._rendezvous: NodeRendezvous | None = None
        if setup.rendezvous is not None:
            self._rendezvous = NodeRendezvous.create(setup.rendezvous, setup.gpus + elastic.standby)
            self._store = _store_of_groups(self._rendezvous, elastic, "cuda" if setup.devices else "cpu")
        self._watchdog: Watchdog | None = None
        self._hung_seconds = elastic.hung_seconds
        self._actors = [spawn(setup, rank, 0) for rank in range(setup.gpus)]
        self._attempts = 0
        # Its rank is past those that are paid for, until it takes the place of one of them.
        self._standby = spawn(setup, setup.gpus, 0) if elastic.standby else None
        self._stopping = threading.Event()
        self._news: list[Noticed | RanksBack] = []
        self._told = threading.Condition()
        self._lease_seconds = fleet.node_lease_seconds
        self._heard_at: float | None = None
        self._made_at = time.monotonic()
        self._watcher: Any = None
        self._listen(fleet.notices, fleet.grace_seconds)
        threading.Thread(target=self._expire, name="node-lease", daemon=True).start()

    def joined(self) -> float:
        """Wall-clock seconds of the start record, once every rank has built its model."""
        ray.get([actor.ready.remote() for actor in self._actors])
        if (
            self._rendezvous is not None
        ):  # from here on a silent rank is one that hangs, and not one that boots
            self._watchdog = Watchdog(self._rendezvous, self._hung_seconds, self._hung, lambda rank: None)
            self._watchdog.start()
        return self._life.started_at

    def actors(self) -> list[Any]:
        """The handles of the ranks' processes, in order."""
        return list(self._actors)

    def respawn(self, rank: int) -> Any:
        """Another process for a rank whose own died, the standby if there is one; its handle, once its model
        is built."""
        self._attempts += 1
        actor, self._standby = self._standby, None
        if actor is None:
            actor = self._spawn(self._setup, rank, self._attempts)
            ray.get(actor.ready.remote())
        else:
            ray.get(actor.become.remote(rank))
            self._standby = self._spawn(self._setup, self._setup.gpus, self._attempts)
        self._actors[rank] = actor
        return actor

    def renew(self) -> None:
        """The coordinator still counts on this node."""
        if self._expired():  # the process was stopped for longer than its lease, and hears of it now
            self._die()
        self._heard_at = time.monotonic()

    def news(self, after: int) -> list[Noticed | RanksBack]:
        """What the provider has told, from number ``after`` on; waits a while when there is nothing."""
        with self._told:
            self._told.wait_for(
                lambda: len(self._news) > after or self._stopping.is_set(), timeout=NEWS_SECONDS
            )
            return self._news[after:]

    def acknowledge(self) -> None:
        """Tell the provider that the node's work is safe."""
        if self._watcher is not None:
            self._watcher.acknowledge()

    def stop(self) -> float:
        """Write the stop record and return its wall-clock seconds; the node is ended by who asks."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.close()
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._rendezvous is not None:
            self._rendezvous.close()
            with contextlib.suppress(OSError):  # other nodes of the run meet there
                self._rendezvous.path.parent.rmdir()
        with self._told:
            self._told.notify_all()
        return self._log.stop(self._life, time.time(), "node")

    def _hung(self, rank: int) -> None:
        """End a rank that shows no sign of life: whoever waits for its process learns of it by that."""
        pid = None if self._rendezvous is None else self._rendezvous.pid_of(rank)
        if pid:
            LOG.warning("rank %d hangs, and is ended", rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _listen(self, notices: NoticesConfig, grace_seconds: float) -> None:
        if isinstance(notices, NoNoticesConfig):
            return
        # Imported where somebody listens: an HTTP client takes a good part of a node's boot.
        from spotlight_core.executor.notices import build_watcher, watch

        self._watcher = build_watcher(notices, self._setup.node, grace_seconds)
        terminated = getattr(self._watcher, "terminated", None)
        if terminated is not None:
            # Kubernetes tells by SIGTERM; a handler can be set in a main thread only.
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, lambda *_: terminated())
        threading.Thread(
            target=watch,
            args=(self._watcher, notices.poll_seconds, self, self._stopping),
            name="notices",
            daemon=True,
        ).start()

    def noticed(self, seconds_left: float, source: str, ranks: tuple[int, ...]) -> None:
        """The provider will take the node, or these GPUs of it."""
        self._tell(Noticed(seconds_left=seconds_left, source=source, ranks=ranks))

    def returned(self, ranks: tuple[int, ...]) -> None:
        """The provider has given these GPUs back."""
        self._tell(RanksBack(ranks=ranks))

    def _tell(self, news: Noticed | RanksBack) -> None:
        with self._told:
            self._news.append(news)
            self._told.notify_all()

    def _expired(self) -> bool:
        if self._heard_at is None:
            return time.monotonic() - self._made_at > max(FIRST_LEASE_SECONDS, self._lease_seconds)
        return time.monotonic() - self._heard_at > self._lease_seconds

    def _expire(self) -> None:
        """End the node without a word when its lease is over: the coordinator's stop record counts."""
        while not self._stopping.wait(self._lease_seconds / 8):
            if self._expired():
                self._die()
                return
