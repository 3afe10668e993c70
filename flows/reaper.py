"""What a driver that must leave at once leaves behind: a process that waits for its death, then cleans up.

Not done by the driver itself, whose threads may be starting a node at that very moment: Ray aborts
the process when its folder goes from under it, and what was just started would stay.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from spotlight_core.errors import BadInputError
from spotlight_core.executor.processes import RUN_VARIABLE, reap
from tasks.run_folder import RunFolder

WAIT_SECONDS = 10.0


def reap_after_exit(folder: RunFolder) -> None:
    """Start the process; returns at once."""
    here = str(Path(__file__).parent.parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {key: value for key, value in os.environ.items() if key != RUN_VARIABLE}
    subprocess.Popen(
        [sys.executable, "-m", "flows.reaper", str(folder.path), str(os.getpid())],
        env=environment | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(path: str, driver: int) -> None:
    """Wait until process ``driver`` has let go of the run, then end what it left."""
    folder = RunFolder(Path(path))
    deadline = time.monotonic() + WAIT_SECONDS
    while folder.holder() == str(driver) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        folder.acquire()
    except BadInputError:
        return  # whoever has the run now has cleaned up before starting
    reap(folder.run_id, grace_seconds=0.0)
    folder.release()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
