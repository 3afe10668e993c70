import stat
from pathlib import Path

import pytest

from spotlight_core.durable import replacing, write_bytes, write_text
from spotlight_core.log_lines import whole_lines


def test_a_file_is_replaced_as_a_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_text(path, "old ö")
    with replacing(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_text(encoding="utf-8") == "old ö"

    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_a_writer_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_bytes(path, b"old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_bytes(b"ne")
            raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        fail()
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_a_secret_is_its_owners_alone_from_the_first_byte_on(tmp_path: Path) -> None:
    with replacing(tmp_path / "token", mode=0o600) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_only_whole_lines_count(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert list(whole_lines(log)) == []
    log.write_bytes(b"a\n\nb\ncut")

    assert list(whole_lines(log)) == [b"a\n", b"\n", b"b\n"]
    assert list(whole_lines(log, 3)) == [b"b\n"]
