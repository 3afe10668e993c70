"""Finished arrays on their way from an executor to the phase that asked for them."""

import threading

from spotlight_core.arrays import Arrays, from_bytes


class Results:
    """Finished results by ref (the lease's name), as safetensors bytes, until somebody takes them.

    By lease, since a request that was cancelled may be submitted again, with other weights, while its
    former life is still computed.  Only what a lease of an unsettled request gives is kept, and once
    the request is settled only the result that it was settled with.

    Bytes, since that is how they come and how they go on: the coordinator never looks into one.
    """

    def __init__(self) -> None:
        self._payloads: dict[str, bytes] = {}
        self._open: dict[str, set[str]] = {}  # unsettled requests: leases that run or have a result here
        self._lock = threading.Lock()

    def begin(self, request: str, ref: str) -> None:
        """A lease of the request begins: its result is wanted."""
        with self._lock:
            self._open.setdefault(request, set()).add(ref)

    def put(self, request: str, ref: str, payload: bytes) -> None:
        """Keep a lease's result; one that nobody waits for any more is dropped."""
        with self._lock:
            if ref in self._open.get(request, ()):
                self._payloads[ref] = payload

    def end(self, request: str, ref: str) -> None:
        """The lease is over: without a result here there will be none."""
        with self._lock:
            refs = self._open.get(request)
            if refs is not None and ref not in self._payloads:
                refs.discard(ref)
                if not refs:
                    del self._open[request]

    def settle(self, request: str, ref: str | None) -> None:
        """The request has the result ``ref``, or none: drop all others, those that are yet to come too."""
        with self._lock:
            for other in self._open.pop(request, set()):
                if other != ref:
                    self._payloads.pop(other, None)

    def payload(self, ref: str) -> bytes:
        """The result, which stays here: its reader may have to ask again.

        Raises:
            KeyError: there is no such result, or it was discarded.
        """
        with self._lock:
            return self._payloads[ref]

    def discard(self, ref: str) -> None:
        """Somebody has it; none is fine too."""
        with self._lock:
            self._payloads.pop(ref, None)

    def take(self, ref: str) -> Arrays:
        """The result, which is then the caller's.

        Raises:
            KeyError: there is no such result, or it was taken before.
        """
        with self._lock:
            return from_bytes(self._payloads.pop(ref))

    def bytes_held(self) -> int:
        """Memory that results take which nobody has taken yet."""
        with self._lock:
            return sum(map(len, self._payloads.values()))
