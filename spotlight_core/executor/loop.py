"""The executor's event loop in a thread of its own: what runs on it shares state without locks."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

LOG = logging.getLogger(__name__)

JOIN_SECONDS = 5.0

T = TypeVar("T")


class LoopThread:
    """Starts at once; ``close`` ends it, and calls after that are dropped."""

    def __init__(self, name: str) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call ``function`` on the loop, soon; from any thread, and never blocks."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait for its result, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run ``work`` beside the rest; on the loop only.  What it raises is logged."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Cancel what runs and end the thread; safe to call twice."""
        self.call(self._loop.stop)
        self._thread.join(timeout=JOIN_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("the executor failed", exc_info=task.exception())
