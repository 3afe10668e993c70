"""The coordinator's one inbox: where every event of a live run is stamped, in arrival order."""

import queue
import time
from collections.abc import Callable, Iterator

from spotlight_core.events import Event, Timer


class Clock:
    """Wall-clock seconds that never run backwards: anchored once, advanced by the monotonic clock."""

    def __init__(self) -> None:
        self._anchor = time.time() - time.monotonic()

    def now(self) -> float:
        return self._anchor + time.monotonic()


class Inbox:
    """Events from any thread, out in one order with ``(at, seq, epoch)`` on them."""

    def __init__(self, epoch: int, clock: Clock | None = None) -> None:
        self.epoch = epoch
        self.clock = clock or Clock()
        self._queue: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._timers: list[tuple[float, str]] = []
        self._seq = 0

    def post(self, event: Event) -> None:
        """Hand in an unstamped event; never blocks."""
        self._queue.put(event)

    def close(self) -> None:
        """End ``events`` after what is already in."""
        self._queue.put(None)

    def set_timer(self, name: str, at: float) -> None:
        """A ``Timer`` event at or soon after ``at``.  Call it from the thread that reads ``events``."""
        self._timers.append((at, name))
        self._timers.sort()

    def events(self) -> Iterator[Event]:
        """Stamped events until ``close``; blocks while there is none."""
        while True:
            event = self._next()
            if event is None:
                return
            self._seq += 1
            yield event.stamped(self.clock.now(), self._seq, self.epoch)

    def _next(self) -> Event | None:
        while True:
            wait = max(0.0, self._timers[0][0] - self.clock.now()) if self._timers else None
            try:
                return self._queue.get(timeout=wait)
            except queue.Empty:
                if self._timers and self._timers[0][0] <= self.clock.now():
                    return Timer(id=self._timers.pop(0)[1])


Post = Callable[[Event], None]
