"""One lease's stream of messages, from its DenoiseActor to the inbox."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from spotlight_core.arrays import payload_digest
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Committed, Event, Failed, Fault, Finished, Start, Started
from spotlight_core.executor.loop import LoopThread
from spotlight_core.executor.messages import (
    Began,
    CommittedState,
    Dropped,
    FinishedResult,
    HeldState,
    Message,
    Noticed,
    UnstoredState,
)
from spotlight_core.executor.nodes import Nodes
from spotlight_core.executor.places import Node, Place
from spotlight_core.executor.results import Results
from spotlight_core.executor.store import KeptStore

LOG = logging.getLogger(__name__)

LOSS_SECONDS = 8.0  # a hung rank is found, and its survivors heard, within this


class Streams:
    """Runs leases on their groups; all on the executor's loop."""

    def __init__(
        self,
        *,
        loop: LoopThread,
        nodes: Nodes,
        results: Results,
        store: KeptStore,
        post: Callable[[Event], None],
    ) -> None:
        self._loop = loop
        self._nodes = nodes
        self._results = results
        self._store = store
        self._post = post
        self._ends: dict[str, asyncio.Event] = {}  # of leases under way

    def begin(self, start: Start, node: Node, members: Sequence[Place], after: str | None) -> None:
        """Begin a lease on the ranks of its group, ``after`` the leader's one before."""
        leader = members[0]
        reader = self._loop.spawn(self._run(start, node, members, after))
        node.readers[start.lease] = {leader.rank: reader}

    async def _run(self, start: Start, node: Node, members: Sequence[Place], after: str | None) -> None:
        """The leader's stream, from its first message to its end."""
        place = members[0]
        actor = place.actor
        end = self._ends[start.lease] = asyncio.Event()
        broke = False
        try:
            generate = actor.generate.options(num_returns="streaming", concurrency_group="denoise")
            ended = False
            async for message in generate.remote(start, after):
                received: Message = await message
                ended = await self._take(start, node, members, after, received)
                broke = isinstance(received, HeldState) and received.broken
            if not ended:  # an abandoned lease says nothing more, and its group must not stay taken
                self._drop(start, "abandoned")
        except RayTaskError as error:
            self._failed(start, error.cause if isinstance(error.cause, Exception) else error)
        except RayError as error:
            await self._nodes.actor_failed(node, place, actor, error)
        except Exception as error:  # whatever it was, the lease must end
            self._failed(start, error)
        finally:
            node.told.pop(start.lease, None)
            if broke:  # it is over when the rank that is lost has been told
                self._loop.spawn(self._wait_for_loss(start, node, actor))
            else:
                node.end(start.lease)
            self._results.end(start.request.id, start.lease)
            del self._ends[start.lease]
            end.set()

    async def _wait_for_loss(self, start: Start, node: Node, actor: Any) -> None:
        """A group that broke lost a rank, of which there will be word.

        If not, its leader has to go: what broke cannot be used again, and a loss has it formed anew.
        """
        await asyncio.sleep(LOSS_SECONDS)
        if start.lease in node.leases:
            LOG.warning("group %s of %s broke, and has lost nobody", start.group.ranks, start.group.node)
            await asyncio.to_thread(ray.kill, actor)

    async def _take(
        self, start: Start, node: Node, members: Sequence[Place], after: str | None, message: Message
    ) -> bool:
        """One message of the leader; whether it is the last one."""
        if isinstance(message, Began) and len(node.readers[start.lease]) < len(members):
            # It waits for them now: they come when it has its turn, and what it goes on from.
            for other in members[1:]:
                reader = self._loop.spawn(self._take_part(start, node, other))
                node.readers[start.lease][other.rank] = reader
        # Its result may still be on the way when the next request begins: told in their order.
        before = self._ends.get(after or "")
        if before is not None:
            await before.wait()
        ended = _ends(message)
        broke = isinstance(message, HeldState) and message.broken
        if ended and not broke:  # before it is told: a node that is let go at it has nothing left to save
            node.leases.pop(start.lease, None)
        await self._receive(start, node, message)
        return ended

    async def _take_part(self, start: Start, node: Node, place: Place) -> None:
        """The stream of a rank that does not lead: it says what it holds when the group breaks."""
        actor = place.actor
        try:
            generate = actor.generate.options(num_returns="streaming", concurrency_group="denoise")
            async for message in generate.remote(start, None):
                received: Message = await message
                if isinstance(received, HeldState):
                    _holds(node, start, place.rank, received)
        except RayTaskError as error:  # what is wrong with the request, the leader tells
            LOG.info("request %s failed on rank %d too: %s", start.request.id, place.rank, error)
        except RayError as error:
            await self._nodes.actor_failed(node, place, actor, error)

    async def _receive(self, start: Start, node: Node, message: Message) -> None:
        match message:
            case Began():
                self._post(Started(lease=start.lease))
            case Noticed():
                self._nodes.give_notice(node.key, message.seconds_left, message.source)
            case CommittedState():
                self._store.holds(start.request.id)
                node.told[start.lease] = message.next_denoise_step
                self._committed(
                    start, message.next_denoise_step, (message.ref, message.digest), message.released
                )
            case HeldState(broken=True):
                _holds(node, start, start.group.ranks[0], message)
            case HeldState():
                self._nodes.tell_held(start, message)
            case UnstoredState():
                await self._store_for(start, message)
            case FinishedResult():
                await self._finished(start, node, message)
            case Dropped():
                self._drop(start, message.error, message.commit_lost)

    def _committed(self, start: Start, step: int, stored: tuple[str, str], released: bool) -> None:
        ref, digest = stored
        self._post(
            Committed(
                lease=start.lease,
                request=start.request.id,
                next_denoise_step=step,
                ref=ref,
                digest=digest,
                released=released,
            )
        )

    async def _store_for(self, start: Start, state: UnstoredState) -> None:
        """The store was away when the lease let go: commit what it left when the store is back."""
        try:
            stored = await self._store.put(
                start.lease, start.request.id, state.next_denoise_step, state.payload
            )
        except SpotlightError as error:
            self._drop(start, f"its state could not be committed: {error}")
        else:
            self._store.holds(start.request.id)
            self._committed(start, state.next_denoise_step, stored, released=True)

    async def _finished(self, start: Start, node: Node, result: FinishedResult) -> None:
        request = start.request.id
        digest = await asyncio.to_thread(payload_digest, result.payload)
        if digest != result.digest:
            raise RuntimeError(f"the result of {request} was damaged on its way from {node.life.node}")
        self._results.put(request, start.lease, result.payload)
        self._post(Finished(lease=start.lease, request=request, ref=start.lease, digest=digest))

    def _failed(self, start: Start, error: Exception) -> None:
        LOG.warning("request %s failed on %s: %r", start.request.id, start.group.node, error)
        fault: Fault = "request" if isinstance(error, SpotlightError) else "node"
        self._post(Failed(lease=start.lease, error=str(error) or repr(error), fault=fault))

    def _drop(self, start: Start, error: str, commit_lost: bool = False) -> None:
        LOG.info("request %s left %s: %s", start.request.id, start.group.node, error)
        self._post(Failed(lease=start.lease, error=error, fault="nobody", commit_lost=commit_lost))


def _ends(message: Message) -> bool:
    if isinstance(message, CommittedState):
        return message.released
    return isinstance(message, HeldState | UnstoredState | FinishedResult | Dropped)


def _holds(node: Node, start: Start, rank: int, state: HeldState) -> None:
    """What the survivors of a broken group hold is told with the rank that is lost."""
    if state.digest:
        node.held.setdefault(start.lease, {})[rank] = state
