"""What preemptions interrupted, and where the interrupted requests went on."""

from dataclasses import dataclass, field
from typing import Literal

from spotlight_core.events import NodeKey

Outcome = Literal["waiting", "finished", "resumed", "recomputed", "moved", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """A request that was in flight on a preempted node.

    ``outcome``: it ``finished`` within the grace, was ``resumed`` at ``from_denoise_step`` > 0,
    ``recomputed`` from noise (``from_denoise_step`` None), ``moved`` before its first step, was
    ``dropped`` by its client, or is still ``waiting``.  ``node`` is where it went on, after
    ``waited_seconds`` from the notice or the loss.
    """

    request: str
    kind: str
    outcome: Outcome = "waiting"
    from_denoise_step: int | None = None
    node: str | None = None
    waited_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """One incarnation of a node taken away by its provider, with a ``notice`` or ``killed`` without.

    ``at`` is when the run learned of it; ``stopped_at`` when billing ended, None while in its grace.
    ``lost_gpu_seconds`` and ``denoise_steps_lost`` (by pace: no per-step words reach the journal)
    are the work that died with the node.
    """

    at: float
    node: str
    incarnation: int
    cause: Literal["notice", "killed"]
    stopped_at: float | None
    in_flight: tuple[Interrupted, ...]
    lost_gpu_seconds: float
    denoise_steps_lost: float


@dataclass(slots=True, kw_only=True)
class _Record:
    at: float
    cause: Literal["notice", "killed"]
    stopped_at: float | None = None
    in_flight: dict[str, Interrupted] = field(default_factory=dict)
    lost_gpu_seconds: float = 0.0
    denoise_steps_lost: float = 0.0


class PreemptionLog:
    """The part of the ledger that follows requests from one lease to the next."""

    def __init__(self) -> None:
        self.resumed = 0
        self.recomputed = 0
        self.denoise_steps_lost = 0.0
        self._records: dict[NodeKey, _Record] = {}
        self._waiting: dict[str, list[_Record]] = {}
        self._committed: dict[str, int] = {}
        self._broken: dict[str, tuple[NodeKey, str, float, float]] = {}

    def notice(self, key: NodeKey, at: float, in_flight: list[tuple[str, str]]) -> None:
        if key in self._records:
            return  # providers repeat their notices
        self._record(key, at, "notice", in_flight)

    def lost(self, key: NodeKey, cause: str, stopped_at: float, in_flight: list[tuple[str, str]]) -> None:
        """The node is gone; ``in_flight`` are the (request, kind) pairs that go with it."""
        record = self._records.get(key)
        if record is None and cause == "killed":
            record = self._record(key, stopped_at, "killed", in_flight)
            # A dead node's calls often fail before the node itself is declared lost.
            for request, (node, kind, gpu_seconds, steps) in self._broken.items():
                if node == key:
                    self._wait(record, request, kind)
                    record.lost_gpu_seconds += gpu_seconds
                    record.denoise_steps_lost += steps
        if record is not None:
            record.stopped_at = stopped_at

    def committed(self, request: str, next_denoise_step: int) -> None:
        self._committed[request] = next_denoise_step

    def broken(self, request: str, kind: str, key: NodeKey, gpu_seconds: float, steps: float) -> None:
        """A lease died with ``gpu_seconds`` of work and about ``steps`` denoise steps since its commit."""
        self.denoise_steps_lost += steps
        self._broken[request] = (key, kind, gpu_seconds, steps)
        record = self._records.get(key)
        if record is not None:
            record.lost_gpu_seconds += gpu_seconds
            record.denoise_steps_lost += steps

    def started(self, request: str, from_denoise_step: int, node: str, at: float) -> None:
        """A request starts: anew, or after an interruption."""
        committed = self._committed.get(request, 0)
        again = self._broken.pop(request, None) is not None or committed > 0
        outcome: Outcome = "resumed" if from_denoise_step else "recomputed" if again else "moved"
        self.resumed += outcome == "resumed"
        self.recomputed += outcome == "recomputed"
        self.denoise_steps_lost += max(0, committed - from_denoise_step)
        self._committed[request] = from_denoise_step
        self._resolve(request, outcome, at, from_denoise_step or None, node)

    def finished(self, request: str, node: str, at: float) -> None:
        """A result exists, so nothing of the request was lost or waits any more."""
        self._broken.pop(request, None)
        self._committed.pop(request, None)
        self._resolve(request, "finished", at, None, node)

    def dropped(self, request: str, at: float) -> None:
        """The client no longer waits for the request."""
        self._broken.pop(request, None)
        self._committed.pop(request, None)
        self._resolve(request, "dropped", at, None, None)

    def preemptions(self) -> list[Preemption]:
        """Every preemption so far, in the order the run learned of them."""
        return [
            Preemption(
                at=record.at,
                node=node,
                incarnation=incarnation,
                cause=record.cause,
                stopped_at=record.stopped_at,
                in_flight=tuple(record.in_flight.values()),
                lost_gpu_seconds=record.lost_gpu_seconds,
                denoise_steps_lost=record.denoise_steps_lost,
            )
            for (node, incarnation), record in self._records.items()
        ]

    def _record(
        self, key: NodeKey, at: float, cause: Literal["notice", "killed"], in_flight: list[tuple[str, str]]
    ) -> _Record:
        record = self._records[key] = _Record(at=at, cause=cause)
        for request, kind in in_flight:
            self._wait(record, request, kind)
        return record

    def _wait(self, record: _Record, request: str, kind: str) -> None:
        record.in_flight[request] = Interrupted(request=request, kind=kind)
        self._waiting.setdefault(request, []).append(record)

    def _resolve(self, request: str, outcome: Outcome, at: float, step: int | None, node: str | None) -> None:
        for record in self._waiting.pop(request, ()):
            record.in_flight[request] = Interrupted(
                request=request,
                kind=record.in_flight[request].kind,
                outcome=outcome,
                from_denoise_step=step,
                node=node,
                waited_seconds=max(0.0, at - record.at),
            )
