import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.journal import drop_cut_line
from tasks.run_folder import (
    RunFolder,
    append_record,
    check_writable,
    keep_records,
    read_records,
    write_json,
)


def test_the_run_id_is_a_function_of_the_folder(tmp_path: Path) -> None:
    one, same, other = (
        RunFolder(tmp_path / "a"),
        RunFolder(tmp_path / "b" / ".." / "a"),
        RunFolder(tmp_path / "b"),
    )

    assert one.run_id == same.run_id
    assert one.run_id != other.run_id
    assert one.run_id.startswith("a-")


@pytest.mark.parametrize("said", ["{", "[]", "7", '{"epoch": "x"}', "\udcff"])
def test_facts_that_are_garbage_are_one_clear_error(tmp_path: Path, said: str) -> None:
    folder = RunFolder(tmp_path)
    folder.run_json.write_bytes(said.encode("utf-8", "surrogateescape"))

    with pytest.raises(BadInputError, match=r"run\.json cannot be read"):
        folder.facts()


def test_a_second_process_is_refused_and_told_who_holds_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.acquire()
    attempt = (
        "import sys; from pathlib import Path; from tasks.run_folder import RunFolder\n"
        "folder = RunFolder(Path(sys.argv[1])); print(folder.holder())\n"
        "try: folder.acquire()\n"
        "except Exception as error: print(error)"
    )

    said = subprocess.run(
        [sys.executable, "-c", attempt, str(folder.path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()

    assert said[0] == str(os.getpid())
    assert said[1].startswith(f"run run in {folder.path} is in use by process {os.getpid()}: ")
    folder.release()
    assert folder.holder() is None
    folder.acquire()
    folder.release()


def test_the_lock_is_gone_with_its_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    hold_and_die = (
        "import os, sys; from pathlib import Path; from tasks.run_folder import RunFolder\n"
        "RunFolder(Path(sys.argv[1])).acquire(); os.kill(os.getpid(), 9)"
    )

    assert (
        subprocess.run([sys.executable, "-c", hold_and_die, str(folder.path)], check=False).returncode == -9
    )

    assert folder.holder() is None
    folder.acquire()
    assert (folder.path / "lock").read_text() == f"{os.getpid()}\n"
    folder.release()


def test_json_is_replaced_whole_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": 1})
    write_json(tmp_path / "x.json", {"b": 2})

    assert json.loads((tmp_path / "x.json").read_text()) == {"b": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_line_cut_off_by_a_kill_is_never_read_and_can_be_dropped(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    append_record(log, {"n": 0})
    append_record(log, {"n": 1})
    with log.open("a") as file:
        file.write('{"n": 2')

    assert [record["n"] for record in read_records(log)] == [0, 1]
    drop_cut_line(log)
    append_record(log, {"n": 3})
    assert [record["n"] for record in read_records(log)] == [0, 1, 3]


def test_keep_records_rewrites_what_stays(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for number in range(5):
        append_record(log, {"n": number})

    assert keep_records(log, lambda record: record["n"] < 3) == 2
    assert [record["n"] for record in read_records(log)] == [0, 1, 2]
    assert keep_records(tmp_path / "absent.jsonl", lambda record: True) == 0


def test_notes_merge_into_run_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.facts() == {}
    folder.note(epoch=0, status="running")
    folder.note(status="finished")
    assert folder.facts() == {"epoch": 0, "status": "finished"}


def test_an_unwritable_place_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")

    check_writable(tmp_path / "new" / "folder")
    with pytest.raises(
        BadInputError, match=r"cannot write runs to .*: .*file is not a folder: give another folder"
    ):
        check_writable(blocker / "runs" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
