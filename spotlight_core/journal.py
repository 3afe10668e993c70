"""The record of a run's words: one JSON line for every event and command, in the order they happened.

A line that a kill cut off is not a word.  Whoever opens the journal again drops it first.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from spotlight_core.errors import BadInputError
from spotlight_core.events import Event, Word, decode


def read_words(path: Path) -> Iterator[Word]:
    """The whole lines of a journal as words; none when there is no journal yet.

    Raises:
        BadInputError: a line that is no word (names it), or ``path`` is not a file.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise BadInputError(f"the journal {path} is not a file", "move what is there away")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or not line.strip():
                continue
            try:
                yield decode(line)
            except msgspec.MsgspecError as error:
                raise BadInputError(
                    f"{path}:{number} is no word of this version ({error})",
                    "restore the line, or read the run with the version that wrote it",
                ) from error


def last_position(path: Path) -> tuple[int, int]:
    """Epoch and seq of the last event, ``(-1, 0)`` when there is none."""
    position = (-1, 0)
    for word in read_words(path):
        if isinstance(word, Event):
            position = (word.epoch, word.seq)
    return position
