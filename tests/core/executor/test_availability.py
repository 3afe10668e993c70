"""Which machines the market has: all without a trace, what a trace has taken and not returned."""

from spotlight_core.config import FleetConfig
from spotlight_core.executor.availability import Availability, pool_of
from spotlight_core.market.progress import ProgressPoint, ProgressTrace
from spotlight_core.market.traces import ClockEvent, ClockTrace, SlotEvent

FLEET = FleetConfig(spot_nodes=2, trace_speedup=1.0)


def test_a_nodes_name_tells_its_pool() -> None:
    assert [pool_of(node) for node in ("reserved-0", "spot-12", "on-demand-3")] == [
        "reserved",
        "spot",
        "on_demand",
    ]


def test_without_a_trace_every_machine_is_there() -> None:
    market = Availability(FLEET, None)
    assert market.first() == ["reserved-0", "spot-0", "spot-1"]
    assert market.has("spot-1")
    assert market.points("spot-0") == ()
    assert market.timeline == []


def test_a_progress_trace_holds_back_what_it_took() -> None:
    notice = ProgressPoint(
        iteration=0, phase="rollout", node="spot-0", event="notice", nth_request=1, denoise_step=2
    )
    again = ProgressPoint(
        iteration=3, phase="explore", node="spot-0", event="kill", nth_request=1, denoise_step=0
    )
    back = ProgressPoint(iteration=2, phase="explore", node="spot-0", event="return")
    market = Availability(FLEET, ProgressTrace(points=(notice, back, again)))
    assert market.first() == ["reserved-0", "spot-0", "spot-1"]
    assert market.points("spot-0") == (notice, back, again)
    assert market.reach("rollout", 0) == []
    market.struck("spot-0")
    assert not market.has("spot-0")
    assert market.has("spot-1")
    assert market.reach("train", 0) == []
    assert market.reach("train", 1) == ["spot-0"]
    assert market.reach("publish", 1) == []
    assert market.has("spot-0")
    assert market.points("spot-0") == (back, again), "what its former life met is over"


def test_a_clock_trace_brings_and_takes_slots() -> None:
    events = (ClockEvent(0.0, "add", "a"), ClockEvent(5.0, "add", "b"), ClockEvent(9.0, "remove", "a"))
    market = Availability(FLEET, ClockTrace(events=events))
    assert market.first() == ["reserved-0", "spot-0"]
    assert not market.has("spot-1")
    joined, left = market.timeline
    market.change(joined)
    assert market.has("spot-1")
    market.change(left)
    market.struck("spot-0")
    assert not market.has("spot-0")
    market.change(SlotEvent(at_seconds=9.5, slot=0, change="join"))
    assert market.has("spot-0"), "the next machine in its place is not held back by the notice of the last"
