"""Denoise steps per second through coordinator, Ray and one actor, against the bare engine loop.

The same requests, the same process-local thread count, alternating in one run: the ratio says what
the whole path from queue to result costs.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from spotlight_core.config import RunConfig
from spotlight_core.deciders import build_decider
from spotlight_core.diffusion.engine import DenoiseEngine
from spotlight_core.diffusion.models import build_model
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.coordinator import Coordinator, Journal
from spotlight_core.executor.fleet import LiveFleet
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.executor.processes import reap
from spotlight_core.executor.ray import RayExecutor
from spotlight_core.recipes import load_recipe
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from spotlight_core.weights.store import WeightStore
from tests.benchmarks import Measurement
from tests.core.executor.coordinator_rig import submit

REQUESTS, ROUNDS, SEEDS = 24, 4, 8


def _requests(config: RunConfig, policy: PolicyVersion, part: str) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=f"{part}/rollout/p{index}/0",
            kind="rollout",
            prompts=(Prompt(occurrence=f"p{index}", text=f'A sign "{index:03d}"'),),
            seeds=tuple(range(SEEDS)),
            policy=policy,
            fidelity=Fidelity(denoise_steps=config.sampler.denoise_steps),
        )
        for index in range(REQUESTS)
    ]


def _bare(engine: DenoiseEngine, requests: Sequence[GenerationRequest]) -> float:
    began = time.perf_counter()
    for request in requests:
        engine.generate(request)
    return time.perf_counter() - began


async def _through_ray(coordinator: Coordinator, requests: Sequence[GenerationRequest]) -> float:
    began = time.perf_counter()
    async for _ in submit(coordinator, requests).results():
        pass
    return time.perf_counter() - began


async def _measure(config: RunConfig, coordinator: Coordinator, policy: PolicyVersion) -> Measurement:
    torch.set_num_threads(config.services.torch_threads)
    engine = DenoiseEngine(build_model(config.model, "rollout"), config.sampler, config.rng_seed)
    coordinator.change_phase("rollout", 0)
    await _through_ray(coordinator, _requests(config, policy, "warm-up"))
    _bare(engine, _requests(config, policy, "warm-up"))
    bare = ray = 0.0
    for part in range(ROUNDS):
        bare += _bare(engine, _requests(config, policy, str(part)))
        ray += await _through_ray(coordinator, _requests(config, policy, str(part)))
    steps = ROUNDS * REQUESTS * config.sampler.denoise_steps
    return Measurement(
        value=bare / ray,
        unit="of the bare loop",
        details={
            "bare loop, denoise steps/s of 8 seeds": steps / bare,
            "through Ray, denoise steps/s of 8 seeds": steps / ray,
            "overhead per request, ms": 1e3 * (ray - bare) / (ROUNDS * REQUESTS),
        },
    )


def measure() -> Measurement:
    """One reserved node, no spot, no trace."""
    config = load_recipe("quickstart", ["fleet.spot_nodes=0", "exploration={type='none'}"])
    run_id = "bench-denoise"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        inbox = Inbox(epoch=0)
        cluster = RayCluster(run_id)
        executor = RayExecutor(
            cluster=cluster,
            inbox=inbox,
            store_url=str(folder / "tensor_store"),
            node_log=NodeLog(folder=folder / "nodes"),
            config=config,
        )
        fleet = LiveFleet(config=config, cluster=cluster, executor=executor, inbox=inbox, run_folder=folder)
        coordinator = Coordinator(
            decider=build_decider(config),
            nodes=executor,
            inbox=inbox,
            journal=Journal(folder / "journal.jsonl"),
        )
        model = build_model(config.model, "rollout")
        policy = WeightStore(folder / "weights").publish("base", 0, model.transformer.state_dict())
        coordinator.start()
        try:
            fleet.start()
            return asyncio.run(_measure(config, coordinator, policy))
        finally:
            fleet.close()
            coordinator.close()
            reap(run_id)
