"""How many times sooner two live ranks work together than two cold worker processes could.

Regroup: from the command to the end of the new group's first collective on both ranks, on a live node: the
journal, the executor, and the Ray calls of the request that goes on there are in it.  Cold: two processes
are started, import, build the embedded model, meet, and are through their first forward together.

The cold time is nearly all imports, and groups are cheap on a CPU over gloo as well (switch_seconds prints
them): what is won over NCCL, whose first collective in a new group takes long, awaits a machine with
several GPUs.
"""

import statistics
import tempfile
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import ray

from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.drive import Decider
from spotlight_core.events import Command, Event, Finished, NodeJoined, Regroup, Regrouped, SPGroup, Start
from spotlight_core.parallel.rendezvous import NodeRendezvous, meeting_place
from tests.benchmarks import Measurement
from tests.benchmarks.workers import PAIR, Worker, ask, request
from tests.core.executor.rig import Rig, live_rig, wait_until

NODE = "reserved-0"
ALONE = ((0,), (1,))
ROUNDS, REGROUPS = 5, 12  # a round: so many regroupings, then a cold start
FIRST_GENERATION = 1000  # past those that the decider itself has formed


def watch_collectives(actor: Any) -> None:
    """Called inside an actor: remember when the first collective of each generation was over."""
    from spotlight_core.parallel.shared_memory import SharedMemoryCommunicator

    actor.first_collectives = {}

    def watched(name: str) -> None:
        collective = getattr(SharedMemoryCommunicator, name)

        def timed(self: SharedMemoryCommunicator, *arguments: Any) -> Any:
            answer = collective(self, *arguments)
            actor.first_collectives.setdefault(self.generation, time.time())
            return answer

        setattr(SharedMemoryCommunicator, name, timed)

    for name in ("all_to_all", "all_gather", "broadcast"):
        watched(name)


def first_collectives(actor: Any) -> dict[int, float]:
    """Called inside an actor: wall-clock seconds by generation."""
    found: dict[int, float] = actor.first_collectives
    return found


class GoesOn:
    """The rig's decider, which also starts a waiting request when the group that it waits for is formed."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self.waiting: Start | None = None

    def decide(self, event: Event) -> list[Command]:
        commands = self._decider.decide(event)
        start = self.waiting
        if start is not None and isinstance(event, Regrouped) and event.generation == start.group.generation:
            commands.append(start)
            self.waiting = None
        return commands


def _regroups(rig: Rig, goes_on: GoesOn, actors: list[Any], first: int) -> list[float]:
    """Seconds of each regrouping of two single ranks into a pair."""
    began: dict[int, float] = {}
    for trial in range(REGROUPS):
        generation = first + 2 * trial
        _form(rig, generation, ALONE)
        pair = SPGroup(node=NODE, incarnation=1, ranks=PAIR, generation=generation + 1)
        finished = len(rig.of_kind(Finished))
        goes_on.waiting = Start(
            group=pair, lease=f"bench.{generation}", request=request(f"bench/{generation}")
        )
        began[generation + 1] = time.time()
        _form(rig, generation + 1, (PAIR,))
        assert wait_until(lambda before=finished: len(rig.of_kind(Finished)) > before, 60)
    ended = ray.get([actor.__ray_call__.remote(first_collectives) for actor in actors])
    return [max(each[generation] for each in ended) - at for generation, at in began.items()]


def _form(rig: Rig, generation: int, groups: tuple[tuple[int, ...], ...]) -> None:
    """Have the executor form groups, as a decider's command does."""
    rig.coordinator.execute(Regroup(node=NODE, incarnation=1, generation=generation, groups=groups))
    assert wait_until(lambda: rig.of_kind(Regrouped)[-1].generation == generation, 20)


def _cold_start(folder: Path, trial: int) -> tuple[float, float]:
    """Seconds from two commands to the end of the forwards that their processes share, and how many of
    these the busier one computed."""
    node = NodeRendezvous.create(meeting_place(folder) / f"cold-{trial}", slots=len(PAIR))
    began = time.perf_counter()
    workers = [Worker("forward", node.path, rank) for rank in PAIR]
    try:
        for worker in workers:
            worker.answer()
        ask(workers, "1")
        seconds = time.perf_counter() - began
        return seconds, max(worker.cpu_seconds() for worker in workers)
    finally:
        for worker in workers:
            worker.end()
        node.close()


def measure() -> Measurement:
    regrouped: list[float] = []
    cold: list[tuple[float, float]] = []
    with (
        tempfile.TemporaryDirectory() as name,
        live_rig(
            Path(name), "bench-regroup", elastic=ElasticConfig(sp_degree=2), spot_nodes=0, gpus_per_node=2
        ) as rig,
    ):
        rig.wait(NodeJoined, 1)
        rig.wait(Regrouped, 1)
        goes_on = GoesOn(rig.coordinator._decider)
        rig.coordinator._decider = goes_on
        node = rig.executor._nodes.known[NODE, 1]
        actors = [node.places[rank].actor for rank in PAIR]
        ray.get([actor.__ray_call__.remote(watch_collectives) for actor in actors])
        for number in range(ROUNDS):  # in turn, so that a busy moment falls on both
            regrouped += _regroups(rig, goes_on, actors, FIRST_GENERATION + 2 * REGROUPS * number)
            cold.append(_cold_start(Path(name), number))
    seconds = [wall for wall, _ in cold]
    details: dict[str, float | str] = {
        "regroupings, cold starts": f"{len(regrouped)}, {len(cold)}",
        "regroup to first collective, median ms": 1e3 * statistics.median(regrouped),
        "regroup to first collective, p95 ms": 1e3 * _p95(regrouped),
        "cold pair to first forward, median s": statistics.median(seconds),
        "cold pair to first forward, p95 s": _p95(seconds),
        "cold pair, CPU s of the busier process (much less: the machine is busy)": statistics.median(
            computed for _, computed in cold
        ),
        "p95 over p95": _p95(seconds) / _p95(regrouped),
    }
    ratio = statistics.median(seconds) / statistics.median(regrouped)
    return Measurement(value=ratio, unit="times sooner than a cold pair", details=details)


def _p95(seconds: list[float]) -> float:
    return quantiles(seconds, n=20, method="inclusive")[-1]
