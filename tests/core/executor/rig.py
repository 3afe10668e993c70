"""A real Ray cluster with everything around it but the phases, for the tests of what happens to nodes."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from spotlight_core.arrays import Arrays, arrays_digest
from spotlight_core.config import DataConfig, FleetConfig, OdeConfig, RunConfig, TinyModelConfig
from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.deciders import build_decider
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.tiny.model import TinyQwenImage, build_transformer
from spotlight_core.drive import Together
from spotlight_core.events import SPGroup, Word
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.coordinator import Coordinator, Journal
from spotlight_core.executor.fleet import LiveFleet
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.executor.processes import reap, run_processes
from spotlight_core.executor.ray import RayExecutor
from spotlight_core.executor.submission import Submission
from spotlight_core.market.fleet import FleetPlanner, FleetRules
from spotlight_core.market.progress import ProgressTrace
from spotlight_core.market.traces import ClockTrace
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from spotlight_core.weights.store import WeightStore
from tests.core.executor.coordinator_rig import submit

STEPS = 6


@dataclass(slots=True, kw_only=True)
class Rig:
    run_id: str
    config: RunConfig
    folder: Path
    cluster: RayCluster
    inbox: Inbox
    executor: RayExecutor
    coordinator: Coordinator
    fleet: LiveFleet
    policy: PolicyVersion
    words: list[Any] = field(default_factory=list)

    def of_kind(self, kind: type) -> list[Any]:
        return [word for word in self.words if isinstance(word, kind)]

    def wait(self, kind: type, count: int, seconds: float = 60.0) -> list[Any]:
        """The words of a kind once there are ``count`` of them."""
        assert wait_until(lambda: len(self.of_kind(kind)) >= count, seconds), (
            f"{len(self.of_kind(kind))} {kind.__name__} instead of {count}: {self.of_kind(kind)}"
        )
        return self.of_kind(kind)

    def begin_phase(self, phase: str, iteration: int) -> None:
        self.fleet.on_phase(phase, iteration)  # type: ignore[arg-type]
        self.coordinator.change_phase(phase, iteration)  # type: ignore[arg-type]

    def run(
        self, requests: Sequence[GenerationRequest], meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, str]:
        """Digests of the results by request; ``meanwhile`` runs in a thread beside it."""

        async def results() -> dict[str, str]:
            submission = submit(self.coordinator, requests)
            digests, _ = await asyncio.gather(self._digests(submission), asyncio.to_thread(meanwhile))
            return digests

        return asyncio.run(results())

    def run_arrays(
        self, requests: Sequence[GenerationRequest], meanwhile: Callable[[], None] = lambda: None
    ) -> dict[str, Arrays]:
        """The results by request; ``meanwhile`` runs in a thread beside it."""

        async def collected(submission: Submission) -> dict[str, Arrays]:
            return {
                request.id: self.executor.results.take(ref) async for request, ref in submission.results()
            }

        async def results() -> dict[str, Arrays]:
            submission = submit(self.coordinator, requests)
            arrays, _ = await asyncio.gather(collected(submission), asyncio.to_thread(meanwhile))
            return arrays

        return asyncio.run(results())

    async def _digests(self, submission: Submission) -> dict[str, str]:
        return {
            request.id: arrays_digest(self.executor.results.take(ref))
            async for request, ref in submission.results()
        }

    def actors(self, node: str, kind: str) -> list[psutil.Process]:
        """The processes of a node's (``name-incarnation``) actors of a class: Ray titles them so."""
        return [
            process
            for process in run_processes(self.run_id, node)
            if f"ray::{kind}" in " ".join(process.cmdline())
        ]

    def actor(self, group: SPGroup) -> Any:
        """The handle of the process behind a group."""
        return self.executor._nodes.known[group.node, group.incarnation].places[group.ranks[0]].actor


@contextmanager
def live_rig(
    folder: Path,
    run_id: str,
    trace: ProgressTrace | ClockTrace | None = None,
    steps: int = STEPS,
    patient: bool = True,
    cluster: RayCluster | None = None,
    elastic: ElasticConfig | None = None,
    **fleet: Any,
) -> Iterator[Rig]:
    """A started rig; ``fleet`` are settings of ``[fleet]``.

    Not ``patient``: nodes that fail are rented again at once, since a measurement is no reclaim storm.
    """
    rig = make_rig(folder, run_id, trace, steps, patient, cluster, elastic, **fleet)
    rig.coordinator.start()
    try:
        rig.fleet.start()
        yield rig
    finally:
        rig.fleet.close()
        rig.coordinator.close()
        reap(run_id)


def make_rig(
    folder: Path,
    run_id: str,
    trace: ProgressTrace | ClockTrace | None,
    steps: int = STEPS,
    patient: bool = True,
    cluster: RayCluster | None = None,
    elastic: ElasticConfig | None = None,
    **fleet: Any,
) -> Rig:
    torch.manual_seed(0)
    TinyQwenImage(build_transformer()).save_weights(folder / "tiny.safetensors")
    config = RunConfig(
        name="live",
        iterations=1,
        model=TinyModelConfig(weights=folder / "tiny.safetensors"),
        data=DataConfig(prompts=folder),
        sampler=OdeConfig(denoise_steps=steps),
        fleet=FleetConfig(**{"trace_speedup": 1.0} | fleet),
        elastic=elastic or ElasticConfig(),
    )
    weights = build_model(config.model, "rollout").transformer.state_dict()
    policy = WeightStore(folder / "weights").publish("old", 0, weights)
    inbox, words = Inbox(epoch=1), list[Word]()
    cluster = cluster or RayCluster(run_id)
    executor = RayExecutor(
        cluster=cluster,
        inbox=inbox,
        store_url=str(folder / "tensor_store"),
        node_log=NodeLog(folder=folder / "nodes"),
        config=config,
    )
    journal = Journal(folder / "journal.jsonl", observers=[words.append])
    decider = build_decider(config)
    if not patient:
        rules = FleetRules.of(config.fleet, speedup=1e6)
        decider = Together(FleetPlanner(rules), RequestScheduler(SchedulingRules.of(config.fleet)))
    coordinator = Coordinator(decider=decider, nodes=executor, inbox=inbox, journal=journal)
    return Rig(
        run_id=run_id,
        config=config,
        folder=folder,
        cluster=cluster,
        inbox=inbox,
        executor=executor,
        coordinator=coordinator,
        fleet=LiveFleet(
            config=config, cluster=cluster, executor=executor, inbox=inbox, run_folder=folder, trace=trace
        ),
        policy=policy,
        words=words,
    )


def make_requests(
    policy: PolicyVersion, iteration: int, count: int, steps: int = STEPS, rows: int = 4
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=f"{iteration}/rollout/p{index}/0",
            kind="rollout",
            prompts=(Prompt(occurrence=f"{iteration}-{index}", text=f'A ticket that reads "{index}4"'),),
            seeds=tuple(range(rows)),
            policy=policy,
            fidelity=Fidelity(denoise_steps=steps),
        )
        for index in range(count)
    ]


def expected_digests(rig: Rig, requests: Sequence[GenerationRequest]) -> dict[str, str]:
    """What a bare loop in this process gives."""
    torch.set_num_threads(rig.config.services.torch_threads)
    engine = DenoiseEngine(build_model(rig.config.model, "rollout"), rig.config.sampler, rig.config.rng_seed)
    digests = {}
    for request in requests:
        generated = engine.generate(request)
        assert isinstance(generated, Generated)
        digests[request.id] = arrays_digest(generated.arrays)
    return digests


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
