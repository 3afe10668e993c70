"""Synthetic spot markets: machines that come and go, and storms that take many of them at once.

Each machine is there and away by turns, both for exponentially distributed times, from its long-run
share on.  Storms are a Poisson process; each takes every machine present with the same probability.
All draws are functions of the seed and the machine's number, so that a trace of more machines begins
with those of fewer.
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from spotlight_core.errors import BadInputError
from spotlight_core.market.traces import Change, ClockEvent, ClockTrace
from spotlight_core.philox import named_generator

MOST_DRAWS = 5e6  # some minutes of work, and more than any run replays


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketModel:
    """Parameters of a market.

    ``mean_life_minutes`` until a machine is taken, storms apart; ``mean_away_minutes`` until it is back.
    ``notice_seconds`` is told in the file's head: a row is the moment of the notice, and
    ``fleet.grace_seconds`` gives how long a replay leaves the node after it.

    Raises:
        BadInputError: a parameter is out of range.
    """

    nodes: int
    hours: float
    mean_life_minutes: float
    mean_away_minutes: float
    storms_per_day: float = 0.0
    storm_fraction: float = 0.0
    notice_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (
            ("nodes", 1),
            ("hours", 0.0),
            ("mean_life_minutes", 0.0),
            ("mean_away_minutes", 0.0),
        ):
            value = getattr(self, name)
            if not (least <= value < math.inf and value > 0):
                raise BadInputError(f"{name} = {value}", "give a finite number above 0")
        for name in ("storms_per_day", "notice_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInputError(f"{name} = {getattr(self, name)}", "give a finite number, 0 or more")
        if not 0 <= self.storm_fraction <= 1:
            raise BadInputError(f"storm_fraction = {self.storm_fraction}", "give a share between 0 and 1")
        draws = self.nodes * self.hours * (60.0 / self.mean_life_minutes + self.storms_per_day / 24.0)
        if draws > MOST_DRAWS:
            raise BadInputError(
                f"{self.nodes} nodes over {self.hours:g} hours, lives of {self.mean_life_minutes:g} minutes "
                f"and {self.storms_per_day:g} storms a day are about {draws:.2g} events",
                f"ask for at most {MOST_DRAWS:g}: fewer nodes, hours or storms, or longer lives",
            )

    @property
    def preemptions_per_node_hour(self) -> float:
        """Of a machine while it is there: its own end and the storms."""
        return 60.0 / self.mean_life_minutes + self.storms_per_day / 24.0 * self.storm_fraction

    @property
    def present_share(self) -> float:
        """The long-run share of the time that a machine is there."""
        life_minutes = 60.0 / self.preemptions_per_node_hour
        return life_minutes / (life_minutes + self.mean_away_minutes)


def generated_trace(model: MarketModel, seed: int) -> ClockTrace:
    """The trace of a seed; equal on every machine.

    Raises:
        BadInputError: no machine is ever there, which no reader would take.
    """
    storms = _storms(model, seed)
    events: list[tuple[int, int, Change, str]] = []
    for number in range(model.nodes):
        events += _machine(model, seed, number, storms)
    # By time, then by machine; the two rows of a life of no length keep their order.
    events.sort(key=lambda event: event[:2])
    if not events:
        raise BadInputError(
            f"no machine is there within {model.hours:g} hours", "give more nodes or hours, or another seed"
        )
    return ClockTrace(events=tuple(ClockEvent(ms / 1000.0, change, node) for ms, _, change, node in events))


def bamboo_csv(trace: ClockTrace, model: MarketModel, seed: int) -> str:
    """The trace as ``milliseconds,add|remove,node`` rows, with its parameters in comment lines."""
    told = ", ".join(f"{field.name}={getattr(model, field.name):g}" for field in fields(model))
    head = f"# Synthetic spot market, seed {seed}: {told}\n"
    rows = (f"{round(at * 1000)},{change},{node}\n" for at, change, node in trace.events)
    return head + "".join(rows)


def _storms(model: MarketModel, seed: int) -> list[float]:
    """Seconds of the storms."""
    draws = named_generator("trace", seed, "storms")
    mean_seconds = 86_400.0 / model.storms_per_day if model.storms_per_day else math.inf
    at, found = 0.0, []
    while mean_seconds < math.inf:
        at += draws.exponential(mean_seconds)
        if at >= model.hours * 3600.0:
            break
        found.append(at)
    return found


def _machine(
    model: MarketModel, seed: int, number: int, storms: list[float]
) -> list[tuple[int, int, Change, str]]:
    """``(milliseconds, machine, change, name)`` of one machine; every life has a name of its own."""
    draws = named_generator("trace", seed, "machine", number)
    struck = draws.random(len(storms)) < model.storm_fraction
    hits = [at for at, hit in zip(storms, struck, strict=True) if hit]
    there = bool(draws.random() < model.present_share)
    end = model.hours * 3600.0
    at, life = 0.0, 0
    found: list[tuple[int, int, Change, str]] = []
    while at < end:
        name = f"node-{number}-{life}"
        if there:
            found.append((round(at * 1000), number, "add", name))
            at = _taken(at, draws, model, hits)
            if at < end:
                found.append((round(at * 1000), number, "remove", name))
            life += 1
        else:
            at += draws.exponential(model.mean_away_minutes * 60.0)
        there = not there
    return found


def _taken(at: float, draws: np.random.Generator, model: MarketModel, hits: list[float]) -> float:
    own = at + draws.exponential(model.mean_life_minutes * 60.0)
    return min([own, *(hit for hit in hits if hit > at)])
