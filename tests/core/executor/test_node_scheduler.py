"""A node's scheduler in this process: its record, its lease, and what the provider tells it."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from spotlight_core.config import DataConfig, FleetConfig, RunConfig, TinyModelConfig
from spotlight_core.executor.messages import NodeSetup, Noticed
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.executor.node_scheduler import NodeScheduler
from tests.core.executor.rig import wait_until


def make_node(folder: Path, **fleet: Any) -> tuple[NodeScheduler, list[tuple[int, int]], list[float]]:
    """The scheduler, the (rank, attempt) of each process that it made, and when it would have ended."""
    config = RunConfig(
        name="test",
        iterations=1,
        model=TinyModelConfig(weights=folder / "none.safetensors"),
        data=DataConfig(prompts=folder),
        fleet=FleetConfig(**fleet),
    )
    setup = NodeSetup(
        node="spot-0",
        incarnation=3,
        pool="spot",
        gpus=config.fleet.gpus_per_node,
        epoch=1,
        config=config.model_dump_json(),
        weights=folder,
        nodes=folder / "nodes",
        store="unused",
    )
    spawned: list[tuple[int, int]] = []
    deaths: list[float] = []

    def spawn(setup: NodeSetup, rank: int, attempt: int) -> str:
        assert NodeLog(folder=setup.nodes).life("spot-0", 3) is not None, "billed before anything else"
        spawned.append((rank, attempt))
        return f"actor {rank}"

    return NodeScheduler(setup, spawn, lambda: deaths.append(time.monotonic())), spawned, deaths


def test_it_is_billed_from_its_first_second_to_its_stop(tmp_path: Path) -> None:
    before = time.time()
    node, spawned, _ = make_node(tmp_path, gpus_per_node=2)
    (life,) = NodeLog(folder=tmp_path / "nodes").lives()
    assert before <= life.started_at <= time.time()
    assert (life.incarnation, life.pool, life.gpus, life.stopped_at) == (3, "spot", 2, None)
    assert spawned == [(0, 0), (1, 0)]
    assert node.actors() == ["actor 0", "actor 1"]
    stopped_at = node.stop()
    assert node.stop() == stopped_at
    (life,) = NodeLog(folder=tmp_path / "nodes").lives()
    assert life.stopped_at == stopped_at


def test_a_node_whose_lease_is_over_ends_without_a_stop_record(tmp_path: Path) -> None:
    node, _, deaths = make_node(tmp_path, node_lease_seconds=1.0)
    node.renew()
    renewed_at = time.monotonic()
    assert wait_until(lambda: bool(deaths), 10)
    assert deaths[0] - renewed_at > 0.9
    node.renew()
    assert len(deaths) == 2, "a renewal after the lease comes too late"
    (life,) = NodeLog(folder=tmp_path / "nodes").lives()
    assert life.stopped_at is None


def test_a_renewed_or_stopped_node_lives(tmp_path: Path) -> None:
    node, _, deaths = make_node(tmp_path, node_lease_seconds=1.0)
    for _ in range(8):
        node.renew()
        time.sleep(0.2)
    node.stop()
    time.sleep(1.5)
    assert deaths == []


def test_the_providers_notice_is_news_to_who_waits(tmp_path: Path) -> None:
    told = tmp_path / "notice-spot-0"
    notices = {"type": "file", "path": str(tmp_path / "notice-{node}"), "poll_seconds": 0.05}
    node, _, _ = make_node(tmp_path, notices=notices)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(node.news, 0)
        told.write_text('{"seconds_left": 17}')
        news = waiting.result(20)
        assert [(type(each), each.source) for each in news] == [(Noticed, "file")]
        assert 16 <= news[0].seconds_left <= 17
        assert node.news(0) == news, "who asks again is told again"
        node.acknowledge()
        waiting = pool.submit(node.news, 1)
        node.stop()
        assert waiting.result(20) == [], "a stop answers who waits"
