"""What the coordinator and its clients say to each other, as JSON bodies.

Every request names its epoch, so that a client of a coordinator that was replaced is turned away,
and everything that changes something may be said twice: a client repeats what got no answer.
"""

from typing import Any

import msgspec

from spotlight_core import errors
from spotlight_core.errors import FleetError, SpotlightError
from spotlight_core.events import Phase, Settle
from spotlight_core.types import GenerationRequest

EPOCH_HEADER = "Spotlight-Epoch"
POLL_SECONDS = 20.0
"""How long ``settled`` waits for something to tell."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Queue requests, under a name that the client made up."""

    submission: str
    requests: tuple[GenerationRequest, ...]
    deadline_seconds: float | None = None


class ChangePhase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The iteration moved on.  ``number`` counts a client's changes: each is heard once."""

    number: int
    phase: Phase
    iteration: int


class Cancel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """These requests are wanted no more."""

    requests: tuple[str, ...]
    reason: str


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a submission's requests, from the one on that was asked for."""

    settled: tuple[Settle, ...]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """An error on its way to another process; ``kind`` is the name of its class."""

    kind: str
    problem: str
    remedy: str

    @classmethod
    def of(cls, error: BaseException) -> "Told":
        """Any error: one that nobody raised on purpose is the coordinator's own failure."""
        if not isinstance(error, SpotlightError):
            error = FleetError(f"the coordinator failed ({error!r})", "see logs/coordinator.log of the run")
        # The nearest class that every process knows.
        kind = next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))
        return cls(kind=kind, problem=error.problem, remedy=error.remedy)

    def error(self) -> SpotlightError:
        """The same error, to be raised here."""
        kind = getattr(errors, self.kind, None)
        known = isinstance(kind, type) and issubclass(kind, SpotlightError)
        made: SpotlightError = (kind if known else SpotlightError)(self.problem, self.remedy)  # type: ignore[misc]
        return made


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: Told


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """How the coordinator is.

    ``ready``: the first nodes are there.  ``requests`` and ``nodes``: how many, by state.
    ``trainer_alone``: the iteration whose training has the reserved GPUs to itself.
    """

    epoch: int
    pid: int
    ready: bool
    closing: bool
    failure: Told | None
    phase: str
    iteration: int
    trainer_alone: int | None
    requests: dict[str, int]
    nodes: dict[str, int]


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """``coordinator.json``: where a coordinator listens, or why it could not start."""

    epoch: int
    pid: int
    url: str = ""
    token: str = ""
    error: Told | None = None

    def __repr__(self) -> str:
        """Without the token, which must not get into a log."""
        return f"Whereabouts(epoch={self.epoch}, pid={self.pid}, url={self.url!r})"


def decode_error(body: bytes, status: int) -> SpotlightError:
    """The error that an answer of this ``status`` tells; one that says so when it tells none."""
    try:
        return msgspec.json.decode(body, type=Refusal).error.error()
    except msgspec.MsgspecError:
        return FleetError(f"the coordinator answered {status}", "see logs/coordinator.log of the run")


def to_json(message: Any) -> bytes:
    return msgspec.json.encode(message)
