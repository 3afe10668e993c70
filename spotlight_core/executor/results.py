"""Finished arrays on their way from an executor to the phase that asked for them."""

import threading

from spotlight_core.arrays import Arrays, from_bytes


class Results:
    """Finished results by ref (the request's id), as safetensors bytes, until somebody takes them.

    Bytes, since that is how they come and how they go on: the coordinator never looks into one.
    """

    def __init__(self) -> None:
        self._payloads: dict[str, bytes] = {}
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def put(self, ref: str, payload: bytes) -> None:
        """Keep the first result of a request; a second one, even after the first was taken, is dropped."""
        with self._lock:
            if ref not in self._known:
                self._known.add(ref)
                self._payloads[ref] = payload

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
