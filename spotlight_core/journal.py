"""The record of a run's words: one JSON line for every event and command, in the order they happened.

A line that a kill cut off is not a word.  Whoever opens the journal again drops it first.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from spotlight_core.errors import BadInputError
from spotlight_core.events import Event, Word, decode
from spotlight_core.log_lines import whole_lines

_BLOCK = 1 << 16


def read_words(path: Path) -> Iterator[Word]:
    """The whole lines of a journal as words; none when there is no journal yet.

    Raises:
        BadInputError: a line that is no word (names it), or ``path`` is not a file.
    """
    _check_file(path)
    for number, line in enumerate(whole_lines(path), start=1):
        if line.strip():
            yield _word(line, f"{path}:{number}")


def last_event(path: Path) -> Event | None:
    """The last event of a journal, None when there is none; read from the end, for a long run's is large.

    Raises:
        BadInputError: a line that is no word (names its place in bytes), or ``path`` is not a file.
    """
    _check_file(path)
    if not path.exists():
        return None
    with path.open("rb") as file:
        end = _after_last_newline(file, file.seek(0, os.SEEK_END))
        while end > 0:
            begin = _after_last_newline(file, end - 1)
            file.seek(begin)
            line, place = file.read(end - begin), f"{path} at byte {begin}"
            end = begin
            word = _word(line, place) if line.strip() else None
            if isinstance(word, Event):
                return word
    return None


class JournalFollower:
    """Reads a journal that another process writes, each whole line once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def news(self) -> Iterator[Word]:
        """The words that were appended since; none when there is no journal yet.

        Each line counts as read once its word was taken.

        Raises:
            BadInputError: a line is no word (names its place in bytes), or the path is not a file.
        """
        _check_file(self.path)
        for line in whole_lines(self.path, self._offset):
            begin, self._offset = self._offset, self._offset + len(line)
            if line.strip():
                yield _word(line, f"{self.path} at byte {begin}")


def drop_cut_line(path: Path) -> None:
    """Cut what a kill left behind the last whole line of an append-only log; none is fine too.

    Raises:
        BadInputError: ``path`` is not a file.
    """
    _check_file(path)
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        whole = _after_last_newline(file, end)
        if whole < end:
            file.truncate(whole)
            os.fsync(file.fileno())


def _after_last_newline(file: BinaryIO, end: int) -> int:
    """From the end: a long run's journal is large, and its last line is not."""
    while end > 0:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _check_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise BadInputError(f"the log {path} is not a file", "move what is there away")


def _word(line: bytes, place: str) -> Word:
    try:
        word: Word = decode(line)
    except msgspec.MsgspecError as error:
        raise BadInputError(
            f"{place} is no word of this version ({error})",
            "restore the line, or read the run with the version that wrote it",
        ) from error
    return word
