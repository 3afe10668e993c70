"""A child that answers its parent: from any folder, and with nothing else among its answers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spotlight_core.child_process import child_environment, python_path, told
from spotlight_core.errors import BadInputError

CHATTY = """
import os
from spotlight_core.child_process import Answers
answers = Answers()
print("a library's print", flush=True)
os.write(1, b"and a write\\n")
answers.give({"threads": os.environ["OMP_NUM_THREADS"]})
"""
ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "from spotlight_core.child_process import Answers\\n"
                          "import time; Answers().give({}); time.sleep(60)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_only_answers_are_answered_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHATTY],
        cwd=tmp_path,
        env=child_environment(threads=3),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == {"threads": "3"}
    assert done.stderr == "a library's print\nand a write\n"


READER = """
from spotlight_core.child_process import Answers
answers = Answers()
try:
    input()
except EOFError:
    answers.give({"request": answers.requests.readline().decode()})
"""


def test_other_code_finds_nothing_on_stdin_and_takes_no_request() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input="the request\n",
        env=child_environment(threads=1),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == {"request": "the request\n"}


def test_a_child_ends_when_its_parent_was_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN],
        env=child_environment(threads=1),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _runs(pid)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_our_packages_come_before_what_was_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert python_path() == f"{root}{os.pathsep}/elsewhere"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == root


def test_an_error_is_told_by_its_kind() -> None:
    assert told(BadInputError("no file x", "give another")) == {
        "error": "no file x",
        "remedy": "give another",
        "kind": "BadInputError",
    }
