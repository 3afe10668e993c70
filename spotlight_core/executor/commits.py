"""Commits of one DenoiseActor: in the background while it denoises, and the last one when it lets go.

With ``commit_every_steps = n`` a commit begins every n // 2 steps, after the one before is
acknowledged: so at any moment the last acknowledged one is at most n steps back, and the denoise
thread waits for the store only when it takes longer than n // 2 steps.

A store that refuses or is away never fails a request: the commit is skipped, which is said once, and
the next one tries again.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from spotlight_core.arrays import Arrays, to_bytes
from spotlight_core.errors import SpotlightError
from spotlight_core.events import Start
from spotlight_core.executor.leases import Lease
from spotlight_core.executor.messages import CommittedState, Dropped, Message, UnstoredState

LOG = logging.getLogger(__name__)


class StoreAway(Exception):
    """The store's process does not answer; its commits are on disk, and it may be back soon."""


class CommitStore(Protocol):
    """The Tensor Store as an actor sees it; SpotlightError when it refuses, StoreAway without an answer."""

    def put(self, lease: str, request: str, next_denoise_step: int, payload: bytes) -> tuple[str, str]:
        """Returns ``(ref, digest)`` when the payload is durable."""
        ...

    def get(self, ref: str, digest: str) -> bytes: ...


class Committer:
    """Makes the commits of one actor's leases; ``every_steps`` 0 commits only what lets go."""

    def __init__(self, store: CommitStore, every_steps: int) -> None:
        self._store = store
        self._every_steps = every_steps
        self._stride = max(1, every_steps // 2)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._troubled = False

    def of(self, start: Start, lease: Lease) -> "LeaseCommits":
        return LeaseCommits(self, start, lease)

    def due(self, denoise_step: int) -> bool:
        return self._every_steps > 0 and denoise_step % self._stride == 0

    @property
    def waits_for_each(self) -> bool:
        """With a bound of one step there is no time to look away."""
        return self._every_steps == 1

    def begin(self, work: Callable[[], None]) -> "Future[None]":
        return self._thread.submit(work)

    def put(self, start: Start, step: int, payload: bytes) -> CommittedState:
        ref, digest = self._store.put(start.lease, start.request.id, step, payload)
        self._troubled = False
        return CommittedState(next_denoise_step=step, ref=ref, digest=digest, released=False)

    def skipped(self, start: Start, step: int, error: Exception) -> None:
        level = logging.DEBUG if self._troubled else logging.WARNING
        self._troubled = True
        LOG.log(level, "no commit of %s before denoise step %d: %s", start.request.id, step, error)


class LeaseCommits:
    """The commits of one lease.  ``offer`` is for the denoise thread, the rest for one thread after it."""

    def __init__(self, committer: Committer, start: Start, lease: Lease) -> None:
        self._committer = committer
        self._start = start
        self._lease = lease
        self._pending: Future[None] | None = None

    def offer(self, denoise_step: int, make_state: Callable[[], Arrays]) -> None:
        """Begin a commit of the state before ``denoise_step`` when one is due."""
        if not self._committer.due(denoise_step):
            return
        self.settle()
        payload = to_bytes(make_state())
        self._pending = self._committer.begin(lambda: self._commit(denoise_step, payload))
        if self._committer.waits_for_each:
            self.settle()

    def settle(self) -> None:
        """Until the commit under way is acknowledged or skipped."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def last(self, denoise_step: int, state: Arrays) -> Message:
        """Commit what a lease leaves behind; what to tell of it."""
        payload = to_bytes(state)
        try:
            done = self._committer.put(self._start, denoise_step, payload)
        except StoreAway:
            return UnstoredState(next_denoise_step=denoise_step, payload=payload)
        except SpotlightError as error:
            self._committer.skipped(self._start, denoise_step, error)
            return Dropped(error=f"its state could not be committed: {error}")
        return CommittedState(next_denoise_step=denoise_step, ref=done.ref, digest=done.digest, released=True)

    def _commit(self, denoise_step: int, payload: bytes) -> None:
        try:
            self._lease.messages.put(self._committer.put(self._start, denoise_step, payload))
        except (StoreAway, SpotlightError) as error:
            self._committer.skipped(self._start, denoise_step, error)
