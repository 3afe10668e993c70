"""The nodes as the executor knows them, and the end of each: at the first sign, told once.

    until_stopped of a rank fails     its process died ─► does the node answer? RankLost, respawn,
    a call fails                                          RankReady; else Lost(killed)
    news of a NodeScheduler fails, its raylet ends ─────► Lost(killed)
    renew has no answer for a node lease ───────────────► Lost(silent)
    Release ─► acknowledge, stop ───────────────────────► Lost(released)

All of it runs on the executor's loop.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from spotlight_core.events import (
    Committed,
    Event,
    Lost,
    NodeJoined,
    NodeKey,
    Notice,
    RankCause,
    RankLost,
    RankNotice,
    RankReady,
    Start,
)
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.groups import HELD
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.loop import LoopThread
from spotlight_core.executor.messages import HeldState, RanksBack
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.executor.places import Cut, Node, Place
from spotlight_core.executor.store import KeptStore

LOG = logging.getLogger(__name__)

CONTROL_SECONDS = 5.0  # a stop that takes longer than this is a node that does not answer
WATCH_SECONDS = 0.25  # between two looks at the raylets
RESPAWN_SECONDS = 120.0
SURVIVORS_SECONDS = 3.0  # those of a broken group say what they hold within this


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
        restart: bool = False,
    ) -> None:
        """``restart``: when a rank of a node comes or goes, all its other processes are replaced as well."""
        self.known: dict[NodeKey, Node] = {}
        self._loop = loop
        self._cluster = cluster
        self._inbox = inbox
        self._log = log
        self._store = store
        self._post = post
        self._lease_seconds = lease_seconds
        self._restart = restart

    def join(self, life: NodeLife, scheduler: Any, actors: Iterable[Any]) -> None:
        places = {rank: Place(rank=rank, actor=actor) for rank, actor in enumerate(actors)}
        node = Node(life=life, scheduler=scheduler, places=places)
        node.regroup(0, [(rank,) for rank in places])
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

    def give_rank_notice(
        self, key: NodeKey, ranks: tuple[int, ...], seconds_left: float, source: str
    ) -> None:
        """Tell of a notice for some GPUs of a node; never before NodeJoined."""
        if key in self.known:
            node, incarnation = key
            self._post(
                RankNotice(
                    node=node, incarnation=incarnation, ranks=ranks, seconds_left=seconds_left, source=source
                )
            )

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
        cut = node.cut_by(place.rank)  # of now: their streams end, and are forgotten then
        if not await self._answers(node):
            self.lose(node.key, "killed")
            return
        LOG.warning("%s rank %d died: %r", node.life.node, place.rank, error)
        await self._tell_of_rank(node, place.rank, cut, "died", type(error).__name__)
        await asyncio.gather(self.respawn(node, place), self._restart_others(node, place))

    def release_rank(self, key: NodeKey, rank: int) -> None:
        """Let a rank's GPU go: its process ends, and the node's others go on."""
        node = self.known.get(key)
        place = None if node is None else node.places.get(rank)
        if node is not None and place is not None and place.actor is not None:
            self._loop.spawn(self._take(node, place, "revoked"))
            self._loop.spawn(self._restart_others(node, place))

    def return_rank(self, key: NodeKey, rank: int) -> None:
        """A GPU that was taken is back."""
        node = self.known.get(key)
        place = None if node is None else node.places.get(rank)
        if node is not None and place is not None and place.actor is None:
            self._loop.spawn(self.respawn(node, place))
            self._loop.spawn(self._restart_others(node, place))

    def _take(self, node: Node, place: Place, cause: RankCause) -> Coroutine[Any, Any, None]:
        """Take a rank's process off the books at once; what is returned ends it and tells of it."""
        actor, place.actor = place.actor, None
        place.last_lease = None
        cut = node.cut_by(place.rank)

        async def end() -> None:
            await asyncio.to_thread(ray.kill, actor)
            await self._tell_of_rank(node, place.rank, cut, cause, "")

        return end()

    async def _restart_others(self, node: Node, changed: Place) -> None:
        """What regrouping spares a node: new processes for the ranks beside one that comes or goes."""
        if not self._restart:
            return

        async def again(place: Place) -> None:
            if place.actor is not None:
                await self._take(node, place, "restarted")
                await self.respawn(node, place)

        await asyncio.gather(*(again(place) for place in node.places.values() if place is not changed))

    async def respawn(self, node: Node, place: Place) -> None:
        """Give a rank another process, and tell when it is there."""
        (name, incarnation), rank = node.key, place.rank
        place.last_lease = None
        try:
            respawning = node.scheduler.respawn.options(concurrency_group="boot").remote(rank)
            actor = await asyncio.wait_for(_answer(respawning), RESPAWN_SECONDS)
        except (RayError, TimeoutError) as failure:
            if self.known.get(node.key) is not node:
                return  # let go meanwhile
            LOG.warning("%s rank %d is not back: %s", name, rank, failure)
            self.lose(node.key, "killed")
            return
        if self.known.get(node.key) is node:
            place.actor = actor
            self._post(RankReady(node=name, incarnation=incarnation, rank=rank))
            self._loop.spawn(self._watch_actor(node, place, actor))

    async def _tell_of_rank(self, node: Node, rank: int, cut: Cut, cause: RankCause, error: str) -> None:
        """What the survivors of a rank hold, the last commits of what they do not, and then its loss."""
        survivors = [reader for readers in cut.values() for reader in readers]
        if survivors:
            await asyncio.wait(survivors, timeout=SURVIVORS_SECONDS)
        left = []
        for start in cut:
            held = node.held_by_survivors(start)
            if held is None:
                left.append(start)
            else:
                self.tell_held(start, held)
                node.end(start.lease)
        await self._tell_last_commits(node, left)
        for start in left:
            node.end(start.lease)
        name, incarnation = node.key
        self._post(RankLost(node=name, incarnation=incarnation, rank=rank, cause=cause, error=error))

    def tell_held(self, start: Start, held: HeldState) -> None:
        """A lease is let go of, and ranks of its group hold its state."""
        self._post(
            Committed(
                lease=start.lease,
                request=start.request.id,
                next_denoise_step=held.next_denoise_step,
                ref=f"{HELD}{start.lease}",
                digest=held.digest,
                released=True,
                held=True,
            )
        )

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
            for told in news:
                if isinstance(told, RanksBack):
                    for rank in told.ranks:
                        self.return_rank(node.key, rank)
                elif told.ranks:
                    self.give_rank_notice(node.key, told.ranks, told.seconds_left, told.source)
                else:
                    self.give_notice(node.key, told.seconds_left, told.source)

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
