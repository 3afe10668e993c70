"""Processes of a run are found by its mark, whoever their parent is, and none survives."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from spotlight_core.executor.processes import (
    NODE_VARIABLE,
    end_processes,
    ray_folder,
    reap,
    run_processes,
    spawn,
)

SLEEP = "import time; time.sleep(60)"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(child.pid, flush=True)
{SLEEP}
"""
STUBBORN = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
{SLEEP}
"""


@pytest.fixture
def run_id() -> str:
    return f"test-processes-{os.getpid()}-{time.monotonic_ns()}"


def first_line(log: Path) -> str:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        text = log.read_text() if log.exists() else ""
        if text.endswith("\n"):
            return text.splitlines()[0]
        time.sleep(0.02)
    raise AssertionError(f"{log} stayed empty")


def test_an_orphan_is_found_and_ended(tmp_path: Path, run_id: str) -> None:
    parent = spawn([sys.executable, "-c", PARENT], run_id, tmp_path / "log")
    orphan = int(first_line(tmp_path / "log"))
    assert os.getsid(parent.pid) == parent.pid, "Ctrl-C in the terminal does not reach it"
    assert {process.pid for process in run_processes(run_id)} == {parent.pid, orphan}
    parent.kill()
    parent.wait()
    assert {process.pid for process in run_processes(run_id)} == {orphan}

    folder = ray_folder(run_id)
    folder.mkdir()
    (folder / "file").touch()
    assert reap(run_id, grace_seconds=1.0) == 1
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
    assert not folder.exists()
    assert reap(run_id) == 0


def test_who_ignores_sigterm_is_killed(tmp_path: Path, run_id: str) -> None:
    stubborn = spawn([sys.executable, "-c", STUBBORN], run_id, tmp_path / "log")
    first_line(tmp_path / "log")
    assert reap(run_id, grace_seconds=0.2) == 1
    assert stubborn.wait(5) == -signal.SIGKILL


def test_other_runs_and_nodes_are_spared(tmp_path: Path, run_id: str) -> None:
    other = spawn([sys.executable, "-c", SLEEP], f"{run_id}-other", tmp_path / "other")
    node = spawn([sys.executable, "-c", SLEEP], run_id, tmp_path / "node", env={NODE_VARIABLE: "spot-0-1"})
    plain = spawn([sys.executable, "-c", SLEEP], run_id, tmp_path / "plain")
    try:
        time.sleep(0.1)
        assert {process.pid for process in run_processes(run_id, "spot-0-1")} == {node.pid}
        end_processes(run_processes(run_id, "spot-0-1"), grace_seconds=0.0)
        assert node.wait(5) == -signal.SIGKILL
        assert plain.poll() is None
        assert reap(run_id, grace_seconds=1.0) == 1
        assert plain.wait(5) == -signal.SIGTERM
        assert other.poll() is None
    finally:
        reap(f"{run_id}-other", grace_seconds=0.0)
    other.wait(5)


def test_folders_differ_by_run_and_leave_room_for_sockets() -> None:
    assert ray_folder("a") != ray_folder("b")
    assert ray_folder("a") == ray_folder("a")
    assert ray_folder("a").name.startswith("spl-")
    assert len(ray_folder("a").name) == len("spl-") + 8
