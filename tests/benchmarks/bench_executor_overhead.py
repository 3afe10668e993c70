"""The share of an actor's time that is denoising: commits on, the next request prefetched.

In-actor denoise time over wall time from the first to the last denoise step, at steps of 20 ms (the
value) and of 5 ms.  The bare loop runs in between, in the same actor and thread.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from spotlight_core.events import SPGroup
from spotlight_core.types import GenerationRequest
from tests.benchmarks import Measurement
from tests.core.executor.rig import Rig, live_rig, make_requests

STEPS = 20
ROUNDS = 8
REQUESTS = 26  # a round: more than 200 in all
SHORT_TARGET = 0.85


@dataclass(slots=True)
class Span:
    """Denoise steps since the last look: seconds in them, and from the first's begin to the last's end."""

    steps: int = 0
    seconds: float = 0.0
    began: float = 0.0
    ended: float = 0.0

    @property
    def share(self) -> float:
        return self.seconds / (self.ended - self.began)


def watch_steps(actor: Any) -> None:
    """Called inside the actor: measure its denoise steps."""
    engine, advance = actor._engine, actor._engine._advance
    actor.span = Span()

    def timed(*arguments: object) -> None:
        began = time.perf_counter()
        advance(*arguments)
        span: Span = actor.span
        span.ended = time.perf_counter()
        span.began = span.began or began
        span.seconds += span.ended - began
        span.steps += 1

    engine._advance = timed


def take_span(actor: Any) -> Span:
    span: Span = actor.span
    actor.span = Span()
    return span


def bare_loop(actor: Any, requests: list[GenerationRequest]) -> Span:
    """The same requests with nothing around the engine, on the actor's own denoise thread."""
    take_span(actor)
    actor._denoiser.submit(lambda: [actor._engine.generate(request) for request in requests]).result()
    return take_span(actor)


def _sized(actor: Any, rig: Rig, milliseconds: float) -> int:
    """The fewest rows whose denoise step takes so long."""
    for rows in range(1, 129):
        probe = make_requests(rig.policy, 0, 1, STEPS, rows)
        spans = [ray.get(actor.__ray_call__.remote(bare_loop, probe)) for _ in range(3)]
        # The least disturbed one, so that no step is shorter than it says.
        if min(span.seconds / span.steps for span in spans) >= milliseconds / 1e3:
            return rows
    raise RuntimeError(f"no batch takes {milliseconds} ms a step")


def _share(actor: Any, rig: Rig, rows: int, first: int) -> tuple[float, float, float]:
    """Shares of the executor and of the bare loop, and milliseconds of a step."""
    live, bare = Span(), Span()
    wall = {"live": 0.0, "bare": 0.0}
    for part in range(ROUNDS):
        requests = make_requests(rig.policy, first + part, REQUESTS, STEPS, rows)
        alone = ray.get(actor.__ray_call__.remote(bare_loop, requests))
        rig.run(requests)
        through = ray.get(actor.__ray_call__.remote(take_span))
        for total, span, name in ((live, through, "live"), (bare, alone, "bare")):
            total.seconds += span.seconds
            total.steps += span.steps
            wall[name] += span.ended - span.began
    return live.seconds / wall["live"], bare.seconds / wall["bare"], 1e3 * live.seconds / live.steps


def measure() -> Measurement:
    with (
        tempfile.TemporaryDirectory() as folder,
        live_rig(Path(folder), "bench-overhead", steps=STEPS, spot_nodes=0) as rig,
    ):
        rig.begin_phase("rollout", 0)
        rig.run(make_requests(rig.policy, 1, 4, STEPS))
        actor = rig.actor(SPGroup(node="reserved-0", incarnation=1))
        ray.get(actor.__ray_call__.remote(watch_steps))
        details: dict[str, float | str] = {"requests at each size": str(ROUNDS * REQUESTS)}
        shares = []
        for milliseconds, first in ((20.0, 100), (5.0, 200)):
            rows = _sized(actor, rig, milliseconds)
            share, bare, step = _share(actor, rig, rows, first)
            shares.append(share)
            size = f"steps of {milliseconds:g} ms"
            details[f"{size}: measured ms"] = step
            details[f"{size}: denoising share"] = share
            details[f"{size}: of the bare loop"] = bare
        verdict = "ok" if shares[1] >= SHORT_TARGET else "short"
        details["steps of 5 ms: target"] = f">={SHORT_TARGET} {verdict}"
    return Measurement(value=shares[0], unit="of the time from first to last step", details=details)
