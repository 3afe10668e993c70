"""Finished arrays on their way from an executor to the phase that asked for them."""

import threading

from spotlight_core.arrays import Arrays


class Results:
    """Finished arrays by ref (the request's id), until somebody takes them."""

    def __init__(self) -> None:
        self._arrays: dict[str, Arrays] = {}
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def put(self, ref: str, arrays: Arrays) -> None:
        """Keep the first result of a request; a second one, even after the first was taken, is dropped."""
        with self._lock:
            if ref not in self._known:
                self._known.add(ref)
                self._arrays[ref] = arrays

    def take(self, ref: str) -> Arrays:
        """The result, which is then the caller's.

        Raises:
            KeyError: there is no such result, or it was taken before.
        """
        with self._lock:
            return self._arrays.pop(ref)
