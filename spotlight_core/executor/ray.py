"""RayExecutor: commands become calls of the nodes' actors, their streams become events.

    coordinator's thread ─ execute ─► this executor's event loop ─► actor calls
    inbox ◄─ Started, Committed, Finished, Failed, WeightsLoaded, Notice, Lost ─┘

The loop's thread alone knows which actor is which node, so there are no locks.  A node is lost once:
at the first failed call or dead raylet, without waiting for Ray, which takes many seconds to notice.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from spotlight_core.arrays import arrays_digest, from_bytes, to_bytes
from spotlight_core.errors import SpotlightError
from spotlight_core.events import (
    Abandon,
    Command,
    Committed,
    Failed,
    Finished,
    Load,
    Lost,
    NodeJoined,
    NodeKey,
    Notice,
    Release,
    Start,
    Started,
    WeightsLoaded,
    Yield,
)
from spotlight_core.executor.actors import (
    ActorSetup,
    Began,
    CommittedState,
    DenoiseActor,
    FinishedResult,
    Message,
    Noticed,
)
from spotlight_core.executor.cluster import RayCluster, node_resource
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.executor.results import Results
from spotlight_core.tensor_store import TensorStore

LOG = logging.getLogger(__name__)

CONTROL_SECONDS = 5.0  # a stop that takes longer than this is a node that does not answer
WATCH_SECONDS = 0.25  # between two looks at the raylets


def create_actor(setup: ActorSetup, epoch: int) -> Any:
    """Start the node's actor; it answers ``started_at`` once its model is built."""
    remote = ray.remote(concurrency_groups={"denoise": 1, "control": 4})(DenoiseActor)
    actor = remote.options(
        name=f"{setup.node}-{setup.incarnation}-epoch-{epoch}",
        num_cpus=0,
        num_gpus=0 if setup.gpu is None else 1,
        resources={node_resource(setup.node, setup.incarnation): 1},
        max_restarts=0,
        max_task_retries=0,
    )
    return actor.remote(setup)


@dataclass(slots=True, kw_only=True)
class _Node:
    life: NodeLife
    actor: Any
    leases: dict[str, Start] = field(default_factory=dict)


class RayExecutor:
    """See the module's text."""

    def __init__(
        self, *, cluster: RayCluster, inbox: Inbox, tensor_store: TensorStore, node_log: NodeLog
    ) -> None:
        self.results = Results()
        self._cluster = cluster
        self._inbox = inbox
        self._store = tensor_store
        self._log = node_log
        self._nodes: dict[NodeKey, _Node] = {}
        self._commits: dict[str, str] = {}  # ref -> digest
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ray-executor", daemon=True)
        self._thread.start()

    # -- from any thread ------------------------------------------------------------------------------

    def execute(self, command: Command) -> None:
        """Hand a command to the loop; never blocks, failures come back as events."""
        self._call(self._dispatch, command)

    def join(self, life: NodeLife, actor: Any) -> None:
        """A node is ready: tell the inbox, and send it what comes for it from now on."""
        self._call(self._join, life, actor)

    def give_notice(self, node: str, incarnation: int, seconds_left: float) -> None:
        """Tell the inbox that a node will be taken back, unless it is gone: never before its NodeJoined."""
        self._call(self._give_notice, (node, incarnation), seconds_left)

    def lose(self, node: str, incarnation: int, cause: str) -> None:
        """Take a node for lost, and end it."""
        self._call(self._lose, (node, incarnation), cause)

    def nodes(self) -> list[NodeKey]:
        """The nodes that are there, by name."""
        return sorted(self._nodes)

    def shut_down(self) -> None:
        """Stop every actor and post each node's Lost; returns when all of it is in the inbox."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()

    def close(self) -> None:
        """End the loop; commands that come later are dropped.  Safe to call twice."""
        self._call(self._loop.stop)
        self._thread.join(timeout=CONTROL_SECONDS)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # -- on the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._spawn(self._watch())
        try:
            self._loop.run_forever()
        finally:
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("the executor failed", exc_info=task.exception())

    def _dispatch(self, command: Command) -> None:
        key = _node_of(command)
        node = None if key is None else self._nodes.get(key)
        if node is None:
            # Its Lost is on the way to the decider, which sends the work elsewhere then.
            LOG.info("%s for a node that is gone", type(command).__name__)
            return
        match command:
            case Start():
                node.leases[command.lease] = command
                self._spawn(self._generate(command, node))
            case Yield():
                self._spawn(self._order(node, node.actor.yield_lease, command.lease))
            case Abandon():
                self._spawn(self._order(node, node.actor.abandon, command.lease))
            case Load():
                self._spawn(self._load(command, node))
            case Release():
                del self._nodes[command.node, command.incarnation]
                self._spawn(self._let_go(node, "released"))

    # -- requests -------------------------------------------------------------------------------------

    async def _generate(self, start: Start, node: _Node) -> None:
        """One lease: from the actor's stream to events."""
        try:
            state = await self._committed_state(start)
        except SpotlightError as error:  # whatever the commit is worth, the request can begin anew
            self._failed(start, error, commit_lost=True)
            node.leases.pop(start.lease, None)
            return
        try:
            stream = node.actor.generate.options(num_returns="streaming", concurrency_group="denoise")
            ended = False
            async for message in stream.remote(start, state):
                received: Message = await message
                await self._receive(start, node, received)
                ended = isinstance(received, FinishedResult) or (
                    isinstance(received, CommittedState) and received.released
                )
            if not ended:  # an abandoned lease says nothing more, and its group must not stay taken
                self._inbox.post(Failed(lease=start.lease, error="abandoned", retryable=True))
        except RayTaskError as error:
            self._failed(start, error.cause if isinstance(error.cause, Exception) else error)
        except RayError as error:
            self._unreachable(node, error)
        except Exception as error:  # whatever it was, the lease must end
            self._failed(start, error)
        finally:
            node.leases.pop(start.lease, None)

    async def _committed_state(self, start: Start) -> bytes | None:
        ref = start.state_ref
        if ref is None:
            return None
        return to_bytes(await asyncio.to_thread(self._store.get, ref, self._commits[ref]))

    async def _receive(self, start: Start, node: _Node, message: Message) -> None:
        lease, request = start.lease, start.request.id
        match message:
            case Began():
                self._inbox.post(Started(lease=lease))
            case Noticed():
                life = node.life
                self._inbox.post(
                    Notice(node=life.node, incarnation=life.incarnation, seconds_left=message.seconds_left)
                )
            case CommittedState():
                step = message.next_denoise_step
                arrays = from_bytes(message.payload)
                ref, digest = await asyncio.to_thread(self._store.put, request, step, arrays)
                self._commits[ref] = digest
                self._inbox.post(
                    Committed(
                        lease=lease,
                        request=request,
                        next_denoise_step=step,
                        ref=ref,
                        digest=digest,
                        released=message.released,
                    )
                )
            case FinishedResult():
                arrays = from_bytes(message.payload)
                digest = arrays_digest(arrays)
                if digest != message.digest:
                    raise RuntimeError(
                        f"the result of {request} was damaged on its way from {node.life.node}"
                    )
                self.results.put(request, arrays)
                self._inbox.post(Finished(lease=lease, request=request, ref=request, digest=digest))
                await asyncio.to_thread(self._store.discard, request)

    def _failed(self, start: Start, error: Exception, commit_lost: bool = False) -> None:
        LOG.warning("request %s failed on %s: %r", start.request.id, start.group.node, error)
        retryable = commit_lost or not isinstance(error, SpotlightError)
        said = str(error) or repr(error)
        self._inbox.post(Failed(lease=start.lease, error=said, retryable=retryable, commit_lost=commit_lost))

    async def _order(self, node: _Node, method: Any, lease: str) -> None:
        try:
            await method.options(concurrency_group="control").remote(lease)
        except RayError as error:
            self._unreachable(node, error)

    async def _load(self, load: Load, node: _Node) -> None:
        try:
            digest = await node.actor.load.options(concurrency_group="denoise").remote(load.policy)
        except RayTaskError as error:
            # No word says that a load failed: a digest that no weights have stops the run at once.
            LOG.error("%s cannot load %s: %s", load.group.node, load.policy.name, error.cause)
            digest = f"load failed: {error.cause}"
        except RayError as error:
            self._unreachable(node, error)
            return
        self._inbox.post(WeightsLoaded(group=load.group, policy=load.policy, digest=digest))

    # -- nodes ----------------------------------------------------------------------------------------

    def _join(self, life: NodeLife, actor: Any) -> None:
        self._nodes[life.node, life.incarnation] = _Node(life=life, actor=actor)
        self._inbox.post(
            NodeJoined(
                node=life.node,
                incarnation=life.incarnation,
                pool=life.pool,
                gpus=life.gpus,
                started_at=life.started_at,
            )
        )

    def _give_notice(self, key: NodeKey, seconds_left: float) -> None:
        if key in self._nodes:
            self._inbox.post(Notice(node=key[0], incarnation=key[1], seconds_left=seconds_left))

    def _unreachable(self, node: _Node, error: RayError) -> None:
        LOG.info("%s-%d does not answer: %s", node.life.node, node.life.incarnation, type(error).__name__)
        self._lose((node.life.node, node.life.incarnation), "killed")

    def _lose(self, key: NodeKey, cause: str) -> None:
        """Once for each node: stop record, Lost, and then make sure that it is true."""
        node = self._nodes.pop(key, None)
        if node is not None:
            self._post_lost(node, self._log.stop(node.life, self._inbox.clock.now(), "coordinator"), cause)
            self._spawn(asyncio.to_thread(self._cluster.kill_node, *key))

    async def _let_go(self, node: _Node, cause: str) -> None:
        """Stop the actor, which writes its own stop record, and end the node."""
        try:
            stopping = node.actor.stop.options(concurrency_group="control").remote()
            stopped_at = await asyncio.wait_for(_awaitable(stopping), CONTROL_SECONDS)
        except (RayError, TimeoutError):
            stopped_at = self._log.stop(node.life, self._inbox.clock.now(), "coordinator")
        self._post_lost(node, stopped_at, cause)
        await asyncio.to_thread(self._cluster.remove_node, node.life.node, node.life.incarnation)

    def _post_lost(self, node: _Node, stopped_at: float, cause: str) -> None:
        life = node.life
        self._inbox.post(
            Lost(node=life.node, incarnation=life.incarnation, cause=cause, stopped_at=stopped_at)
        )

    async def _watch(self) -> None:
        """An idle node is called by nobody, so its death would show at its next request only."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for key in list(self._nodes):
                if not self._cluster.alive(*key):
                    self._lose(key, "killed")

    async def _shut_down(self) -> None:
        nodes = list(self._nodes.values())
        self._nodes.clear()
        await asyncio.gather(*(self._let_go(node, "shutdown") for node in nodes))


async def _awaitable(reference: Any) -> Any:
    return await reference


def _node_of(command: Command) -> NodeKey | None:
    match command:
        case Start() | Yield() | Abandon() | Load():
            return command.group.node, command.group.generation
        case Release():
            return command.node, command.incarnation
        case _:
            return None
