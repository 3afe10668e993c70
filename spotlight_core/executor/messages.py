"""What crosses between the executor and the processes of a node: how they are made, and what they tell.

Without torch and ray, since all of them import it.
"""

from dataclasses import dataclass
from pathlib import Path

from spotlight_core.market.progress import ProgressPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    """What a node's processes are made from.

    ``config`` is the resolved recipe as JSON; ``points`` the node's progress-keyed trace, followed by
    its first rank; ``gpus`` what is paid for, one rank each; ``devices`` the GPUs that it has here,
    empty on a machine without; ``store`` the name of the StoreKeeper; ``warnings`` where its processes
    write what a user should hear of, None for nowhere but Ray's logs, which end with the run;
    ``meeting_place`` where the run's nodes have their rendezvous, None when each
    rank works alone.
    """

    node: str
    incarnation: int
    pool: str
    gpus: int
    epoch: int
    config: str
    weights: Path
    nodes: Path
    store: str
    devices: tuple[str, ...] = ()
    warnings: Path | None = None
    points: tuple[ProgressPoint, ...] = ()
    meeting_place: Path | None = None

    @property
    def name(self) -> str:
        """The node's life, in the names of its actors."""
        return f"{self.node}-{self.incarnation}-epoch-{self.epoch}"

    @property
    def rendezvous(self) -> Path | None:
        """Where the node's ranks meet to work together."""
        return None if self.meeting_place is None else self.meeting_place / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """Denoising began, or still goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """The node, or some GPUs of it (``ranks``), will be taken back; ``source`` says who told."""

    seconds_left: float
    source: str = "trace"
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksBack:
    """GPUs of a node that were taken away are there again."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedState:
    """The state before ``next_denoise_step`` is in the Tensor Store; ``released``: nothing follows."""

    next_denoise_step: int
    ref: str
    digest: str
    released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """The state before ``next_denoise_step`` stays in this rank's memory, and nothing follows.

    ``broken``: its group broke in the step after; ``digest`` is empty when that was the first step, and
    nothing is held.
    """

    next_denoise_step: int
    digest: str
    broken: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnstoredState:
    """The last state of a lease that let go, as safetensors bytes, when the store was out of reach."""

    next_denoise_step: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedResult:
    """The result as safetensors bytes, and the digest of the arrays that were in memory."""

    payload: bytes
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The lease ended without a result through no fault of its request.

    ``commit_lost``: what it was to resume from is missing or damaged.
    """

    error: str
    commit_lost: bool = False


Message = Began | Noticed | CommittedState | HeldState | UnstoredState | FinishedResult | Dropped
