"""The coordinator's one inbox: where every event of a live run is stamped, in arrival order."""

import heapq
import threading
import time
from collections import deque
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
        self._waiting: deque[Event | None] = deque()
        self._timers: list[tuple[float, int, str]] = []
        self._timers_set = 0
        self._news = threading.Condition()
        self._seq = 0

    def post(self, event: Event) -> None:
        """Hand in an unstamped event; never blocks."""
        self._put(event)

    def close(self) -> None:
        """End ``events`` after what is already in."""
        self._put(None)

    def set_timer(self, name: str, at: float) -> None:
        """A ``Timer`` event at or soon after ``at``; those of one moment come in the order they were set."""
        with self._news:
            self._timers_set += 1
            heapq.heappush(self._timers, (at, self._timers_set, name))
            self._news.notify()

    def events(self) -> Iterator[Event]:
        """Stamped events until ``close``; blocks while there is none.  For one thread."""
        while True:
            event = self._next()
            if event is None:
                return
            self._seq += 1
            yield event.stamped(self.clock.now(), self._seq, self.epoch)

    def _put(self, event: Event | None) -> None:
        with self._news:
            self._waiting.append(event)
            self._news.notify()

    def _next(self) -> Event | None:
        with self._news:
            while True:
                self._ring()
                if self._waiting:
                    return self._waiting.popleft()
                self._news.wait(self._timers[0][0] - self.clock.now() if self._timers else None)

    def _ring(self) -> None:
        """Due timers go behind what has arrived.

        Not before it: the sign of life that a lease's timer waits for may be in already.  And not when
        nothing else is there: a busy inbox would never ring.
        """
        while self._timers and self._timers[0][0] <= self.clock.now():
            self._waiting.append(Timer(id=heapq.heappop(self._timers)[2]))


Post = Callable[[Event], None]
