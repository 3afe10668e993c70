"""Virtual time: a calendar, things that will happen, and coroutines that wait for them.

The same ``async`` code that runs under asyncio on a real fleet runs here: what it awaits is an
``Occasion``, and time jumps from one calendar entry to the next (heap key: time, then order of entry).
"""

import heapq
from collections.abc import Callable, Coroutine, Generator
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Entry = tuple[float, int, Any]


class Calendar:
    """What happens when.  ``now`` only moves forward."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Entry] = []
        self._order = count()
        self._removed: set[int] = set()

    def add(self, at: float, what: Any) -> Entry:
        """Put ``what`` at ``at`` (not before now); the entry can be removed until it is due."""
        entry = (max(at, self.now), next(self._order), what)
        heapq.heappush(self._heap, entry)
        return entry

    def remove(self, entry: Entry) -> None:
        """Take an entry off; one that is already past is left alone."""
        if entry[0] >= self.now:
            self._removed.add(entry[1])  # skipped when due: taking it out of the heap would cost its size

    def pop(self) -> Any | None:
        """Move to the next entry and return what it holds; None when nothing is left."""
        while self._heap:
            at, order, what = heapq.heappop(self._heap)
            if order in self._removed:
                self._removed.discard(order)
                continue
            self.now = at
            return what
        return None


class Occasion(Generic[T]):
    """Something that will have happened; await it for its value."""

    def __init__(self) -> None:
        self.done = False
        self._value: Any = None
        self._callbacks: list[Callable[[], None]] = []

    def succeed(self, value: T) -> None:
        if self.done:
            raise RuntimeError("an occasion happens once")
        self.done, self._value = True, value
        for callback in self._callbacks:
            callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Call back once it has happened, at once if it has."""
        if self.done:
            callback()
        else:
            self._callbacks.append(callback)

    @property
    def value(self) -> T:
        if not self.done:
            raise RuntimeError("not yet")
        return self._value

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done:
            yield self
        return self.value


class Process(Occasion[T]):
    """A coroutine that runs in virtual time; itself an occasion that happens when it returns."""

    def __init__(self, coroutine: Coroutine[Any, None, T]) -> None:
        super().__init__()
        self._coroutine = coroutine
        self._advance()

    def _advance(self) -> None:
        try:
            awaited: Occasion[Any] = self._coroutine.send(None)
        except StopIteration as stop:
            self.succeed(stop.value)
        else:
            awaited.then(self._advance)
