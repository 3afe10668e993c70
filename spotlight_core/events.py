"""The words between a decider and an executor: events in, commands out.

Every event carries ``at`` (seconds on the coordinator's clock), ``seq`` (arrival number) and
``epoch`` (which coordinator wrote it); they are stamped by the coordinator on receipt.  A group's
``generation`` is the incarnation of its node: a node that returns is a new one.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pydantic import TypeAdapter

from spotlight_core.types import GenerationRequest, PolicyVersion

Phase = Literal["rollout", "train", "remainder", "publish", "evaluate"]
Outcome = Literal["done", "aborted", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SPGroup:
    """An ordered tuple of ranks of one node that denoise together, at one incarnation of the node."""

    node: str
    generation: int
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    at: float = 0.0
    seq: int = 0
    epoch: int = 0

    def stamped(self, at: float, seq: int, epoch: int) -> "Event":
        return replace(self, at=at, seq=seq, epoch=epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(Event):
    """Requests of one kind and policy version entered the central queue."""

    requests: tuple[GenerationRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanged(Event):
    """The iteration moved on; gives pause and resume of exploration."""

    phase: Phase
    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """A group denoises under a lease: said when it begins, and now and then as a sign of life."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """A result exists.  ``ref`` says where, ``digest`` what."""

    lease: str
    request: str
    ref: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Event):
    """In-flight latents are safe in the Tensor Store; ``released`` when the group also let go."""

    lease: str
    request: str
    next_denoise_step: int
    ref: str
    digest: str
    released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """A lease ended in an error; ``retryable`` unless the request itself is at fault.

    ``commit_lost``: what it was to resume from is damaged, so it has to be recomputed.
    """

    lease: str
    error: str
    retryable: bool
    commit_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined(Event):
    """A node is booted and billed since ``started_at`` (its own log's wall-clock seconds)."""

    node: str
    incarnation: int
    pool: str
    gpus: int
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """The provider will take the node back in ``seconds_left``."""

    node: str
    incarnation: int
    seconds_left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost(Event):
    """The node is gone (``killed``), was let go (``released``) or the run ended (``shutdown``)."""

    node: str
    incarnation: int
    cause: str
    stopped_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded(Event):
    """A node holds a policy version; ``digest`` was computed from the weights it runs."""

    node: str
    incarnation: int
    policy: PolicyVersion
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer(Event):
    """A deadline set with ``SetTimer`` passed."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Event):
    """The client no longer wants these requests."""

    requests: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Denoise ``request`` on ``group`` from a committed step (0 with no ``state_ref``: from noise)."""

    group: SPGroup
    lease: str
    request: GenerationRequest
    from_denoise_step: int = 0
    state_ref: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Yield:
    """Commit at the next denoise step and let go, by ``by`` seconds on the coordinator's clock."""

    lease: str
    group: SPGroup
    by: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Drop the lease's work; nobody waits for it any more."""

    lease: str
    group: SPGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Make a node hold a policy version and confirm its digest."""

    node: str
    incarnation: int
    policy: PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Let a drained node go."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    id: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """A request has reached its end; ``ref`` names the result when done, ``detail`` says why not."""

    request: str
    outcome: Outcome
    ref: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Something that must never happen did; the run stops with ``detail``."""

    detail: str


Command = Start | Yield | Abandon | Load | Release | SetTimer | Settle | Alarm

_WORDS = {
    word.__name__: word
    for word in (
        *(Submitted, PhaseChanged, Started, Finished, Committed, Failed, NodeJoined, Notice, Lost),
        *(WeightsLoaded, Timer, Cancelled),
        *(Start, Yield, Abandon, Load, Release, SetTimer, Settle, Alarm),
    )
}
_ADAPTERS: dict[str, TypeAdapter[Any]] = {}


def to_dict(word: Event | Command) -> dict[str, Any]:
    """A JSON-ready dict with the word's name under ``word``."""
    return {"word": type(word).__name__, **asdict(word)}


def from_dict(record: dict[str, Any]) -> Any:
    """The inverse of ``to_dict``; validates every field."""
    name = record["word"]
    if name not in _ADAPTERS:  # setdefault would build a schema, 5 ms, for every word of a journal
        _ADAPTERS[name] = TypeAdapter(_WORDS[name])
    return _ADAPTERS[name].validate_python({key: value for key, value in record.items() if key != "word"})
