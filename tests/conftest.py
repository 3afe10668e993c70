"""What every test shares: quiet libraries, one thread, no touch of the user's home, repeatable hypothesis."""

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

# Set before any test module imports a library that reads them, and inherited by every process it starts.
os.environ.update(
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ENABLE_AUTO_CONNECT="0",
    MLFLOW_DISABLE_TELEMETRY="true",
)
_prefect_home = tempfile.mkdtemp(prefix="spotlight-tests-")
os.environ["PREFECT_HOME"] = _prefect_home
_owner = os.getpid()


@atexit.register
def _remove_prefect_home() -> None:
    """Only by the process that made it: forked children run this too."""
    if os.getpid() == _owner:
        shutil.rmtree(_prefect_home, ignore_errors=True)


# The same examples on every machine, and no failure because a busy machine was slow.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("repeatable")
