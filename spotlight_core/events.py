"""The words between a decider and an executor: events in, commands out.

Every event carries ``at`` (seconds on the coordinator's clock), ``seq`` (arrival number) and
``epoch`` (which coordinator wrote it); they are stamped by the coordinator on receipt.  A node that
returns is a new ``incarnation``; its ranks, one a GPU, form SP groups, and each time that they are formed
anew is another ``generation``.

Structs of msgspec, which are made, compared and written many times faster than dataclasses: a busy
fleet's scheduler spends more time on its words than on its decisions.
"""

from functools import reduce
from operator import or_
from typing import Any, Literal

import msgspec

from spotlight_core.types import GenerationRequest, PolicyVersion

Phase = Literal["rollout", "train", "remainder", "publish", "evaluate"]
Outcome = Literal["done", "aborted", "cancelled"]
Fault = Literal["request", "node", "nobody"]
RankCause = Literal["died", "hung", "revoked", "restarted"]
NodeKey = tuple[str, int]  # name and incarnation


class SPGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An ordered tuple of ranks of one node that denoise together; the first one leads.

    A group is named by its ranks and the ``generation`` of its node's layout in which it was formed: 0 is
    the layout that a node joins with, each rank by itself.
    """

    node: str
    incarnation: int
    ranks: tuple[int, ...] = (0,)
    generation: int = 0

    @property
    def degree(self) -> int:
        """How many ranks share the sequence."""
        return len(self.ranks)


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="word", tag=True):
    at: float = 0.0
    seq: int = 0
    epoch: int = 0

    def stamped(self, at: float, seq: int, epoch: int) -> "Event":
        return msgspec.structs.replace(self, at=at, seq=seq, epoch=epoch)


class Submitted(Event, frozen=True, kw_only=True, gc=False):
    """Requests of one kind and policy version entered the central queue.

    ``deadline``: when their client will stop waiting, in seconds on the coordinator's clock.
    """

    requests: tuple[GenerationRequest, ...]
    deadline: float | None = None


class PhaseChanged(Event, frozen=True, kw_only=True, gc=False):
    """The iteration moved on; gives pause and resume of exploration."""

    phase: Phase
    iteration: int


class Started(Event, frozen=True, kw_only=True, gc=False):
    """A group denoises under a lease: said when it begins, and now and then as a sign of life."""

    lease: str


class Finished(Event, frozen=True, kw_only=True, gc=False):
    """A result exists.  ``ref`` says where, ``digest`` what."""

    lease: str
    request: str
    ref: str
    digest: str


class Committed(Event, frozen=True, kw_only=True, gc=False):
    """In-flight latents are safe in the Tensor Store; ``released`` when the group also let go.

    ``held``: they are in the memory of the group's surviving ranks instead, and only these can go on
    from them (see ``Yield.hold``); another node goes on from the last commit in the Tensor Store.
    """

    lease: str
    request: str
    next_denoise_step: int
    ref: str
    digest: str
    released: bool
    held: bool = False


class Failed(Event, frozen=True, kw_only=True, gc=False):
    """A lease ended without a result.

    ``fault``: of the ``request``, which would fail anywhere and is given up; of the ``node``, or nobody
    knows, so that it is counted against both and tried elsewhere; of ``nobody``: it was abandoned, or
    the Tensor Store was away, so nothing is counted.
    ``commit_lost``: what the lease was to resume from is damaged, so the request has to be recomputed.
    """

    lease: str
    error: str
    fault: Fault
    commit_lost: bool = False


class Offered(Event, frozen=True, kw_only=True, gc=False):
    """The market has a machine for this node of the fleet; nothing is paid before ``Acquire``."""

    node: str
    pool: str


class NodeJoined(Event, frozen=True, kw_only=True, gc=False):
    """A node is booted and billed since ``started_at`` (its own log's wall-clock seconds)."""

    node: str
    incarnation: int
    pool: str
    gpus: int
    started_at: float


class Withdrawn(Event, frozen=True, kw_only=True, gc=False):
    """The market no longer has the machine that it offered."""

    node: str
    pool: str


class BootFailed(Event, frozen=True, kw_only=True, gc=False):
    """What ``Acquire`` asked for did not come up.

    A life that was billed all the same has its ``incarnation``, ``gpus`` and ``started_at`` to
    ``stopped_at`` (its own log's wall-clock seconds); None and 0 when nothing began.
    """

    node: str
    pool: str
    error: str
    incarnation: int = 0
    gpus: int = 0
    started_at: float | None = None
    stopped_at: float | None = None


class Notice(Event, frozen=True, kw_only=True, gc=False):
    """The provider will take the node back in ``seconds_left``; ``source`` says who told."""

    node: str
    incarnation: int
    seconds_left: float
    source: str = "trace"


class Lost(Event, frozen=True, kw_only=True, gc=False):
    """The node is gone: ``killed``, ``silent`` past its lease, ``released``, or ``shutdown`` with the run."""

    node: str
    incarnation: int
    cause: str
    stopped_at: float


class WeightsLoaded(Event, frozen=True, kw_only=True, gc=False):
    """A group holds a policy version; ``digest`` was computed from the weights it runs."""

    group: SPGroup
    policy: PolicyVersion
    digest: str


class LoadFailed(Event, frozen=True, kw_only=True, gc=False):
    """A group could not load a policy version, and holds none now."""

    group: SPGroup
    policy: PolicyVersion
    error: str


class RankNotice(Event, frozen=True, kw_only=True, gc=False):
    """These GPUs of a node will be taken back in ``seconds_left``, and the others stay."""

    node: str
    incarnation: int
    ranks: tuple[int, ...]
    seconds_left: float
    source: str = "trace"


class RankLost(Event, frozen=True, kw_only=True, gc=False):
    """A rank's process is gone and its node lives: ``died``, ``hung``, ``revoked`` or ``restarted``.

    What its group had in flight is told before (``Committed.held`` by the survivors) or gone with it.
    A rank that was revoked may come back later, any other gets another process at once.
    """

    node: str
    incarnation: int
    rank: int
    cause: RankCause
    error: str = ""


class RankReady(Event, frozen=True, kw_only=True, gc=False):
    """A rank has a process again after ``RankLost``; it is in no group and holds no weights yet."""

    node: str
    incarnation: int
    rank: int


class Regrouped(Event, frozen=True, kw_only=True, gc=False):
    """The node's ranks form these groups now (see ``Regroup``); what older generations say is refused."""

    node: str
    incarnation: int
    generation: int
    groups: tuple[tuple[int, ...], ...]


class Asleep(Event, frozen=True, kw_only=True, gc=False):
    """The ranks of a node hold no weights on their GPUs (see ``Sleep``), or are gone."""

    node: str
    incarnation: int


class Timer(Event, frozen=True, kw_only=True, gc=False):
    """A deadline set with ``SetTimer`` passed."""

    id: str


class Cancelled(Event, frozen=True, kw_only=True, gc=False):
    """The client no longer wants these requests."""

    requests: tuple[str, ...]
    reason: str


class Command(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="word", tag=True):
    """What a decider wants done."""


class Start(Command, frozen=True, kw_only=True, gc=False):
    """Denoise ``request`` on ``group`` from a committed step (0 with no ``state_ref``: from noise).

    ``queued``: behind the lease that the group runs now, whose end begins this one at once.
    """

    group: SPGroup
    lease: str
    request: GenerationRequest
    from_denoise_step: int = 0
    state_ref: str | None = None
    state_digest: str | None = None
    queued: bool = False


class Yield(Command, frozen=True, kw_only=True, gc=False):
    """Commit at the next denoise step and let go, by ``by`` seconds on the coordinator's clock.

    ``hold``: keep the state in the group's memory, since ranks of it go on at once.
    """

    lease: str
    group: SPGroup
    by: float
    reason: str
    hold: bool = False


class Abandon(Command, frozen=True, kw_only=True, gc=False):
    """Drop the lease's work; nobody waits for it any more."""

    lease: str
    group: SPGroup


class Load(Command, frozen=True, kw_only=True, gc=False):
    """Make a group hold a policy version and confirm its digest."""

    group: SPGroup
    policy: PolicyVersion


class Regroup(Command, frozen=True, kw_only=True, gc=False):
    """Form a node's ranks into these groups; a group whose ranks stay as they are keeps its generation.

    Nothing is in flight on the ranks of a group that changes.  ``Regrouped`` answers.
    """

    node: str
    incarnation: int
    generation: int
    groups: tuple[tuple[int, ...], ...]


class ReleaseRank(Command, frozen=True, kw_only=True, gc=False):
    """Let a GPU under notice go: nothing is in flight there, and it is in no group."""

    node: str
    incarnation: int
    rank: int


class Sleep(Command, frozen=True, kw_only=True, gc=False):
    """Have a node's ranks let their weights go until work or a version to load comes.  ``Asleep`` answers."""

    node: str
    incarnation: int


class Acquire(Command, frozen=True, kw_only=True, gc=False):
    """Rent and boot the next life of a node; ``NodeJoined`` or ``BootFailed`` answers."""

    node: str
    pool: str


class Drain(Command, frozen=True, kw_only=True, gc=False):
    """The fleet no longer wants a node: it gets a notice of ours, with the fleet's grace."""

    node: str
    incarnation: int


class Release(Command, frozen=True, kw_only=True, gc=False):
    """Let a drained node go, acknowledging the provider's notice if there was one."""

    node: str
    incarnation: int


class SetTimer(Command, frozen=True, kw_only=True, gc=False):
    id: str
    at: float


class Settle(Command, frozen=True, kw_only=True, gc=False):
    """A request has reached its end; ``ref`` names the result when done, ``detail`` says why not."""

    request: str
    outcome: Outcome
    ref: str | None = None
    detail: str = ""


class Alarm(Command, frozen=True, kw_only=True, gc=False):
    """Something that must never happen did; the run stops with ``detail``."""

    detail: str


Word = Event | Command

EVENTS: tuple[type[Event], ...] = (
    *(Submitted, PhaseChanged, Started, Finished, Committed, Failed, Timer, Cancelled),
    *(
        Offered,
        Withdrawn,
        NodeJoined,
        BootFailed,
        Notice,
        Lost,
        WeightsLoaded,
        LoadFailed,
        RankNotice,
        RankLost,
        RankReady,
        Regrouped,
        Asleep,
    ),
)
COMMANDS: tuple[type[Command], ...] = (
    *(
        Start,
        Yield,
        Abandon,
        Load,
        Regroup,
        ReleaseRank,
        Sleep,
        Acquire,
        Drain,
        Release,
        SetTimer,
        Settle,
        Alarm,
    ),
)
_ANY_WORD: Any = reduce(or_, EVENTS + COMMANDS)
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(_ANY_WORD)


def encode(word: Word) -> bytes:
    """A word as one line of JSON, without the line's end; its name is under ``word``."""
    return _ENCODER.encode(word)


def decode(line: bytes | str) -> Any:
    """The inverse of ``encode``; validates every field.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: the line is no word.
    """
    return _DECODER.decode(line)
