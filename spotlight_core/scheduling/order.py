"""Which request goes next: small classes that see only what lets them choose."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from spotlight_core.types import Kind

_URGENCY: dict[Kind, int] = {"rollout": 0, "audit": 1, "evaluate": 2, "explore": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A pending request as an order sees it.  ``arrival`` is its number in the queue."""

    request: str
    kind: Kind
    arrival: int


class Order(Protocol):
    def first(self, candidates: Iterable[Candidate]) -> Candidate:
        """The one to start; candidates are never empty."""
        ...


class FirstComeFirstServed:
    """Rollout before exploration, then by arrival."""

    def first(self, candidates: Iterable[Candidate]) -> Candidate:
        return min(candidates, key=lambda c: (_URGENCY[c.kind], c.arrival))
