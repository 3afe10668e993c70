"""What is under way in virtual time: stretches of denoising, and requests that a client waits for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from spotlight_core.events import Start
from spotlight_core.simulator.virtual_time import Entry, Occasion
from spotlight_core.types import GenerationRequest


@dataclass(slots=True, kw_only=True)
class Running:
    """A lease on a group, since ``begun``."""

    start: Start
    begun: float
    step_seconds: float
    entries: list[Entry] = field(default_factory=list)

    def at_step(self, denoise_step: int) -> float:
        """When the boundary before ``denoise_step`` is reached (reused steps cost nothing)."""
        first, reused = self.start.from_denoise_step, set(self.start.request.fidelity.reused_steps)
        computed = sum(step not in reused for step in range(first, denoise_step))
        return self.begun + computed * self.step_seconds

    def last_boundary(self, now: float) -> int:
        """The denoise step before which it was last; where it began when it has passed none."""
        first, steps = self.start.from_denoise_step, self.start.request.fidelity.denoise_steps
        return max((step for step in range(first + 1, steps) if self.at_step(step) <= now), default=first)


class Submission:
    """Requests under way in virtual time; await ``occasions[request]`` for the ref, None if aborted."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests = tuple(requests)
        self.occasions: dict[str, Occasion[str | None]] = {r.id: Occasion() for r in requests}
