"""The Tensor Store: in-flight latents, durable on the reserved side, so that they outlive a spot node.

One safetensors payload a commit, named after its request and denoise step and known by the digest of
what it holds.  fp32 stays fp32, since a rounded latent would end the promise that a resumed request
gives the very bits of an uninterrupted one.

A commit is acknowledged when its storage has it; the memory beside it only saves reading it back.  A
request's older commits leave after a newer one is durable, so that a writer killed in between leaves
one too many and never one too few.  One process at a time keeps the store of a run.
"""

import hashlib
import logging
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from spotlight_core.arrays import SafetensorError, payload_digest
from spotlight_core.errors import SpotlightError
from spotlight_core.storage import Storage, open_storage
from spotlight_core.store_memory import StoreMemory

_REF = re.compile(r"(([0-9]+|x)-[0-9a-f]{32})-([0-9]+)\.safetensors")
_RECOMPUTE = "the request has to be computed again from its noise"
_LOCKS = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """``commits`` and ``durable_bytes`` are on storage; ``memory_bytes`` are copies of some of them."""

    commits: int
    memory_bytes: int
    durable_bytes: int


class TensorStore:
    """The commits of one run; every method may be called from several threads."""

    def __init__(self, storage: Storage, memory_bytes: int, kept_commits: int = 1) -> None:
        """Take over what ``storage`` holds.

        ``kept_commits``: how many a request keeps, the newest ones.  With 1, a reader that still knows
        of the one before only will not find it.

        Raises:
            SpotlightError: the storage cannot be listed.
        """
        self._storage = storage
        self._kept_commits = kept_commits
        self._memory = StoreMemory(memory_bytes)
        self._lock = threading.Lock()  # of memory and sizes, never held while storage works
        # Of the requests that share a remainder: what one of them writes and removes stays in order.
        self._request_locks = [threading.Lock() for _ in range(_LOCKS)]
        self._sizes: dict[str, dict[int, int]] = {}  # request key -> denoise step -> bytes
        self._digests: dict[str, str] = {}  # by ref, of what this process wrote or has read for ``newest``
        storage.sweep()
        self._look()

    @classmethod
    def open(cls, url: str, memory_bytes: int, kept_commits: int = 1) -> "TensorStore":
        """The store at a folder, ``s3://`` or ``gs://`` address, with every commit acknowledged there before.

        Raises:
            BadInputError: the address cannot be used.
            SpotlightError: what is there cannot be opened.
        """
        return cls(open_storage(url), memory_bytes, kept_commits)

    def put(self, request_id: str, next_denoise_step: int, payload: bytes) -> tuple[str, str]:
        """Keep safetensors bytes durably; returns ``(ref, digest)``.  The same commit again replaces it.

        Raises:
            SpotlightError: the bytes are damaged, or the storage did not take them.  What was committed
                before is still there.
        """
        try:
            digest = payload_digest(payload)
        except SafetensorError as error:
            raise SpotlightError(
                f"the commit of {request_id} at denoise step {next_denoise_step} arrived damaged ({error})",
                "commit it again",
            ) from error
        key = _key(request_id)
        ref = _ref(key, next_denoise_step)
        with self._request_lock(key):
            with self._lock:
                # From here on the storage may hold the one or the other.
                self._memory.drop(ref)
                self._digests.pop(ref, None)
            self._storage.write(ref, payload)
            with self._lock:
                steps = self._sizes.setdefault(key, {})
                steps[next_denoise_step] = len(payload)
                self._digests[ref] = digest
                # Higher steps stay: a node taken for lost may be late with one that is no longer the last.
                older = sorted(step for step in steps if step < next_denoise_step)
                leaving = older[: max(0, len(older) - self._kept_commits + 1)]
                for step in leaving:  # first, or the newer one would drive out another request's
                    self._memory.drop(_ref(key, step))
                self._memory.put(ref, digest, payload)
            self._remove(key, leaving)
        return ref, digest

    def get(self, ref: str, digest: str) -> bytes:
        """The payload that ``put`` named ``ref``.

        Raises:
            SpotlightError: the commit is missing, damaged, or holds another state than ``digest``.
        """
        if not _REF.fullmatch(ref):
            raise SpotlightError(f"{ref!r} does not name a commit", _RECOMPUTE)
        with self._lock:
            payload = self._memory.get(ref, digest)
        if payload is not None:
            return payload
        payload = self._storage.read(ref)
        try:
            found = payload_digest(payload)
        except SafetensorError as error:
            raise SpotlightError(
                f"the commit {ref} in {self._storage.where} is damaged ({error})", _RECOMPUTE
            ) from error
        if found != digest:
            raise SpotlightError(
                f"the commit {ref} in {self._storage.where} holds {found[:12]} instead of {digest[:12]}",
                _RECOMPUTE,
            )
        return payload

    def newest(self, request_id: str) -> tuple[int, str, str] | None:
        """Denoise step, ref and digest of the request's commit with the highest step; None without any.

        One that cannot be read is passed over.
        """
        key = _key(request_id)
        with self._request_lock(key):
            with self._lock:
                steps = sorted(self._sizes.get(key, ()), reverse=True)
            for step in steps:
                ref = _ref(key, step)
                with self._lock:
                    digest = self._digests.get(ref)
                try:
                    digest = digest or payload_digest(self._storage.read(ref))
                except (SpotlightError, SafetensorError) as error:
                    log.warning("the commit %s is passed over: %s", ref, error)
                    continue
                with self._lock:
                    self._digests[ref] = digest
                return step, ref, digest
        return None

    def discard(self, request_id: str) -> None:
        """Forget every commit of a request; none is fine too."""
        self._discard(_key(request_id))

    def forget_before(self, iteration: int) -> None:
        """Forget the commits of earlier iterations, as the first part of a request's id says."""
        for key in self._keys():
            number = key.split("-", 1)[0]
            if number.isdecimal() and int(number) < iteration:
                self._discard(key)

    def clear(self) -> None:
        """Forget every commit, those of an upload that was said to fail and did not too."""
        self._look()
        for key in self._keys():
            self._discard(key)

    def usage(self) -> StoreUsage:
        """What is kept, as far as this process knows."""
        with self._lock:
            return StoreUsage(
                commits=sum(len(steps) for steps in self._sizes.values()),
                memory_bytes=self._memory.bytes,
                durable_bytes=sum(sum(steps.values()) for steps in self._sizes.values()),
            )

    def _look(self) -> None:
        """Learn what the storage holds."""
        found = self._storage.list()
        with self._lock:
            for name, size in found.items():
                known = _REF.fullmatch(name)
                if known is not None:
                    self._sizes.setdefault(known[1], {})[int(known[3])] = size

    def _discard(self, key: str) -> None:
        with self._request_lock(key):
            with self._lock:
                steps = list(self._sizes.get(key, ()))
            self._remove(key, steps)

    def _remove(self, key: str, steps: Iterable[int]) -> None:
        """What cannot be removed is tried again with the request's next commit: it costs space only."""
        for step in steps:
            ref = _ref(key, step)
            try:
                self._storage.delete(ref)
            except SpotlightError as error:
                log.warning("an old commit stays: %s", error)
                continue
            with self._lock:
                self._memory.drop(ref)
                self._digests.pop(ref, None)
                known = self._sizes[key]
                del known[step]
                if not known:
                    del self._sizes[key]

    def _keys(self) -> list[str]:
        with self._lock:
            return list(self._sizes)

    def _request_lock(self, key: str) -> threading.Lock:
        return self._request_locks[int(key[-8:], 16) % _LOCKS]


def _key(request_id: str) -> str:
    """A request's part of a ref: its iteration to forget it by, and a hash, since an id holds slashes and
    whatever a prompt's occurrence is called."""
    first, slash, _ = request_id.partition("/")
    iteration = str(int(first)) if slash and first.isascii() and first.isdecimal() else "x"
    return f"{iteration}-{hashlib.sha256(request_id.encode()).hexdigest()[:32]}"


def _ref(key: str, next_denoise_step: int) -> str:
    return f"{key}-{next_denoise_step}.safetensors"
