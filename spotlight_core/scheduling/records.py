"""What the request scheduler keeps of requests, nodes and leases."""

from dataclasses import dataclass
from typing import Literal

from spotlight_core.events import NodeKey, SPGroup
from spotlight_core.types import GenerationRequest

Status = Literal["pending", "in_flight", "yielding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingRules:
    """Limits of the queue.

    ``lease_seconds``: silence after which a lease, or a load of weights, is taken for lost, and how
    long requests wait for any node at all.  ``max_attempts``: failures and losses of one request.
    ``max_node_failures``: failures in a row after which a node is let go.
    """

    lease_seconds: float
    max_attempts: int
    max_node_failures: int = 3


@dataclass(slots=True, kw_only=True)
class Entry:
    """A request that has not reached its end, and where it would go on."""

    request: GenerationRequest
    arrival: int
    status: Status = "pending"
    from_denoise_step: int = 0
    state_ref: str | None = None
    failures: int = 0
    failed_on: NodeKey | None = None  # tried elsewhere first, if there is an elsewhere


@dataclass(slots=True, kw_only=True)
class Node:
    """One life of a node; its one SP group has degree 1."""

    name: str
    incarnation: int
    pool: str
    idle_since: int
    draining: bool = False
    loading: str | None = None
    load_by: float = 0.0
    loaded: str | None = None
    lease: str | None = None
    failures_in_a_row: int = 0

    @property
    def key(self) -> NodeKey:
        return self.name, self.incarnation

    @property
    def group(self) -> SPGroup:
        return SPGroup(node=self.name, generation=self.incarnation)

    @property
    def idle(self) -> bool:
        return not self.draining and self.loading is None and self.lease is None


@dataclass(slots=True, kw_only=True)
class Lease:
    """A request on a node, until ``alive_until`` unless the node gives another sign of life."""

    id: str
    request: str
    node: NodeKey
    alive_until: float


@dataclass(slots=True)
class Counters:
    """What the queue lived through."""

    resumed: int = 0
    recomputed: int = 0
    duplicates_dropped: int = 0
    leases: int = 0
    submitted: int = 0
