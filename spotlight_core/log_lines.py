"""The lines of an append-only log; apart from ``durable``, since decision code may import no ``os``."""

from collections.abc import Iterator
from pathlib import Path


def whole_lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The lines from byte ``offset`` on, each with its end; none when there is no log yet.

    A last one without an end is still being written, or was cut off by a kill: it is none.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line
