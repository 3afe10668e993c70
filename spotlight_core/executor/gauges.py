"""The run in numbers, for whoever watches it: what its deciders know now, as Prometheus text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spotlight_core.drive import Decider, Together
from spotlight_core.market.fleet import FleetPlanner, FleetSnapshot
from spotlight_core.scheduling.records import QueueSnapshot
from spotlight_core.scheduling.requests import RequestScheduler

Sample = tuple[str, float]  # labels as they stand in the text, and the value


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """What each decider knows at one moment; None for one that the run does not have."""

    queue: QueueSnapshot | None = None
    fleet: FleetSnapshot | None = None

    @classmethod
    def of(cls, decider: Decider) -> "Gauges":
        """Only while nothing is decided: a decider is one thread's."""
        queue, fleet = None, None
        for part in decider.deciders if isinstance(decider, Together) else (decider,):
            if isinstance(part, RequestScheduler):
                queue = part.snapshot()
            elif isinstance(part, FleetPlanner):
                fleet = part.snapshot()
        return cls(queue=queue, fleet=fleet)

    def requests(self) -> dict[str, int]:
        """Requests that are not settled: those that wait by kind, the others by what their lease does."""
        queue = self.queue
        if queue is None:
            return {}
        waiting = {f"pending_{kind}": count for kind, count in queue.pending.items()}
        return {**waiting, "in_flight": queue.in_flight, "queued": queue.queued}

    def groups(self) -> dict[str, int]:
        """SPGroups by what they do."""
        queue = self.queue
        if queue is None:
            return {}
        return {
            "idle": queue.groups_idle,
            "busy": queue.groups_busy,
            "loading": queue.groups_loading,
            "lost": queue.groups_lost,
        }

    def nodes(self) -> dict[str, int]:
        """Nodes by state; ``waiting`` ones are offered and not yet rented."""
        fleet = self.fleet
        if fleet is None:
            return {}
        states = {"booting": fleet.booting, "joined": fleet.joined, "leaving": fleet.leaving}
        return {state: len(names) for state, names in states.items()} | {"waiting": len(fleet.waiting)}


def prometheus(gauges: Gauges, iteration: int, sizes: Mapping[str, float]) -> str:
    """All of it in Prometheus's text format; ``sizes``: more gauges by name."""
    lines: list[str] = []
    for name, meaning, counts in (
        ("requests", "Requests that are not settled.", gauges.requests()),
        ("groups", "SPGroups of the nodes that are there.", gauges.groups()),
        ("nodes", "Nodes that are there or wanted.", gauges.nodes()),
    ):
        samples = [(f'{{state="{state}"}}', count) for state, count in counts.items()]
        lines += _metric(name, "gauge", meaning, samples)
    if gauges.fleet is not None:
        lines += _metric("gpus", "gauge", "GPUs that joined or boot.", [("", gauges.fleet.gpus)])
    counters = gauges.queue.counters if gauges.queue is not None else {}
    for name, count in counters.items():
        lines += _metric(f"{name}_total", "counter", "What the queue lived through.", [("", count)])
    lines += _metric("iteration", "gauge", "The iteration under way.", [("", iteration)])
    for name, value in sorted(sizes.items()):
        lines += _metric(name, "gauge", "Held now.", [("", value)])
    return "".join(f"{line}\n" for line in lines)


def _metric(name: str, kind: str, meaning: str, samples: Sequence[Sample]) -> Iterator[str]:
    yield f"# HELP spotlight_{name} {meaning}"
    yield f"# TYPE spotlight_{name} {kind}"
    for labels, value in samples:
        yield f"spotlight_{name}{labels} {value}"
