"""A node's billed life, cut into the segments that say what it did.

billed   |--------------------------------------------------|   NodeJoined ... Lost (or now), or BootFailed
spans        |rollout|    |rollout|lost|                         leases, cut at commits
training                |-----------------|                     reserved nodes only
segments |idl|rollout|tr|rollout|lost|trai|idle-------------|   no gaps, no overlaps
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spotlight_core.events import NodeKey, SPGroup
from spotlight_core.types import GenerationRequest, Kind

Activity = Literal["rollout", "evaluate", "audit", "explore", "training", "idle", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What one node did from ``start`` to ``end`` (seconds on the coordinator's clock).

    Where several groups of a node work at once, the one that began first names the segment.
    """

    node: str
    incarnation: int
    pool: str
    gpus: int
    activity: Activity
    start: float
    end: float
    request: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of one lease on ``ranks`` GPUs, either useful (a request's kind) or lost."""

    start: float
    end: float
    activity: Kind | Literal["lost"]
    request: str
    ranks: int


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseBill:
    """A group's work on a request: ``since`` its start or its last commit.

    ``queued``: behind another one, so it is no work yet.  ``said``: the group has said that it began.
    """

    id: str
    group: SPGroup
    request: GenerationRequest
    queued: bool
    said: bool = False
    started: float
    since: float
    from_denoise_step: int
    committed_denoise_step: int

    @property
    def node(self) -> NodeKey:
        return self.group.node, self.group.incarnation

    def span(self, end: float, activity: Kind | Literal["lost"]) -> Span:
        """What it did from ``since`` to ``end``."""
        request, ranks = self.request.id, len(self.group.ranks)
        return Span(start=self.since, end=end, activity=activity, request=request, ranks=ranks)


@dataclass(slots=True, kw_only=True)
class NodeBill:
    """One incarnation of a node, from its first billed second."""

    node: str
    incarnation: int
    pool: str
    gpus: int
    epoch: int
    started_at: float
    stopped_at: float | None = None
    spans: list[Span] = field(default_factory=list)

    def end(self, now: float) -> float:
        """When billing ends: where it stopped, else ``now`` (never before it began)."""
        return max(self.started_at, now if self.stopped_at is None else self.stopped_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch between two neighbouring boundaries of a node's life."""

    start: float
    end: float
    spans: tuple[Span, ...]
    training: bool


def pieces(
    bill: NodeBill, spans: Sequence[Span], training: Sequence[tuple[float, float]], now: float
) -> Iterator[Piece]:
    """Cut the billed life of a node wherever a span or a training phase begins or ends.

    A sweep with an active set: looking up the spans of each piece anew would be quadratic in leases.
    """
    first, last = bill.started_at, bill.end(now)
    changes: list[tuple[float, int, int]] = []  # time, opens, index into intervals
    intervals = [(span.start, span.end) for span in spans] + list(training)
    for index, (start, end) in enumerate(intervals):
        start, end = max(start, first), min(end, last)
        if start < end:
            changes += [(start, 1, index), (end, 0, index)]
    changes.sort()
    active: dict[int, None] = {}
    position = first
    for at, opens, index in [*changes, (last, 0, -1)]:
        if at > position:
            inside = tuple(spans[i] for i in active if i < len(spans))
            yield Piece(start=position, end=at, spans=inside, training=len(inside) < len(active))
            position = at
        if opens:
            active[index] = None
        else:
            active.pop(index, None)


def segments_of(bill: NodeBill, cut: Iterator[Piece]) -> list[Segment]:
    """Name each piece and join neighbours that say the same."""
    result: list[Segment] = []
    for piece in cut:
        activity: Activity
        if piece.spans:
            activity, request = piece.spans[0].activity, piece.spans[0].request
        else:
            activity, request = ("training" if piece.training else "idle"), None
        start = piece.start
        if result and (result[-1].activity, result[-1].request) == (activity, request):
            start = result.pop().start
        result.append(
            Segment(
                node=bill.node,
                incarnation=bill.incarnation,
                pool=bill.pool,
                gpus=bill.gpus,
                activity=activity,
                start=start,
                end=piece.end,
                request=request,
            )
        )
    return result


def gpu_seconds(bill: NodeBill, cut: Iterator[Piece]) -> dict[str, list[float]]:
    """GPU-seconds of each piece under ``useful``, ``idle`` and ``lost``; all three sum to billed time."""
    parts: dict[str, list[float]] = {"useful": [], "idle": [], "lost": []}
    for piece in cut:
        seconds = piece.end - piece.start
        useful = min(bill.gpus, sum(span.ranks for span in piece.spans if span.activity != "lost"))
        lost = min(bill.gpus - useful, sum(span.ranks for span in piece.spans if span.activity == "lost"))
        rest = bill.gpus - useful - lost
        parts["useful"].append((useful + (rest if piece.training else 0)) * seconds)
        parts["lost"].append(lost * seconds)
        parts["idle"].append((0 if piece.training else rest) * seconds)
    return parts
