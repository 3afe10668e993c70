"""StoreKeeper: the Tensor Store as an actor on the head, apart from the coordinator and from all nodes.

Nothing that it acknowledged is only in its memory: another one on the same url goes on where a killed
one ended.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spotlight_core.errors import SpotlightError
from spotlight_core.tensor_store import StoreUsage, TensorStore

LOCKS = 64
KEPT_COMMITS = 2  # a lease that is over makes one more at most: what the next resumes from must stay


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCommit:
    """The last acknowledged commit of a request."""

    next_denoise_step: int
    ref: str
    digest: str


class StoreKeeper:
    """See the module's text.  Its calls come from many threads."""

    def __init__(self, url: str, memory_bytes: int, fenced: Iterable[str] = ()) -> None:
        """``fenced``: leases that a former keeper refused.

        Raises:
            SpotlightError: the store cannot be opened.
        """
        self._store = TensorStore.open(url, memory_bytes, KEPT_COMMITS)
        self._fenced = set(fenced)
        self._locks = [threading.Lock() for _ in range(LOCKS)]

    def ready(self) -> None:
        """Answering says that the store is open."""

    def until_stopped(self) -> None:
        """Never answers: who waits for it learns of the actor's death at once."""
        threading.Event().wait()

    def put(self, lease: str, request: str, next_denoise_step: int, payload: bytes) -> tuple[str, str]:
        """Make a commit durable; returns ``(ref, digest)``.

        Raises:
            SpotlightError: damaged bytes, a full disk, or a lease that is over.
        """
        with self._lock(request):
            if lease in self._fenced:
                raise SpotlightError(f"lease {lease} is over", "its request goes on elsewhere")
            return self._store.put(request, next_denoise_step, payload)

    def get(self, ref: str, digest: str) -> bytes:
        """What ``put`` called so; SpotlightError when it is missing, damaged or another."""
        return self._store.get(ref, digest)

    def fence(self, leases: Mapping[str, str]) -> dict[str, NewestCommit]:
        """Refuse all further commits of lost ``leases`` (request by lease), and tell the last ones made.

        A commit may be acknowledged here and its word be lost with the node that made it.
        """
        found: dict[str, NewestCommit] = {}
        for lease, request in leases.items():
            with self._lock(request):
                self._fenced.add(lease)
                newest = self._store.newest(request)
            if newest is not None:
                step, ref, digest = newest
                found[lease] = NewestCommit(next_denoise_step=step, ref=ref, digest=digest)
        return found

    def discard(self, requests: Sequence[str], running: Sequence[str] = ()) -> None:
        """Forget every commit of these requests, and refuse further ones of their ``running`` leases."""
        self._fenced.update(running)
        for request in requests:
            with self._lock(request):
                self._store.discard(request)

    def forget_before(self, iteration: int) -> None:
        """Forget what came too late to be discarded with its request."""
        self._store.forget_before(iteration)

    def usage(self) -> StoreUsage:
        """The store's own record of what it holds."""
        return self._store.usage()

    def _lock(self, request: str) -> threading.Lock:
        return self._locks[hash(request) % LOCKS]
