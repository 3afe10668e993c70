"""The part of the Tensor Store that answers without its storage: recent commits, in bounded memory."""

from collections import OrderedDict


class StoreMemory:
    """Payloads by ref, at most ``limit_bytes`` of them; the oldest leave first.

    One that is larger than the limit is not kept, and drives out nothing.  Not for several threads.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self.bytes = 0

    def put(self, ref: str, digest: str, payload: bytes) -> None:
        """Remember what ``ref`` holds now, in place of what it held before."""
        self.drop(ref)
        if len(payload) > self._limit_bytes:
            return
        self._kept[ref] = (digest, payload)
        self.bytes += len(payload)
        while self.bytes > self._limit_bytes:
            self.drop(next(iter(self._kept)))

    def get(self, ref: str, digest: str) -> bytes | None:
        """The payload of ``ref`` if it is here and has this digest."""
        kept = self._kept.get(ref)
        return kept[1] if kept is not None and kept[0] == digest else None

    def drop(self, ref: str) -> None:
        """Forget ``ref``; not to know it is fine."""
        kept = self._kept.pop(ref, None)
        if kept is not None:
            self.bytes -= len(kept[1])
