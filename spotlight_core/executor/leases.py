"""The leases of one DenoiseActor: their order, and what other threads want of each.

A lease is known before its request arrives, since an order may overtake it, and forgotten after its
end, when late orders are ignored.
"""

import queue
import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from spotlight_core.executor.messages import Message

REMEMBERED = 256  # ended leases, whose late orders are told from early ones
TURN_SECONDS = 10.0  # the request before arrives within this, or never


class Lease:
    """One lease: orders in, messages out (None ends them)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.yielding = False
        self.hold = False
        self.abandoned = False
        self.messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._work: tuple[Future[Any], ...] = ()
        self._changed = threading.Condition()

    @property
    def let_go(self) -> bool:
        return self.yielding or self.abandoned

    def give_up(self, hold: bool = False) -> None:
        """Commit at the next boundary, or ``hold`` the state in memory, and let go."""
        with self._changed:
            self.yielding, self.hold = True, hold
            self._changed.notify_all()

    def abandon(self) -> None:
        """Stop at the next boundary, or never begin."""
        with self._changed:
            self.abandoned = True
            work = self._work
            self._changed.notify_all()
        for part in work:
            part.cancel()

    def wait(self, seconds: float) -> None:
        """Until an order was given, ``seconds`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.let_go, timeout=seconds)

    def runs(self, work: "Future[Any]", state: "Future[Any]") -> None:
        """``work`` does this lease's denoising, from ``state``; its end is the end of the messages."""
        with self._changed:
            self._work = (work, state)
            abandoned = self.abandoned
        work.add_done_callback(lambda _: self.messages.put(None))
        if abandoned:
            self.abandon()


class Leases:
    """See the module's text."""

    def __init__(self) -> None:
        self._known: dict[str, Lease] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED)
        self._in_line: deque[str] = deque(maxlen=REMEMBERED)
        self._changed = threading.Condition()

    def get(self, name: str) -> Lease | None:
        """The lease, made when it is not known yet; None after its end."""
        with self._changed:
            if name in self._ended:
                return None
            return self._known.setdefault(name, Lease(name))

    def wait_behind(self, after: str | None) -> None:
        """Until the lease ``after`` has its place: two calls may arrive in either order."""
        if after is None:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: after in self._in_line or after in self._ended, timeout=TURN_SECONDS
            )

    def lined_up(self, lease: Lease) -> None:
        """The lease has its place in the denoise thread's line."""
        with self._changed:
            self._in_line.append(lease.name)
            self._changed.notify_all()

    def end(self, lease: Lease) -> None:
        with self._changed:
            self._known.pop(lease.name, None)
            self._ended.append(lease.name)
            self._changed.notify_all()
