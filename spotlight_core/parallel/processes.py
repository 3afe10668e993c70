"""Whether a process of this machine lives, told by more than its number, which is soon another's."""

import os
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot (Linux); None when it is gone.

    One that was killed and waits for its parent to notice is gone too.
    """
    try:
        record = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in brackets, may hold anything: fields are counted from the last bracket.
    fields = record[record.rindex(b")") + 2 :].split()
    return None if fields[0] in b"ZXx" else int(fields[19])


def own_identity() -> tuple[int, int]:
    """This process's number and start."""
    pid = os.getpid()
    return pid, start_ticks(pid) or 0


def is_alive(pid: int, ticks: int) -> bool:
    """Whether the process with this number is the one that was started then."""
    return start_ticks(pid) == ticks


def pid_namespace() -> int:
    """Which numbering of processes this one lives in: the numbers of another one mean nothing here."""
    return os.stat("/proc/self/ns/pid").st_ino
