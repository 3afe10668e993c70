"""Events that the request scheduler takes in a second, and what one costs at ten times the size.

The scheduler of a run, at 10,000 requests that wait or run and 1,000 groups that all have one lease and
one request ahead.  Of the events 45 % are results, 45 % submissions of one request, 5 % commits and 5 %
failures.  Counted is the time from making an event to having its commands, with the lease timers that
the scheduler sets and under each order policy, the slowest of which is the figure; requests are made
before, since their clients make them.  The garbage collector runs as it would in a coordinator.
"""

import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from spotlight_core.events import (
    Command,
    Committed,
    Event,
    Failed,
    Finished,
    Load,
    NodeJoined,
    PhaseChanged,
    SetTimer,
    SPGroup,
    Start,
    Submitted,
    Timer,
    WeightsLoaded,
)
from spotlight_core.scheduling.order import build_order
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from tests.benchmarks import Measurement

REQUESTS, GROUPS, GPUS_PER_NODE = 10_000, 1_000, 8
ORDERS = ("fifo", "shortest_remaining", "earliest_deadline")
ROUNDS, EVENTS_PER_ROUND = 7, 40_000
TIMES = 10
SECONDS_PER_EVENT = 0.0045  # what 1,000 groups cause with requests of ten seconds
POLICY = PolicyVersion(label="old", number=1, digest="d" * 64)


def _requests(rng: random.Random) -> Iterator[GenerationRequest]:
    """Rollouts of 10 to 50 denoise steps, some of them reused, 1 to 8 rows."""
    prompts = (Prompt(occurrence="p", text='A sign "12"'),)
    fidelities = [
        Fidelity(denoise_steps=steps, reused_steps=tuple(range(2, steps, 4)) if reused else ())
        for steps in range(10, 51)
        for reused in (False, True)
    ]
    seeds = [tuple(range(rows)) for rows in range(1, 9)]
    number = 0
    while True:
        number += 1
        yield GenerationRequest(
            id=f"i0/rollout/{number}",
            kind="rollout",
            prompts=prompts,
            seeds=rng.choice(seeds),
            policy=POLICY,
            fidelity=rng.choice(fidelities),
        )


Step = tuple[type[Event], float, int, str, GenerationRequest]  # event, at, seq, lease, request


@dataclass(slots=True)
class Scenario:
    """A fleet under load: how it came to be, and the events to measure."""

    setup: list[Event] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Recorder:
    """Plays groups and clients against a scheduler, and records what it is told."""

    def __init__(self, order: str, times: int) -> None:
        self.scheduler = scheduler_under(order)
        self.scenario = Scenario()
        self.rng = random.Random(0)
        self.requests = _requests(self.rng)
        self.groups: list[SPGroup] = []
        self.held: dict[SPGroup, deque[Start]] = {}
        self.timers: deque[SetTimer] = deque()
        self.seq = 0
        self.seconds_per_event = SECONDS_PER_EVENT / times
        self._fill(REQUESTS * times, GROUPS * times)

    def _fill(self, requests: int, groups: int) -> None:
        self._tell(PhaseChanged(phase="rollout", iteration=0))
        self._tell(Submitted(requests=tuple(next(self.requests) for _ in range(requests)), deadline=0.0))
        for node in range(groups // GPUS_PER_NODE):
            event = NodeJoined(
                node=f"n{node}", incarnation=1, pool="spot", gpus=GPUS_PER_NODE, started_at=0.0
            )
            for load in self._tell(event):
                if isinstance(load, Load):
                    self.groups.append(load.group)
                    self._tell(WeightsLoaded(group=load.group, policy=POLICY, digest=POLICY.digest))

    def _tell(self, event: Event) -> list[Command]:
        self.seq += 1
        event = event.stamped(0.0, self.seq, 1)
        self.scenario.setup.append(event)
        return self._note(self.scheduler.decide(event))

    def _note(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            if isinstance(command, Start):
                self.held.setdefault(command.group, deque()).append(command)
            elif isinstance(command, SetTimer) and command.id.startswith("lease/"):
                self.timers.append(command)
        return commands

    def record(self, events: int) -> Scenario:
        """Go on for a number of events."""
        kinds = self.rng.choices((Finished, Submitted, Committed, Failed), (45, 45, 5, 5), k=events)
        for number, kind in enumerate(kinds):
            at = number * self.seconds_per_event
            while self.timers and self.timers[0].at <= at:
                timer = self.timers.popleft()
                self._step((Timer, timer.at, self.seq + 1, timer.id, self.request))
            if kind is Submitted:
                self.request = next(self.requests)
                self._step((kind, at, self.seq + 1, "", self.request))
                continue
            held = self.held[self.rng.choice(self.groups)]
            start = held[0] if kind is Committed else held.popleft()
            self._step((kind, at, self.seq + 1, start.lease, start.request))
        return self.scenario

    def _step(self, step: Step) -> None:
        self.seq += 1
        self.scenario.steps.append(step)
        self._note(self.scheduler.decide(build(step)))


def scheduler_under(order: str) -> RequestScheduler:
    """Failures are part of the load here: they neither end requests nor drive nodes out."""
    rules = SchedulingRules(lease_seconds=300.0, max_attempts=1_000, max_node_failures=1_000)
    return RequestScheduler(rules, build_order(order))


def build(step: Step) -> Event:
    """The event of a step, as the coordinator makes it: stamped."""
    kind, at, seq, lease, request = step
    if kind is Finished:
        return Finished(lease=lease, request=request.id, ref="r", digest="d", at=at, seq=seq, epoch=1)
    if kind is Submitted:
        return Submitted(requests=(request,), deadline=at + (seq * 7919) % 600, at=at, seq=seq, epoch=1)
    if kind is Failed:
        return Failed(lease=lease, error="cuda", fault="node", at=at, seq=seq, epoch=1)
    if kind is Committed:
        return Committed(
            lease=lease,
            request=request.id,
            next_denoise_step=4,
            ref="c",
            digest="d",
            released=False,
            at=at,
            seq=seq,
            epoch=1,
        )
    return Timer(id=lease, at=at, seq=seq, epoch=1)


def seconds_per_event(order: str, scenario: Scenario) -> list[float]:
    """One figure for each stretch of the scenario, played to a scheduler of its own."""
    scheduler = scheduler_under(order)
    for event in scenario.setup:
        scheduler.decide(event)
    figures = []
    for first in range(0, len(scenario.steps), EVENTS_PER_ROUND):
        steps = scenario.steps[first : first + EVENTS_PER_ROUND]
        began = time.perf_counter()
        for step in steps:
            scheduler.decide(build(step))
        figures.append((time.perf_counter() - began) / len(steps))
    if scheduler.counters.expired:
        raise ValueError(f"{scheduler.counters.expired} leases ran out: this is about a healthy fleet")
    return figures


def measure() -> Measurement:
    """All orders at the size of the target, the slowest one at ten times that."""
    rates, details = {}, {}
    for order in ORDERS:
        scenario = Recorder(order, 1).record(ROUNDS * EVENTS_PER_ROUND)
        rates[order] = 1 / statistics.median(seconds_per_event(order, scenario))
        details[f"{order}, events/s"] = rates[order]
    slowest = min(rates, key=lambda order: rates[order])
    scenario = Recorder(slowest, TIMES).record(ROUNDS * EVENTS_PER_ROUND)
    large = statistics.median(seconds_per_event(slowest, scenario))
    details[f"{slowest}, an event at {TIMES} times the size, times as long (target <= 1.6)"] = (
        large * rates[slowest]
    )
    return Measurement(value=rates[slowest], unit="events/s", details=details)
