"""What the processes share that serve their parent over pipes, a JSON line for an answer.

A child ends with its input, which a run that dies closes, however it dies.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from spotlight_core.errors import SpotlightError

PARENT_CHECK_SECONDS = 1.0


def python_path() -> str:
    """PYTHONPATH of a process that finds our packages from any folder."""
    root = str(Path(__file__).parents[1])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def child_environment(threads: int) -> dict[str, str]:
    """This process's environment for ``python -m spotlight_core...`` from any folder, computing with
    ``threads`` threads that sleep while they wait."""
    own = {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return os.environ | own


class Answers:
    """The child's side: what were stdin (``requests``) and stdout, which other code goes past from now on."""

    requests: BinaryIO

    def __init__(self) -> None:
        """Also lets the terminal's Ctrl-C pass, and ends this process when its parent is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _end_with_parent(os.getppid())
        # A reward that reads stdin would wait for ever, and eat a request; it gets an end of file.
        self.requests = os.fdopen(os.dup(0), "rb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        # A library's or a reward's own prints must not land among the answers.
        self._lines: BinaryIO = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def give(self, message: Mapping[str, Any]) -> None:
        """One answer."""
        self._lines.write(json.dumps(message).encode() + b"\n")
        self._lines.flush()


def told(error: SpotlightError) -> dict[str, Any]:
    """The answer that says what went wrong: ``error``, ``remedy``, and its ``kind`` by class name."""
    return {"error": error.problem, "remedy": error.remedy, "kind": type(error).__name__}


def _end_with_parent(parent: int) -> None:
    """Leave when the parent is gone: a sibling that inherited the pipe could hold it open."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
