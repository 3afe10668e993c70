"""The real parts of a coordinator's process: Ray, the nodes, and who decides about them."""

from collections.abc import Mapping
from pathlib import Path

import ray
from ray.exceptions import RayError

from spotlight_core.config import RunConfig
from spotlight_core.deciders import build_decider
from spotlight_core.events import PhaseChanged, Word
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.fleet import LiveFleet
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.executor.parts import Parts
from spotlight_core.executor.ray import RayExecutor
from spotlight_core.market.traces import ClockTrace, read_trace
from spotlight_core.storage import store_url

USAGE_SECONDS = 2.0


def assemble(config: RunConfig, run_folder: Path, run_id: str, inbox: Inbox) -> Parts:
    """Make the parts; what takes long of them is left to ``fleet.start``.

    Raises:
        BadInputError: the trace cannot be read.
    """
    trace = read_trace(config.fleet.trace) if config.fleet.trace else None
    cluster = RayCluster(run_id, port=config.services.ray_port)
    executor = RayExecutor(
        cluster=cluster,
        inbox=inbox,
        store_url=store_url(config.fleet.store, run_folder, run_id),
        node_log=NodeLog(folder=run_folder / "nodes"),
        config=config,
    )
    fleet = LiveFleet(
        config=config,
        cluster=cluster,
        executor=executor,
        inbox=inbox,
        run_folder=run_folder,
        trace=trace,
    )

    def observe(word: Word) -> None:
        if isinstance(word, PhaseChanged):
            fleet.on_phase(word.phase, word.iteration)
            if word.phase == "rollout":
                executor.store.forget_before(word.iteration)

    return Parts(
        decider=build_decider(
            config, speedup=config.fleet.trace_speedup if isinstance(trace, ClockTrace) else 1.0
        ),
        nodes=executor,
        fleet=fleet,
        results=executor.results,
        observe=observe,
        sizes=lambda: {**_store_sizes(executor.store.name), "results_bytes": executor.results.bytes_held()},
    )


def _store_sizes(keeper: str) -> Mapping[str, float]:
    """What the Tensor Store holds; nothing while it is away."""
    if not ray.is_initialized():  # before the cluster is there, a look for an actor would start another one
        return {}
    try:
        usage = ray.get(ray.get_actor(keeper).usage.remote(), timeout=USAGE_SECONDS)
    except (RayError, ValueError):  # ValueError: there is no actor of that name
        return {}
    return {
        "store_commits": usage.commits,
        "store_memory_bytes": usage.memory_bytes,
        "store_durable_bytes": usage.durable_bytes,
    }
