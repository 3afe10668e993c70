"""RayExecutor: commands become calls of the nodes' actors, their streams become events.

    coordinator's thread ─ execute ─► this executor's event loop ─► actor calls
    inbox ◄─ Started, Committed, Finished, Failed, WeightsLoaded, Notice, Lost … ─┘

The loop's thread alone knows which actor is which node, so there are no locks: ``streams`` follows
the leases, ``nodes`` the nodes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from ray.exceptions import RayError, RayTaskError

from spotlight_core.config import FleetConfig, RunConfig
from spotlight_core.events import (
    Abandon,
    Acquire,
    Asleep,
    Command,
    Drain,
    Event,
    Load,
    LoadFailed,
    NodeKey,
    Regroup,
    Regrouped,
    Release,
    ReleaseRank,
    Settle,
    Sleep,
    Start,
    WeightsLoaded,
    Yield,
)
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.loop import LoopThread
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.executor.nodes import Nodes
from spotlight_core.executor.places import Node, Place
from spotlight_core.executor.results import Results
from spotlight_core.executor.store import KeptStore
from spotlight_core.executor.streams import Streams

LOG = logging.getLogger(__name__)


class RayExecutor:
    """See the module's text.  Who runs the fleet hears of ``Acquire`` and of events through ``attach``."""

    def __init__(
        self, *, cluster: RayCluster, inbox: Inbox, store_url: str, node_log: NodeLog, config: RunConfig
    ) -> None:
        self.results = Results()
        self._inbox = inbox
        self._fleet: FleetConfig = config.fleet
        self._acquire: Callable[[Acquire], None] = lambda command: None
        self._observe: Callable[[Event], None] = lambda event: None
        self._loop = LoopThread("ray-executor")
        self.store = KeptStore(
            loop=self._loop,
            url=store_url,
            memory_bytes=int(config.fleet.store.memory_mib * 2**20),
            epoch=inbox.epoch,
        )
        self._nodes = Nodes(
            loop=self._loop,
            cluster=cluster,
            inbox=inbox,
            log=node_log,
            store=self.store,
            post=self._post,
            lease_seconds=config.fleet.node_lease_seconds,
            restart=config.elastic.on_change == "restart",
        )
        self._streams = Streams(
            loop=self._loop, nodes=self._nodes, results=self.results, store=self.store, post=self._post
        )
        self._loop.call(lambda: self._loop.spawn(self._nodes.watch_raylets()))

    # -- from any thread ------------------------------------------------------------------------------

    def attach(self, acquire: Callable[[Acquire], None], observe: Callable[[Event], None]) -> None:
        """``acquire`` gets each Acquire and must not block; ``observe`` each event after it was posted."""
        self._acquire, self._observe = acquire, observe

    def execute(self, command: Command) -> None:
        """Hand a command to the loop; never blocks, failures come back as events."""
        self._loop.call(self._dispatch, command)

    def join(self, life: NodeLife, scheduler: Any, actors: Iterable[Any]) -> None:
        """A node is ready: tell the inbox, and send it what comes for it from now on."""
        self._loop.call(self._nodes.join, life, scheduler, list(actors))

    def give_notice(self, node: str, incarnation: int, seconds_left: float, source: str = "trace") -> None:
        """Tell the inbox that a node will be taken back, unless it is gone: never before its NodeJoined."""
        self._loop.call(self._nodes.give_notice, (node, incarnation), seconds_left, source)

    def lose(self, node: str, incarnation: int, cause: str) -> None:
        """Take a node for lost, and end it."""
        self._loop.call(self._nodes.lose, (node, incarnation), cause)

    def give_rank_notice(
        self, node: str, incarnation: int, ranks: tuple[int, ...], seconds_left: float
    ) -> None:
        """Tell the inbox that some GPUs of a node will be taken back, unless it is gone."""
        self._loop.call(self._nodes.give_rank_notice, (node, incarnation), ranks, seconds_left, "trace")

    def return_rank(self, node: str, incarnation: int, rank: int) -> None:
        """A GPU that was taken from a node is back: it gets a process, and then takes part again."""
        self._loop.call(self._nodes.return_rank, (node, incarnation), rank)

    def nodes(self) -> list[NodeKey]:
        """The nodes that are there, by name."""
        return sorted(self._nodes.known)

    def shut_down(self) -> None:
        """Stop every actor and post each node's Lost; returns when all of it is in the inbox."""
        self.store.close()
        if self._loop.running:
            self._loop.wait_for(self._nodes.shut_down())

    def close(self) -> None:
        """End the loop; commands that come later are dropped.  Safe to call twice."""
        self.store.close()
        self._loop.close()

    # -- on the loop ----------------------------------------------------------------------------------

    def _post(self, event: Event) -> None:
        self._inbox.post(event)
        self._observe(event)

    def _dispatch(self, command: Command) -> None:
        match command:
            case Acquire():
                self._acquire(command)
            case Settle():
                self.results.settle(command.request, command.ref if command.outcome == "done" else None)
                self.store.discard(command.request, self._nodes.leases_of(command.request))
            case Release():
                self._nodes.release((command.node, command.incarnation))
            case Drain():
                key = command.node, command.incarnation
                self._nodes.give_notice(key, self._fleet.grace_seconds, "fleet")
            case Regroup():
                self._regroup(command)
            case ReleaseRank():
                self._nodes.release_rank((command.node, command.incarnation), command.rank)
            case Sleep():
                self._loop.spawn(self._sleep((command.node, command.incarnation)))
            case Start() | Yield() | Abandon() | Load():
                self._to_group(command)
            case _:
                LOG.error("%s is not for an executor", type(command).__name__)

    def _to_group(self, command: Start | Yield | Abandon | Load) -> None:
        node = self._nodes.known.get((command.group.node, command.group.incarnation))
        members = [] if node is None else node.members(command.group)
        if node is None or not members:
            # Its Lost or RankLost is on the way to the decider, which sends the work elsewhere then.
            LOG.info("%s for a group that is gone", type(command).__name__)
            return
        match command:
            case Start():
                node.leases[command.lease] = command
                self.results.begin(command.request.id, command.lease)
                leader = members[0]
                after, leader.last_lease = leader.last_lease, command.lease
                self._streams.begin(command, node, members, after)
            case Yield():
                self._loop.spawn(self._order(node, members[0], "yield_lease", command.lease, command.hold))
            case Abandon():
                self._loop.spawn(self._order(node, members[0], "abandon", command.lease))
            case Load():
                self._loop.spawn(self._load(command, node, members))

    def _regroup(self, command: Regroup) -> None:
        """Nothing is asked of the ranks: a group is its ranks and a number, which come with each start."""
        node = self._nodes.known.get((command.node, command.incarnation))
        if node is None:
            return
        node.regroup(command.generation, command.groups)
        self._post(
            Regrouped(
                node=command.node,
                incarnation=command.incarnation,
                generation=command.generation,
                groups=command.groups,
            )
        )

    async def _sleep(self, key: NodeKey) -> None:
        """Answered for whoever is gone by then as well: it has nothing on its GPU."""
        node = self._nodes.known.get(key)
        if node is not None:
            there = [place for place in node.places.values() if place.actor is not None]
            await asyncio.gather(*(self._order(node, place, "sleep") for place in there))
            self._post(Asleep(node=key[0], incarnation=key[1]))

    async def _order(self, node: Node, place: Place, method: str, *arguments: Any) -> None:
        actor = place.actor
        try:
            await getattr(actor, method).options(concurrency_group="control").remote(*arguments)
        except RayError as error:
            await self._nodes.actor_failed(node, place, actor, error)

    async def _load(self, load: Load, node: Node, members: list[Place]) -> None:
        """Each rank loads and says what it holds; one that holds something else speaks for the group."""
        answers = await asyncio.gather(*(self._load_one(load, node, place) for place in members))
        if any(answer is None for answer in answers):
            return  # its RankLost or Lost is told
        errors = [answer for answer in answers if isinstance(answer, RayTaskError)]
        if errors:
            cause = errors[0].cause
            said = str(cause) if isinstance(cause, Exception) else str(errors[0])
            LOG.warning("%s cannot load %s: %s", load.group.node, load.policy.name, said)
            self._post(LoadFailed(group=load.group, policy=load.policy, error=said))
            return
        digests = sorted(map(str, answers), key=lambda digest: digest == load.policy.digest)
        self._post(WeightsLoaded(group=load.group, policy=load.policy, digest=digests[0]))

    async def _load_one(self, load: Load, node: Node, place: Place) -> "str | RayTaskError | None":
        actor = place.actor
        try:
            return str(await actor.load.options(concurrency_group="control").remote(load.policy))
        except RayTaskError as error:
            return error
        except RayError as error:
            await self._nodes.actor_failed(node, place, actor, error)
            return None
