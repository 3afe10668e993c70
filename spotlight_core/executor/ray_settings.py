"""What Ray is told through the environment: the run's own processes and its driver alike."""

from collections.abc import Sequence
from pathlib import Path

from spotlight_core.child_process import python_path
from spotlight_core.executor.processes import NODE_VARIABLE, run_environment

INLINE_BYTES = 32 * 2**20  # a result must not stay behind on a node that may be killed next
REGISTER_SECONDS = 120


def cluster_environment(run_id: str, token: Path) -> dict[str, str]:
    """For every process of the run's cluster, and the driver that speaks to it."""
    return run_environment(run_id) | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
        "RAY_enable_metrics_collection": "0",
        # A raylet takes seconds of CPU to register, and a machine that boots a fleet has none to spare.
        "RAY_raylet_start_wait_time_s": str(REGISTER_SECONDS),
        "RAY_max_direct_call_object_size": str(INLINE_BYTES),
    }


def node_environment(name: str, incarnation: int, gpus: Sequence[str]) -> dict[str, str]:
    """For a node's processes alone: its mark, its GPUs, idle threads that sleep, and where our code is."""
    return {
        NODE_VARIABLE: f"{name}-{incarnation}",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAY_BACKEND_LOG_LEVEL": "warning",
        "PYTHONPATH": python_path(),
    }


def read_environment() -> None:
    """Make Ray read its settings again: it did when it was imported, by whomever.

    In this order, since a thread of a former connection that still drains would look for a token.
    """
    from ray import _raylet

    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()
