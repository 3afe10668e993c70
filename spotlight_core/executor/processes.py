"""Nothing of a run may survive it: every process that a run starts carries the run's name.

The name is an environment variable, so that it passes to children of children and stays readable
when a process's parent is gone and its title was rewritten.  Processes are never matched by name,
which would end another run's.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

RUN_VARIABLE = "SPOTLIGHT_RUN"
NODE_VARIABLE = "SPOTLIGHT_NODE"


def run_environment(run_id: str) -> dict[str, str]:
    """What marks a process as the run's.

    ``SPT_NOENV`` keeps Ray's process titles out of the environment's memory, where they would
    overwrite the mark.
    """
    return {RUN_VARIABLE: run_id, "SPT_NOENV": "1"}


def ray_folder(run_id: str) -> Path:
    """Ray's temporary folder of this run.

    Short, since Unix sockets below it may take 107 bytes; a function of the run, so that whoever
    cleans up after a killed driver finds it.
    """
    return Path(tempfile.gettempdir()) / f"spl-{hashlib.sha256(run_id.encode()).hexdigest()[:8]}"


def spawn(
    argv: Sequence[str], run_id: str, log: Path, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process of the run in its own session, both output streams appended to ``log``.

    The session keeps the terminal's Ctrl-C from it: the driver decides in which order things end.
    ``env`` is added to this process's environment.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            list(argv),
            env={**os.environ, **run_environment(run_id), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_processes(run_id: str, node: str | None = None) -> list[psutil.Process]:
    """Living processes of the run (of one ``node``, ``name-incarnation``), orphans and descendants too.

    Never this process or one of its ancestors, even when they carry the mark.
    """
    marks = {RUN_VARIABLE: run_id} | ({NODE_VARIABLE: node} if node is not None else {})
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        # Gone meanwhile, a zombie, or another user's: not ours to end.
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            if all(environment.get(name) == value for name, value in marks.items()):
                found[process.pid] = process
                found.update((child.pid, child) for child in process.children(recursive=True))
    spared = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [process for pid, process in found.items() if pid not in spared and _alive(process)]


def end_processes(processes: Sequence[psutil.Process], grace_seconds: float) -> None:
    """SIGTERM, ``grace_seconds`` later SIGKILL (at once when 0), and wait until they are gone."""
    if grace_seconds > 0:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _wait(processes, grace_seconds)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    _wait(processes, 5.0)


def reap(run_id: str, grace_seconds: float = 2.0) -> int:
    """End every process of the run and remove its Ray folder; how many processes were ended.

    Shared memory needs no removal: Ray unlinks its object store's file once it is mapped, so the
    kernel frees it with the last process.
    """
    ended: set[int] = set()
    for _ in range(5):  # a process may start another between the look and the kill
        processes = run_processes(run_id)
        if not processes:
            break
        ended |= {process.pid for process in processes}
        end_processes(processes, grace_seconds)
        grace_seconds = 0.0
    remove_folder(ray_folder(run_id))
    return len(ended)


def remove_folder(folder: Path) -> None:
    """Remove a folder whose writers were just killed; a link in its place is not followed."""
    for _ in range(3):  # a file written during the walk makes the last rmdir fail
        if folder.is_symlink() or not folder.exists():
            break
        shutil.rmtree(folder, ignore_errors=True)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _wait(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Wait for the end of each.

    By looking, since psutil's own wait would take a child's exit code from the Popen that owns it.
    """
    deadline = time.monotonic() + seconds
    while any(_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_own_node() -> None:
    """SIGKILL this node's raylet, its other children and this process: no goodbye to anyone."""
    raylet = psutil.Process(os.getppid())
    if raylet.environ().get(NODE_VARIABLE) != os.environ.get(NODE_VARIABLE):
        os.kill(os.getpid(), signal.SIGKILL)  # the raylet is gone already: our parent is somebody else
    children = raylet.children(recursive=True)
    raylet.kill()
    for child in children:
        if child.pid != os.getpid():
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_own_process() -> None:
    """SIGKILL this process alone."""
    os.kill(os.getpid(), signal.SIGKILL)
