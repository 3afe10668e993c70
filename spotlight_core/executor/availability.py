"""Which machines the market has for the fleet's nodes, by the run's trace; all of them without one.

A progress-keyed trace takes and returns nodes where the run is; a clock-keyed one when its time has
come.  Reserved and on-demand machines are always there.
"""

import threading

from spotlight_core.config import FleetConfig, Pool
from spotlight_core.events import Phase
from spotlight_core.market.availability import ProgressMarket, Since
from spotlight_core.market.progress import ProgressPoint, ProgressTrace
from spotlight_core.market.traces import ClockTrace, SlotEvent, slots


def pool_of(node: str) -> Pool:
    """The pool that a node's name tells."""
    prefix = node.rpartition("-")[0]
    return "reserved" if prefix == "reserved" else "on_demand" if prefix == "on-demand" else "spot"


class Availability:
    """See the module's text.  Called from several threads."""

    def __init__(self, fleet: FleetConfig, trace: ClockTrace | ProgressTrace | None) -> None:
        self._fleet = fleet
        self._progress = ProgressMarket(trace.points if isinstance(trace, ProgressTrace) else ())
        self._by_clock = isinstance(trace, ClockTrace)
        self._since: Since | None = None
        self._lock = threading.Lock()
        timeline = (
            slots(trace, fleet.spot_nodes, fleet.trace_speedup) if isinstance(trace, ClockTrace) else []
        )
        spots = range(fleet.spot_nodes)
        self._there = {f"spot-{slot}" for slot in spots}
        if isinstance(trace, ClockTrace):
            first = {event.slot for event in timeline if event.at_seconds <= 0 and event.change == "join"}
            self._there = {f"spot-{slot}" for slot in first}
        self.timeline: list[SlotEvent] = [event for event in timeline if event.at_seconds > 0]
        """What a clock-keyed trace does after the start, in order."""

    def first(self) -> list[str]:
        """The nodes that there are at a run's start."""
        reserved = [f"reserved-{index}" for index in range(self._fleet.reserved_nodes)]
        spots = [f"spot-{slot}" for slot in range(self._fleet.spot_nodes)]
        return reserved + [node for node in spots if self.has(node)]

    def has(self, node: str) -> bool:
        """Whether there is a machine for the node now."""
        with self._lock:
            there = pool_of(node) != "spot" or node in self._there
            return there and not self._progress.away(node)

    def points(self, node: str) -> tuple[ProgressPoint, ...]:
        """What the trace still has before a life of the node that begins now."""
        with self._lock:
            return tuple(self._progress.points_of(node, self._since))

    def struck(self, node: str) -> None:
        """The trace has taken the node: a progress-keyed one holds it back until it returns."""
        with self._lock:
            if not self._by_clock:  # its slot knows by itself, and may be there again already
                self._progress.struck(node)

    def change(self, event: SlotEvent) -> None:
        """A clock-keyed trace brings or takes a slot."""
        with self._lock:
            change = self._there.add if event.change == "join" else self._there.discard
            change(f"spot-{event.slot}")

    def reach(self, phase: Phase, iteration: int) -> list[str]:
        """The run has come to a phase: the nodes that return with it."""
        with self._lock:
            self._since = self._progress.since(phase, iteration) or self._since
            return self._progress.returns(phase, iteration)
