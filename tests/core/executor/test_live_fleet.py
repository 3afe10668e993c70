"""A real Ray cluster under a replayed trace: notice, kill, return; the results are those of a bare loop."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from spotlight_core.arrays import arrays_digest
from spotlight_core.config import DataConfig, FleetConfig, OdeConfig, RunConfig, TinyModelConfig
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.tiny.model import TinyQwenImage, build_transformer
from spotlight_core.errors import FleetError
from spotlight_core.events import Failed, Lost, NodeJoined, Notice, Start
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.coordinator import Coordinator, Journal
from spotlight_core.executor.fleet import LiveFleet, bury_open_nodes
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.executor.processes import ray_folder, run_processes
from spotlight_core.executor.ray import RayExecutor
from spotlight_core.market.progress import ProgressPoint, ProgressTrace
from spotlight_core.market.traces import ClockEvent, ClockTrace
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.tensor_store import TensorStore
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from spotlight_core.weights.store import WeightStore

RUN = f"test-live-fleet-{os.getpid()}"
TRACE = ProgressTrace(
    points=(
        ProgressPoint(
            iteration=0,
            phase="rollout",
            node="spot-0",
            event="notice",
            nth_request=1,
            denoise_step=4,
            seconds_left=20.0,
        ),
        ProgressPoint(
            iteration=0, phase="rollout", node="spot-1", event="kill", nth_request=1, denoise_step=3
        ),
        ProgressPoint(iteration=1, phase="rollout", node="spot-0", event="return"),
    )
)


@dataclass(slots=True, kw_only=True)
class Rig:
    config: RunConfig
    folder: Path
    cluster: RayCluster
    inbox: Inbox
    executor: RayExecutor
    scheduler: RequestScheduler
    coordinator: Coordinator
    fleet: LiveFleet
    policy: PolicyVersion
    words: list[object]


def make_rig(folder: Path, run_id: str, trace: ProgressTrace | ClockTrace | None, spot_nodes: int) -> Rig:
    torch.manual_seed(0)
    TinyQwenImage(build_transformer()).save_weights(folder / "tiny.safetensors")
    config = RunConfig(
        name="live",
        iterations=1,
        model=TinyModelConfig(weights=folder / "tiny.safetensors"),
        data=DataConfig(prompts=folder),
        sampler=OdeConfig(denoise_steps=6),
        fleet=FleetConfig(spot_nodes=spot_nodes, trace_speedup=1.0),
    )
    weights = build_model(config.model, "rollout").transformer.state_dict()
    policy = WeightStore(folder / "weights").publish("old", 0, weights)
    inbox, words = Inbox(epoch=1), []
    cluster = RayCluster(run_id)
    executor = RayExecutor(
        cluster=cluster,
        inbox=inbox,
        tensor_store=TensorStore(folder / "tensor_store"),
        node_log=NodeLog(folder=folder / "nodes"),
    )
    scheduler = RequestScheduler(rules=SchedulingRules(lease_seconds=120.0, max_attempts=8))
    journal = Journal(folder / "journal.jsonl", observers=[words.append])
    coordinator = Coordinator(decider=scheduler, nodes=executor, inbox=inbox, journal=journal)
    fleet = LiveFleet(
        config=config, cluster=cluster, executor=executor, inbox=inbox, run_folder=folder, trace=trace
    )
    return Rig(
        config=config,
        folder=folder,
        cluster=cluster,
        inbox=inbox,
        executor=executor,
        scheduler=scheduler,
        coordinator=coordinator,
        fleet=fleet,
        policy=policy,
        words=words,
    )


def make_requests(policy: PolicyVersion, iteration: int, count: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id=f"{iteration}/rollout/p{index}/0",
            kind="rollout",
            prompts=(Prompt(occurrence=f"{iteration}-{index}", text=f'A ticket that reads "{index}4"'),),
            seeds=(0, 1, 2, 3),
            policy=policy,
            fidelity=Fidelity(denoise_steps=6),
        )
        for index in range(count)
    ]


async def run_requests(rig: Rig, iteration: int, requests: list[GenerationRequest]) -> dict[str, str]:
    rig.fleet.on_phase("rollout", iteration)
    rig.coordinator.change_phase("rollout", iteration)
    submission = rig.coordinator.submit(requests)
    return {
        request.id: arrays_digest(rig.executor.results.take(ref))
        async for request, ref in submission.results()
    }


def expected_digests(rig: Rig, requests: list[GenerationRequest]) -> dict[str, str]:
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
        time.sleep(0.05)
    return False


def of_kind(rig: Rig, kind: type) -> list[Any]:
    return [word for word in rig.words if isinstance(word, kind)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = make_rig(tmp_path, RUN, TRACE, spot_nodes=2)
    rig.coordinator.start()
    try:
        rig.fleet.start()
        yield rig
    finally:
        rig.fleet.close()
        rig.coordinator.close()


@pytest.mark.slow
def test_preempted_requests_end_with_the_same_bits_and_nothing_is_left(rig: Rig) -> None:
    first, second = make_requests(rig.policy, 0, 8), make_requests(rig.policy, 1, 4)
    digests = asyncio.run(run_requests(rig, 0, first))
    assert wait_until(lambda: len(of_kind(rig, Lost)) == 2, 10)
    digests |= asyncio.run(run_requests(rig, 1, second))
    assert wait_until(lambda: len(of_kind(rig, NodeJoined)) == 4, 60), "spot-0 returns"

    assert digests == expected_digests(rig, first + second)
    assert rig.scheduler.counters.resumed == 1
    assert rig.scheduler.counters.recomputed == 1
    resumed = [start for start in of_kind(rig, Start) if start.from_denoise_step > 0]
    assert [start.from_denoise_step for start in resumed] == [4]
    assert [(lost.node, lost.cause) for lost in of_kind(rig, Lost)].count(("spot-1", "killed")) == 1
    assert ("spot-0", 2) in rig.executor.nodes()

    rig.fleet.close()
    assert wait_until(lambda: len(of_kind(rig, Lost)) == 4, 5)
    assert run_processes(RUN) == []
    assert not ray_folder(RUN).exists()
    lives = list(NodeLog(folder=rig.folder / "nodes").lives())
    stops = {(life.node, life.incarnation): life.stopped_at for life in lives}
    assert stops == {(lost.node, lost.incarnation): lost.stopped_at for lost in of_kind(rig, Lost)}
    starts = {(life.node, life.incarnation): life.started_at for life in lives}
    assert starts == {(node.node, node.incarnation): node.started_at for node in of_kind(rig, NodeJoined)}
    assert bury_open_nodes(rig.folder, time.time()) == []


@pytest.mark.slow
def test_faults_of_a_request_and_of_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = f"{RUN}-faults"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # Ray believes it; torch finds no driver and stays here
    rig = make_rig(tmp_path, run_id, None, spot_nodes=0)
    rig.coordinator.start()
    try:
        rig.fleet.start()
        good = make_requests(rig.policy, 0, 1)
        bad = replace(good[0], id="0/rollout/bad/0", fidelity=Fidelity(denoise_steps=6, reused_steps=(0,)))
        with pytest.raises(FleetError, match="step 0 has nothing to reuse"):
            asyncio.run(run_requests(rig, 0, [bad]))
        assert len(of_kind(rig, Failed)) == 1, "the request's own fault is not tried again"
        assert asyncio.run(run_requests(rig, 0, good)) == expected_digests(rig, good)

        node = run_processes(run_id, "reserved-0-1")
        assert {process.environ()["CUDA_VISIBLE_DEVICES"] for process in node} == {"5"}
        assert_stranger_refused(rig.cluster.address)
        listening = {
            (connection.laddr.ip.removeprefix("::ffff:"))
            for process in run_processes(run_id)
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}

        lost = replace(rig.policy, number=9)
        missing = replace(good[0], id="0/rollout/missing/0", policy=lost)
        with pytest.raises(FleetError, match="reserved-0 holds other weights than old-9"):
            asyncio.run(run_requests(rig, 0, [missing]))
    finally:
        rig.fleet.close()
        rig.coordinator.close()
    assert run_processes(run_id) == []


def assert_stranger_refused(address: str) -> None:
    """A client on this machine that does not know the run's token."""
    code = f"import ray; ray.init(address={address!r}, _node_ip_address='127.0.0.1')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    stranger = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert stranger.returncode != 0
    assert "InvalidAuthToken" in stranger.stderr


@pytest.mark.slow
def test_a_clock_trace_brings_and_takes_nodes(tmp_path: Path) -> None:
    run_id = f"{RUN}-clock"
    # The first node is there from the start and goes; a second one takes the slot.
    trace = ClockTrace(
        events=(ClockEvent(0.0, "add", "a"), ClockEvent(1.0, "remove", "a"), ClockEvent(1.5, "add", "b"))
    )
    rig = make_rig(tmp_path, run_id, trace, spot_nodes=1)
    rig.coordinator.start()
    try:
        rig.fleet.start()
        assert wait_until(lambda: ("spot-0", 2) in rig.executor.nodes(), 90)
        assert wait_until(lambda: len(of_kind(rig, Lost)) == 1, 10)
        notice = of_kind(rig, Notice)[0]
        assert (notice.node, notice.incarnation, notice.seconds_left) == ("spot-0", 1, 30.0)
        assert of_kind(rig, Lost)[0].cause == "released", "an idle node is let go at its notice"
        rig.fleet.on_phase("rollout", 0)

        rig.cluster.kill_node("spot-0", 2)  # nobody calls an idle node: its raylet is watched
        began = time.monotonic()
        assert wait_until(lambda: len(of_kind(rig, Lost)) == 2, 3)
        assert time.monotonic() - began < 3
        assert of_kind(rig, Lost)[1].cause == "killed"
    finally:
        rig.fleet.close()
        rig.coordinator.close()
    assert run_processes(run_id) == []
