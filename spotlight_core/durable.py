"""Files that are whole or not there at all, whatever kills their writer, a power cut included."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_counter = itertools.count()


def fsync_folder(folder: Path) -> None:
    """Make what was renamed, made or removed in ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside ``path`` for the caller to fill, which takes its place durably when all went well.

    ``mode`` as the process's umask leaves it.  The file's name is ``.NAME.PID.NUMBER.tmp``, so that a
    sweep can tell whether its writer lives.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_counter)}.tmp")
    temporary.unlink(missing_ok=True)  # of a dead process that had our number
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)  # without it the rename itself may not survive


def write_bytes(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace ``path``; durable when it returns."""
    with replacing(path, mode) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` with UTF-8 text; durable when it returns."""
    write_bytes(path, text.encode())
