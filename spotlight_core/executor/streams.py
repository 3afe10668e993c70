"""One lease's stream of messages, from its DenoiseActor to the inbox."""

import asyncio
import logging
from collections.abc import Callable

from ray.exceptions import RayError, RayTaskError

from spotlight_core.arrays import payload_digest
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Committed, Event, Failed, Fault, Finished, Start, Started
from spotlight_core.executor.messages import (
    Began,
    CommittedState,
    Dropped,
    FinishedResult,
    Message,
    Noticed,
    UnstoredState,
)
from spotlight_core.executor.nodes import Node, Nodes, Place
from spotlight_core.executor.results import Results
from spotlight_core.executor.store import KeptStore

LOG = logging.getLogger(__name__)


class Streams:
    """Runs leases on their groups; all on the executor's loop."""

    def __init__(
        self, *, nodes: Nodes, results: Results, store: KeptStore, post: Callable[[Event], None]
    ) -> None:
        self._nodes = nodes
        self._results = results
        self._store = store
        self._post = post
        self._ends: dict[str, asyncio.Event] = {}  # of leases under way

    async def run(self, start: Start, node: Node, place: Place, after: str | None) -> None:
        """One lease, ``after`` the group's one before, from its first message to its end."""
        actor = place.actor
        end = self._ends[start.lease] = asyncio.Event()
        try:
            generate = actor.generate.options(num_returns="streaming", concurrency_group="denoise")
            ended = False
            async for message in generate.remote(start, after):
                received: Message = await message
                # Its result may still be on the way when the next request begins: told in their order.
                before = self._ends.get(after or "")
                if before is not None:
                    await before.wait()
                ended = _ends(received)
                if ended:  # before it is told: a node that is let go at it has nothing left to save
                    node.leases.pop(start.lease, None)
                await self._receive(start, node, received)
            if not ended:  # an abandoned lease says nothing more, and its group must not stay taken
                self._drop(start, "abandoned")
        except RayTaskError as error:
            self._failed(start, error.cause if isinstance(error.cause, Exception) else error)
        except RayError as error:
            await self._nodes.actor_failed(node, place, actor, error)
        except Exception as error:  # whatever it was, the lease must end
            self._failed(start, error)
        finally:
            node.leases.pop(start.lease, None)
            node.told.pop(start.lease, None)
            self._results.end(start.request.id, start.lease)
            del self._ends[start.lease]
            end.set()

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
    return isinstance(message, UnstoredState | FinishedResult | Dropped)
