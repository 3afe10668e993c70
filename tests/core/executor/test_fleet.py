"""What the fleet answers and offers when a market has no machine or a boot fails; nothing boots for real."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from spotlight_core.config import DataConfig, FleetConfig, RunConfig, TinyModelConfig
from spotlight_core.events import Acquire, BootFailed, Event, Lost, Offered, Withdrawn
from spotlight_core.executor.fleet import LiveFleet
from spotlight_core.executor.inbox import Clock
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.market.progress import ProgressPoint, ProgressTrace
from spotlight_core.market.traces import ClockEvent, ClockTrace, SlotEvent
from tests.core.executor.rig import wait_until

ACQUIRE = Acquire(node="spot-0", pool="spot")
NO_MACHINE = BootFailed(node="spot-0", pool="spot", error="the market has no machine")


class Played:
    """A fleet whose boots do what ``boot(node, incarnation)`` does; ``posted`` is what it said."""

    def __init__(
        self,
        folder: Path,
        boot: Callable[[str, int], None],
        trace: ClockTrace | ProgressTrace | None = None,
    ) -> None:
        self.posted: list[Event] = []
        self.boots: list[tuple[str, int]] = []
        self.log = NodeLog(folder=folder / "nodes")
        config = RunConfig(
            name="test",
            iterations=1,
            model=TinyModelConfig(weights=folder / "none.safetensors"),
            data=DataConfig(prompts=folder),
            fleet=FleetConfig(spot_nodes=1, trace_speedup=1.0),
        )

        def add_node(node: str, incarnation: int, gpus: object) -> None:
            self.boots.append((node, incarnation))
            boot(node, incarnation)

        executor = SimpleNamespace(
            attach=lambda *_: None,
            nodes=list,
            give_notice=lambda *_: None,
            lose=lambda *_: None,
            store=SimpleNamespace(name="tensor-store-epoch-1-0"),
        )
        self.fleet = LiveFleet(
            config=config,
            cluster=cast(Any, SimpleNamespace(add_node=add_node, kill_node=lambda *_: None)),
            executor=cast(Any, executor),
            inbox=cast(Any, SimpleNamespace(post=self.posted.append, clock=Clock(), epoch=1)),
            run_folder=folder,
            trace=trace,
        )

    def acquire(self) -> None:
        """Acquire and wait for the end of the boot."""
        self.fleet.acquire(ACQUIRE)
        boot = self.fleet._boots.get("spot-0")
        if boot is not None:
            boot.thread.join()


def fail(node: str, incarnation: int) -> None:
    raise RuntimeError("first line\nthe raylet did not start")


def test_a_boot_that_failed_before_its_start_record_costs_nothing_and_is_offered_again(
    tmp_path: Path,
) -> None:
    played = Played(tmp_path, fail)
    played.acquire()
    offer = Offered(node="spot-0", pool="spot")
    failed = BootFailed(node="spot-0", pool="spot", error="the raylet did not start")
    assert played.posted == [failed, offer]
    played.acquire()
    assert played.boots == [("spot-0", 1), ("spot-0", 2)]


def test_a_boot_that_failed_after_its_start_record_is_one_word_with_what_was_billed(tmp_path: Path) -> None:
    log = NodeLog(folder=tmp_path / "nodes")

    def begin(node: str, incarnation: int) -> None:
        log.start(node, incarnation, "spot", 1, 5.0)
        fail(node, incarnation)

    played = Played(tmp_path, begin)
    played.acquire()
    (life,) = log.lives()
    assert life.stopped_at is not None
    failed, _ = played.posted
    assert failed == BootFailed(
        node="spot-0",
        pool="spot",
        error="the raylet did not start",
        incarnation=1,
        gpus=1,
        started_at=5.0,
        stopped_at=life.stopped_at,
    )


def test_an_offer_after_a_failed_boot_can_be_taken_at_once(tmp_path: Path) -> None:
    played = Played(tmp_path, fail)

    def post(event: Event) -> None:
        played.posted.append(event)
        if isinstance(event, Offered) and len(played.boots) == 1:
            played.fleet.acquire(ACQUIRE)

    played.fleet._inbox.post = post  # type: ignore[method-assign]
    played.acquire()
    assert wait_until(lambda: len(played.posted) == 4, 20)
    assert [type(word) for word in played.posted] == [BootFailed, Offered] * 2
    assert played.boots == [("spot-0", 1), ("spot-0", 2)]


def test_what_a_progress_trace_has_taken_is_not_rented_before_it_returns(tmp_path: Path) -> None:
    points = (
        ProgressPoint(
            iteration=0, phase="rollout", node="spot-0", event="kill", nth_request=1, denoise_step=1
        ),
        ProgressPoint(iteration=1, phase="rollout", node="spot-0", event="return"),
    )
    played = Played(tmp_path, fail, ProgressTrace(points=points))
    played.log.start("spot-0", 1, "spot", 1, 5.0)
    played.log.strike("spot-0", 1, 6.0, "1.1", "r", 1)
    played.fleet._observe(Lost(node="spot-0", incarnation=1, cause="killed", stopped_at=6.0))
    played.acquire()
    assert played.posted == [NO_MACHINE]
    assert played.boots == []
    played.fleet.on_phase("rollout", 1)
    assert played.posted[1:] == [Offered(node="spot-0", pool="spot")]
    played.acquire()
    assert played.boots == [("spot-0", 2)]


CLOCK = ClockTrace(events=(ClockEvent(0.0, "add", "a"),))
LEAVE = SlotEvent(at_seconds=0.0, slot=0, change="notice")


def test_an_offer_that_a_clock_trace_takes_back_is_withdrawn(tmp_path: Path) -> None:
    played = Played(tmp_path, fail, CLOCK)
    played.fleet._play([LEAVE])
    assert played.posted == [Withdrawn(node="spot-0", pool="spot")]
    played.acquire()
    assert played.posted[1:] == [NO_MACHINE]
    assert played.boots == []


def test_a_machine_that_goes_while_it_boots_is_not_offered_again(tmp_path: Path) -> None:
    going = threading.Event()

    def wait(node: str, incarnation: int) -> None:
        assert going.wait(20)
        fail(node, incarnation)

    played = Played(tmp_path, wait, CLOCK)
    played.fleet.acquire(ACQUIRE)
    played.fleet._play([LEAVE])
    assert played.posted == [], "it has a notice instead, when it has booted"
    going.set()
    played.fleet._boots["spot-0"].thread.join()
    assert [type(word) for word in played.posted] == [BootFailed]
    played.fleet._closing.set()
