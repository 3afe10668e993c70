"""How many times sooner work goes on after a notice than a worker process could be restarted.

From the notice to Started elsewhere, less the rest of the denoise step then running, against killing
and restarting a worker process in the same run.
"""

from tests.benchmarks import Measurement
from tests.benchmarks.moves import TRIALS, Figures, moving_rig, notice_trial, restart_trial


def measure() -> Measurement:
    with moving_rig("bench-notice") as rig:
        moved = [notice_trial(rig, trial) for trial in range(TRIALS)]
        restarted = [restart_trial(rig) for _ in range(TRIALS)]
    figures = Figures(moved=moved, restarted=restarted)
    return Measurement(
        value=figures.ratio, unit="times sooner than a restart", details=figures.details("notice")
    )
