"""Requests under way, as the event loop that waits for them sees them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from spotlight_core.errors import FleetError, SpotlightError
from spotlight_core.events import Settle
from spotlight_core.types import GenerationRequest


class Listener(Protocol):
    """Hears how each request of a submission ends, from another thread."""

    def deliver(self, settled: Settle | SpotlightError) -> None:
        """One request's end, or the error after which nothing more will come."""
        ...


class Submission:
    """Requests under way; iterate to get each ``(request, ref)`` as it is done."""

    def __init__(self, requests: Sequence[GenerationRequest], loop: asyncio.AbstractEventLoop) -> None:
        self.requests = {request.id: request for request in requests}
        self._loop = loop
        self._settled: asyncio.Queue[Settle | SpotlightError] = asyncio.Queue()

    def deliver(self, settled: Settle | SpotlightError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            self._loop.call_soon_threadsafe(self._settled.put_nowait, settled)

    async def results(self, allow_cancelled: bool = False) -> AsyncIterator[tuple[GenerationRequest, str]]:
        """Each done request with the ref of its result, in order of completion.

        Raises:
            FleetError: a request was aborted, or cancelled (unless ``allow_cancelled``), or the coordinator
                stopped.
        """
        for _ in range(len(self.requests)):
            settled = await self._settled.get()
            if isinstance(settled, SpotlightError):
                raise settled
            if settled.outcome == "done" and settled.ref is not None:
                yield self.requests[settled.request], settled.ref
            elif settled.outcome == "aborted" or not allow_cancelled:
                raise FleetError(f"request {settled.request} was given up", settled.detail)
