"""What the request scheduler keeps of requests, leases, groups and nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from spotlight_core.config.fleet import FleetConfig
from spotlight_core.events import NodeKey, SPGroup
from spotlight_core.scheduling.order import KINDS
from spotlight_core.types import GenerationRequest, PolicyVersion

if TYPE_CHECKING:
    from spotlight_core.scheduling.groups import GroupList

Status = Literal["pending", "in_flight", "yielding", "held", "settled"]
HeapItem = tuple[float, int, "Entry"]  # key, arrival, entry: two entries never share an arrival


EXCUSED = 10  # a store that stays away must not have a request start for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingRules:
    """Limits of the queue.

    ``lease_seconds``: silence after which a lease, or a load of weights, is taken for lost.
    ``max_attempts``: failures of one request; what a provider takes away is none.  Leases that end through
    nobody's fault, as when the Tensor Store is away, are none either, but ``EXCUSED`` times as many end it.
    ``max_node_failures``: failures in a row after which a node is let go.
    ``nodes_seconds``: how long requests wait for any node at all.
    ``prefetch``: hand a group its next request while it denoises the one before.
    ``sleep``: reserved nodes hold no weights while training runs.
    """

    lease_seconds: float
    max_attempts: int
    max_node_failures: int = 3
    nodes_seconds: float = 600.0
    prefetch: bool = True
    sleep: bool = False

    @classmethod
    def of(cls, config: FleetConfig, *, sleep: bool = False) -> "SchedulingRules":
        """The limits that a recipe's ``[fleet]`` sets."""
        return cls(
            lease_seconds=config.lease_seconds,
            max_attempts=config.max_attempts,
            max_node_failures=config.max_node_failures,
            nodes_seconds=config.nodes_seconds,
            prefetch=config.prefetch,
            sleep=sleep,
        )


# Entries and leases are made and dropped with every request: out of the garbage collector's sight, they
# cost it nothing.  They refer to one another, so whoever ends a lease also takes it off its entry.


class Held(msgspec.Struct, frozen=True, gc=False):
    """A state in the memory of some ranks of a node, later than the last commit."""

    ref: str
    digest: str
    denoise_step: int
    ranks: tuple[int, ...]


class Entry(msgspec.Struct, kw_only=True, gc=False, eq=False):
    """A request that has not reached its end, and where it would go on."""

    request: GenerationRequest
    arrival: int
    urgency: int
    shelf: "Shelf"
    deadline: float | None
    status: Status = "pending"
    lease: "Lease | None" = None
    from_denoise_step: int = 0
    state_ref: str | None = None
    state_digest: str | None = None
    held: Held | None = None
    failures: int = 0
    excused: int = 0
    failed_on: NodeKey | None = None  # tried elsewhere first, if there is an elsewhere


class Lease(msgspec.Struct, kw_only=True, gc=False, eq=False):
    """A request on a group, until ``alive_until`` unless the group gives another sign of life.

    ``begun`` once the group denoises it; ``abandoned`` when it was told to drop it.  ``state_ref``: the
    commit that it began from.
    """

    id: str
    entry: Entry
    group: "Group"
    state_ref: str | None = None
    alive_until: float = 0.0
    begun: bool = False
    abandoned: bool = False


class Result(msgspec.Struct, gc=False, eq=False):
    """What a request that is done has come to: where it is, its digest, and what it was asked of."""

    ref: str
    digest: str
    shelf: "Shelf"


@dataclass(slots=True, eq=False)
class Shelf:
    """What waits for one policy version: a heap for each urgency.

    A heap may hold entries that have been settled meanwhile; ``waiting`` counts the others.
    ``loading``: how many groups load this version.  ``failed_on``: nodes that could not.
    """

    policy: PolicyVersion
    heaps: tuple[list[HeapItem], ...] = field(default_factory=lambda: tuple([] for _ in KINDS))
    waiting: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    loading: int = 0
    failed_on: set[NodeKey] = field(default_factory=set)
    failures_in_a_row: int = 0


@dataclass(slots=True, eq=False)
class Group:
    """An SPGroup: idle, loading, or with a lease that runs and perhaps one behind it.

    ``down``: its process is gone, or has been silent for too long.  ``settling``: its ranks are to form
    other groups, so nothing new comes to it.  ``listed``: the list of idle groups, or of those with room
    behind their lease, that it stands in since ``listed_at``.
    """

    ref: SPGroup
    node: "Node"
    running: Lease | None = None
    queued: Lease | None = None
    loaded: Shelf | None = None
    loading: Shelf | None = None
    load_by: float = 0.0
    down: bool = False
    settling: bool = False
    listed: "GroupList | None" = None
    listed_at: int = 0

    @property
    def occupied(self) -> bool:
        """Whether something is still to come from it."""
        return self.running is not None or self.queued is not None or self.loading is not None


@dataclass(slots=True, eq=False)
class Node:
    """One life of a node.  ``side``: 1 when training owns it, else 0.

    ``draining``: nothing else is placed on it, and it has until ``drain_by``; ``noticed`` when it is the
    provider that takes it away.

    ``there``: ranks that have a process, in order; ``noticed_ranks`` those that will be taken, and when.
    ``regrouping``: ranks that form new groups, of ``generation``, are not in ``groups`` yet; ``shelves``
    says what they hold.  ``held``: requests whose states are held on the node, until they go on.
    """

    key: NodeKey
    side: int
    groups: dict[tuple[int, ...], Group] = field(default_factory=dict)
    there: list[int] = field(default_factory=list)
    noticed_ranks: dict[int, float] = field(default_factory=dict)
    generation: int = 0
    regrouping: bool = False
    shelves: "dict[int, Shelf | None]" = field(default_factory=dict)
    held: list[Entry] = field(default_factory=list)
    failures_in_a_row: int = 0
    draining: bool = False
    noticed: bool = False
    released: bool = False
    drain_by: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.key[0]}#{self.key[1]}"

    def group_of(self, rank: int) -> Group | None:
        return next((group for ranks, group in self.groups.items() if rank in ranks), None)


@dataclass(slots=True)
class Counters:
    """What the queue lived through.

    ``refused``: results of a former coordinator, or of a former life of a request's name.
    """

    resumed: int = 0
    recomputed: int = 0
    duplicates_dropped: int = 0
    leases: int = 0
    submitted: int = 0
    refused: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """How many of what there are at one moment.

    ``pending`` by kind.  ``in_flight`` are leases that run, ``queued`` those behind them.  A group that
    is lost has no process, or was silent for too long; groups of draining nodes count as what they do.
    ``trainer_alone``: the iteration whose training has the reserved GPUs to itself.
    """

    pending: Mapping[str, int]
    in_flight: int
    queued: int
    groups_idle: int
    groups_busy: int
    groups_loading: int
    groups_lost: int
    nodes_draining: int
    trainer_alone: int | None
    counters: Mapping[str, int]
