"""The nodes as the executor knows them, and the end of each: at the first sign, told once.

    until_stopped of a rank fails     its process died ─► does the node answer? ActorLost, respawn,
    a call fails                                          ActorReady; else Lost(killed)
    news of a NodeScheduler fails, its raylet ends ─────► Lost(killed)
    renew has no answer for a node lease ───────────────► Lost(silent)
    Release ─► acknowledge, stop ───────────────────────► Lost(released)

All of it runs on the executor's loop.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError, RayTaskError

from spotlight_core.events import (
    ActorLost,
    ActorReady,
    Committed,
    Event,
    Lost,
    NodeJoined,
    NodeKey,
    Notice,
    SPGroup,
    Start,
)
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.loop import LoopThread
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.executor.store import KeptStore

LOG = logging.getLogger(__name__)

CONTROL_SECONDS = 5.0  # a stop that takes longer than this is a node that does not answer
WATCH_SECONDS = 0.25  # between two looks at the raylets
RESPAWN_SECONDS = 120.0


@dataclass(slots=True, kw_only=True)
class Place:
    """A group and the process behind it, None while there is none."""

    group: SPGroup
    actor: Any
    last_lease: str | None = None


@dataclass(slots=True, kw_only=True)
class Node:
    life: NodeLife
    scheduler: Any
    places: dict[SPGroup, Place]
    leases: dict[str, Start] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)  # the last commit that was told of each lease

    @property
    def key(self) -> NodeKey:
        return self.life.node, self.life.incarnation


class Nodes:
    """See the module's text.  ``post`` takes every event of a node's life."""

    def __init__(
        self,
        *,
        loop: LoopThread,
        cluster: RayCluster,
        inbox: Inbox,
        log: NodeLog,
        store: KeptStore,
        post: Callable[[Event], None],
        lease_seconds: float,
    ) -> None:
        self.known: dict[NodeKey, Node] = {}
        self._loop = loop
        self._cluster = cluster
        self._inbox = inbox
        self._log = log
        self._store = store
        self._post = post
        self._lease_seconds = lease_seconds

    def join(self, life: NodeLife, scheduler: Any, actors: Iterable[Any]) -> None:
        node = Node(life=life, scheduler=scheduler, places={})
        for rank, actor in enumerate(actors):
            group = SPGroup(node=life.node, generation=life.incarnation, ranks=(rank,))
            node.places[group] = Place(group=group, actor=actor)
        self.known[node.key] = node
        self._post(
            NodeJoined(
                node=life.node,
                incarnation=life.incarnation,
                pool=life.pool,
                gpus=life.gpus,
                started_at=life.started_at,
            )
        )
        self._loop.spawn(self._renew(node))
        self._loop.spawn(self._listen(node))
        for place in node.places.values():
            self._loop.spawn(self._watch_actor(node, place, place.actor))

    def give_notice(self, key: NodeKey, seconds_left: float, source: str) -> None:
        """Tell of a notice, and Ray, so that it places nothing there; never before NodeJoined."""
        if key in self.known:
            self._post(Notice(node=key[0], incarnation=key[1], seconds_left=seconds_left, source=source))
            self._loop.spawn(asyncio.to_thread(self._cluster.drain, *key, seconds_left))

    def lose(self, key: NodeKey, cause: str) -> None:
        """Once for each node: stop record, Lost, and then make sure that it is true."""
        node = self.known.pop(key, None)
        if node is not None:
            LOG.info("%s-%d is lost: %s", *key, cause)
            self._loop.spawn(self._bury(node, self._stop_record(node), cause))

    def release(self, key: NodeKey) -> None:
        node = self.known.pop(key, None)
        if node is not None:
            self._loop.spawn(self._let_go(node, "released"))

    async def actor_failed(self, node: Node, place: Place, actor: Any, error: Exception) -> None:
        """A call of a rank's process failed: it died, or its node did.  Acted upon once for each process."""
        if place.actor is not actor or self.known.get(node.key) is not node:
            return
        # The next process knows no former lease, and its first one must not wait behind any.
        place.actor = place.last_lease = None
        if not await self._answers(node):
            self.lose(node.key, "killed")
            return
        LOG.warning("%s rank %d died: %r", place.group.node, place.group.ranks[0], error)
        leases = [start for start in node.leases.values() if start.group == place.group]
        await self._tell_last_commits(node, leases)
        self._post(ActorLost(group=place.group, error=type(error).__name__))
        try:
            respawning = node.scheduler.respawn.options(concurrency_group="boot").remote(place.group.ranks[0])
            place.actor = await asyncio.wait_for(_answer(respawning), RESPAWN_SECONDS)
        except (RayError, TimeoutError) as failure:
            if self.known.get(node.key) is not node:
                return  # let go meanwhile
            LOG.warning("%s rank %d is not back: %s", place.group.node, place.group.ranks[0], failure)
            self.lose(node.key, "killed")
            return
        if self.known.get(node.key) is node:
            self._post(ActorReady(group=place.group))
            self._loop.spawn(self._watch_actor(node, place, place.actor))

    def leases_of(self, request: str) -> list[str]:
        """The leases of a request that are under way."""
        return [
            lease
            for node in self.known.values()
            for lease, start in node.leases.items()
            if start.request.id == request
        ]

    async def watch_raylets(self) -> None:
        """A raylet's end takes its node along, and shows at once to who started it."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for key in list(self.known):
                if not self._cluster.alive(*key):
                    self.lose(key, "killed")

    async def shut_down(self) -> None:
        """Stop every node and tell each one's Lost."""
        nodes = list(self.known.values())
        self.known.clear()
        await asyncio.gather(*(self._let_go(node, "shutdown") for node in nodes))

    # -- one node -------------------------------------------------------------------------------------

    async def _renew(self, node: Node) -> None:
        """Renew the node's lease, and take it for lost when it has not answered for as long."""
        pause = self._lease_seconds / 4
        while self.known.get(node.key) is node:
            try:
                await asyncio.wait_for(self._renewal(node), self._lease_seconds - pause)
            except TimeoutError:
                self.lose(node.key, "silent")
            except RayError as error:
                self._scheduler_failed(node, error)
            await asyncio.sleep(pause)

    def _renewal(self, node: Node) -> Any:
        return _answer(node.scheduler.renew.options(concurrency_group="control").remote())

    async def _listen(self, node: Node) -> None:
        """Notices of the provider, as the node's watcher hears them."""
        heard = 0
        while self.known.get(node.key) is node:
            try:
                news = await node.scheduler.news.options(concurrency_group="news").remote(heard)
            except RayError as error:
                self._scheduler_failed(node, error)
                return
            heard += len(news)
            for notice in news:
                self.give_notice(node.key, notice.seconds_left, notice.source)

    async def _watch_actor(self, node: Node, place: Place, actor: Any) -> None:
        try:
            await actor.until_stopped.options(concurrency_group="life").remote()
        except RayError as error:
            await self.actor_failed(node, place, actor, error)

    def _scheduler_failed(self, node: Node, error: Exception) -> None:
        if self.known.get(node.key) is node:
            LOG.info("%s-%d does not answer: %s", *node.key, type(error).__name__)
            self.lose(node.key, "killed")

    async def _answers(self, node: Node) -> bool:
        """Whether the node outlived one of its processes: a call tells sooner than Ray does."""
        if not self._cluster.alive(*node.key):
            return False
        try:
            await asyncio.wait_for(self._renewal(node), CONTROL_SECONDS)
        except (RayError, TimeoutError):
            return False
        return True

    async def _tell_last_commits(self, node: Node, leases: Iterable[Start]) -> None:
        """Committed for what the store acknowledged, whose word may have died with its process.

        Before the loss is told, since the store keeps only the last commit of a request.
        """
        known = {start.lease: start for start in leases}
        found = await self._store.fence({lease: start.request.id for lease, start in known.items()})
        for lease, commit in found.items():
            start = known[lease]
            if commit.next_denoise_step > node.told.get(lease, start.from_denoise_step):
                self._post(
                    Committed(
                        lease=lease,
                        request=start.request.id,
                        next_denoise_step=commit.next_denoise_step,
                        ref=commit.ref,
                        digest=commit.digest,
                        released=False,
                    )
                )

    async def _bury(self, node: Node, stopped_at: float, cause: str) -> None:
        try:
            await self._tell_last_commits(node, node.leases.values())
        finally:  # whatever the store says: nobody would end the node's leases without it
            self._post_lost(node, stopped_at, cause)
            await asyncio.to_thread(self._cluster.kill_node, *node.key)

    async def _let_go(self, node: Node, cause: str) -> None:
        """Acknowledge, stop the scheduler, which writes its own stop record, and end the node."""
        try:
            if cause == "released":
                await self._tell_last_commits(node, node.leases.values())
            control = {"concurrency_group": "control"}
            acknowledged = node.scheduler.acknowledge.options(**control).remote()
            stopping = node.scheduler.stop.options(**control)
            await asyncio.wait_for(_answer(acknowledged), CONTROL_SECONDS)
            stopped_at = await asyncio.wait_for(_answer(stopping.remote()), CONTROL_SECONDS)
        except Exception as error:  # whatever it was, its Lost must be told
            if isinstance(error, RayTaskError) or not isinstance(error, RayError | TimeoutError):
                LOG.warning("%s-%d was not let go in order: %s", *node.key, error)
            stopped_at = self._stop_record(node)
        self._post_lost(node, stopped_at, cause)
        await asyncio.to_thread(self._cluster.remove_node, *node.key)

    def _stop_record(self, node: Node) -> float:
        """Write the node's stop; its wall-clock seconds, those of now when the log cannot be written."""
        now = self._inbox.clock.now()
        try:
            return self._log.stop(node.life, now, "coordinator")
        except (OSError, ValueError) as error:
            LOG.error("no stop record of %s-%d: %s", *node.key, error)
            return max(now, node.life.started_at)

    def _post_lost(self, node: Node, stopped_at: float, cause: str) -> None:
        life = node.life
        self._post(Lost(node=life.node, incarnation=life.incarnation, cause=cause, stopped_at=stopped_at))


async def _answer(reference: Any) -> Any:
    return await reference
