from collections.abc import Callable
from pathlib import Path

import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.events import SetTimer, Started, encode
from spotlight_core.journal import JournalFollower, drop_cut_line, last_event, read_words

FIRST, SECOND, THIRD = (Started(lease=str(number), seq=number, epoch=1) for number in (1, 2, 3))


def line(word: Started) -> bytes:
    return encode(word) + b"\n"


def test_a_follower_reads_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    follower = JournalFollower(path)
    assert list(follower.news()) == []

    path.write_bytes(line(FIRST) + line(SECOND)[:9])
    assert list(follower.news()) == [FIRST]
    assert list(follower.news()) == []
    with path.open("ab") as file:
        file.write(line(SECOND)[9:] + line(THIRD))
    assert list(follower.news()) == [SECOND, THIRD]


def test_a_follower_goes_on_where_its_reader_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(FIRST) + line(SECOND))
    follower = JournalFollower(path)

    assert next(iter(follower.news())) == FIRST
    assert list(follower.news()) == [SECOND]


def test_a_follower_goes_on_past_a_cut_line_that_was_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(FIRST) + b'{"word":')
    follower = JournalFollower(path)
    assert list(follower.news()) == [FIRST]

    drop_cut_line(path)
    with path.open("ab") as file:
        file.write(line(SECOND))
    assert list(follower.news()) == [SECOND]


def test_a_line_that_is_no_word_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(FIRST) + b'{"word":"Never"}\n')

    with pytest.raises(BadInputError, match=rf"journal.jsonl at byte {len(line(FIRST))} is no word"):
        list(JournalFollower(path).news())
    with pytest.raises(BadInputError, match=r"journal\.jsonl:2 is no word"):
        list(read_words(path))


@pytest.mark.parametrize("cut", [b"", b"x", b"x" * 200_000])
@pytest.mark.parametrize("whole", [b"", b"a\n", b"a\n" + b"b" * 150_000 + b"\n"])
def test_what_is_behind_the_last_whole_line_is_dropped(tmp_path: Path, whole: bytes, cut: bytes) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(whole + cut)
    drop_cut_line(path)

    assert path.read_bytes() == whole


def test_a_log_that_is_not_there_needs_no_mending(tmp_path: Path) -> None:
    drop_cut_line(tmp_path / "none.jsonl")

    assert last_event(tmp_path / "none.jsonl") is None


@pytest.mark.parametrize("behind", [b"", b"\n", b'{"word":"Sta', b'{"word":"Sta' + b"x" * 200_000])
def test_the_last_event_is_found_behind_commands_and_a_cut_line(tmp_path: Path, behind: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    timers = (encode(SetTimer(id="t" * 100, at=9e9)) + b"\n") * 1000  # more than one block
    path.write_bytes(line(FIRST) + line(SECOND) + timers + behind)
    assert last_event(path) == SECOND

    path.write_bytes(timers + behind)
    assert last_event(path) is None


def test_a_garbage_line_at_the_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(line(FIRST) + b"nonsense\n")

    with pytest.raises(BadInputError, match=rf"at byte {len(line(FIRST))} is no word"):
        last_event(path)


@pytest.mark.parametrize(
    "ask",
    [
        lambda path: list(read_words(path)),
        lambda path: list(JournalFollower(path).news()),
        last_event,
        drop_cut_line,
    ],
)
def test_a_journal_that_is_a_folder_is_one_clear_error(tmp_path: Path, ask: Callable[[Path], object]) -> None:
    with pytest.raises(BadInputError, match="is not a file"):
        ask(tmp_path)
