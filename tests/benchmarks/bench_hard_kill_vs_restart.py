"""How many times sooner work goes on after its node was killed than a worker process could be restarted.

From the SIGKILL of all the node's processes to Started elsewhere, from the last acknowledged commit,
against killing and restarting a worker process in the same run.
"""

from tests.benchmarks import Measurement
from tests.benchmarks.moves import TRIALS, Figures, kill_trial, moving_rig, restart_trial


def measure() -> Measurement:
    with moving_rig("bench-hard-kill") as rig:
        moved = [kill_trial(rig, trial) for trial in range(TRIALS)]
        restarted = [restart_trial(rig) for _ in range(TRIALS)]
    figures = Figures(moved=moved, restarted=restarted)
    return Measurement(
        value=figures.ratio, unit="times sooner than a restart", details=figures.details("kill")
    )
