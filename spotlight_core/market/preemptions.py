"""What preemptions interrupted, and where the interrupted requests went on."""

from dataclasses import dataclass, field, replace
from typing import Literal

from spotlight_core.events import NodeKey

Outcome = Literal["waiting", "finished", "resumed", "recomputed", "moved", "dropped"]
Cause = Literal["notice", "killed", "silent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A lease's work at one moment; ``saved_denoise_step`` is where its last commit would go on."""

    request: str
    kind: str
    lease: str
    saved_denoise_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """A request that was in flight on a preempted node.

    ``outcome``: it ``finished`` within the grace, was ``resumed`` at ``from_denoise_step`` > 0,
    ``recomputed`` from noise (``from_denoise_step`` None), ``moved`` before its first step, was
    ``dropped`` by its client, or is still ``waiting``.  ``node`` is where it went on, after
    ``waited_seconds`` from the notice or the loss.  Saved was the work up to ``saved_denoise_step``;
    about ``denoise_steps_lost`` after it, ``lost_gpu_seconds`` of work, died with the node.
    """

    request: str
    kind: str
    lease: str
    saved_denoise_step: int = 0
    denoise_steps_lost: float = 0.0
    lost_gpu_seconds: float = 0.0
    outcome: Outcome = "waiting"
    from_denoise_step: int | None = None
    node: str | None = None
    waited_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """One incarnation of a node taken away: with a ``notice``, or ``killed`` or ``silent`` without one.

    ``at`` is when the run learned of it; ``stopped_at`` when billing ended, None while in its grace.
    ``lost_gpu_seconds`` and ``denoise_steps_lost`` (by pace: no per-step words reach the journal)
    are the work that died with the node.
    """

    at: float
    node: str
    incarnation: int
    cause: Cause
    stopped_at: float | None
    in_flight: tuple[Interrupted, ...]
    lost_gpu_seconds: float
    denoise_steps_lost: float


@dataclass(slots=True, kw_only=True)
class _Record:
    at: float
    cause: Cause
    stopped_at: float | None = None
    in_flight: dict[str, Interrupted] = field(default_factory=dict)
    lost_gpu_seconds: float = 0.0
    denoise_steps_lost: float = 0.0

    def lose(self, request: str, gpu_seconds: float, steps: float) -> None:
        """Work died with the node, on a request that may have come to it after the notice."""
        self.lost_gpu_seconds += gpu_seconds
        self.denoise_steps_lost += steps
        item = self.in_flight.get(request)
        if item is not None:
            self.in_flight[request] = replace(
                item,
                lost_gpu_seconds=item.lost_gpu_seconds + gpu_seconds,
                denoise_steps_lost=item.denoise_steps_lost + steps,
            )


class PreemptionLog:
    """The part of the ledger that follows requests from one lease to the next."""

    def __init__(self) -> None:
        self.resumed = 0
        self.recomputed = 0
        self.denoise_steps_lost = 0.0
        self._records: dict[NodeKey, _Record] = {}
        self._waiting: dict[str, list[_Record]] = {}
        self._committed: dict[str, int] = {}
        self._broken: dict[str, tuple[NodeKey, InFlight, float, float]] = {}

    def notice(self, key: NodeKey, at: float, in_flight: list[InFlight]) -> None:
        if key in self._records:
            return  # providers repeat their notices
        self._record(key, at, "notice", in_flight)

    def lost(self, key: NodeKey, cause: str, stopped_at: float, in_flight: list[InFlight]) -> None:
        """The node is gone, and what was in flight on it."""
        record = self._records.get(key)
        if record is None and cause in ("killed", "silent"):
            record = self._record(key, stopped_at, "killed" if cause == "killed" else "silent", in_flight)
            # A dead node's calls often fail before the node itself is declared lost.
            for node, work, gpu_seconds, steps in self._broken.values():
                if node == key:
                    self._wait(record, work)
                    record.lose(work.request, gpu_seconds, steps)
        if record is not None:
            record.stopped_at = stopped_at

    def committed(self, request: str, next_denoise_step: int) -> None:
        self._committed[request] = next_denoise_step
        for record in self._waiting.get(request, ()):
            item = record.in_flight[request]
            record.in_flight[request] = replace(item, saved_denoise_step=next_denoise_step)

    def broken(self, key: NodeKey, work: InFlight, gpu_seconds: float, steps: float) -> None:
        """A lease died with ``gpu_seconds`` of work and about ``steps`` denoise steps since its commit."""
        self.denoise_steps_lost += steps
        self._broken[work.request] = (key, work, gpu_seconds, steps)
        record = self._records.get(key)
        if record is not None:
            record.lose(work.request, gpu_seconds, steps)

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

    def _record(self, key: NodeKey, at: float, cause: Cause, in_flight: list[InFlight]) -> _Record:
        record = self._records[key] = _Record(at=at, cause=cause)
        for work in in_flight:
            self._wait(record, work)
        return record

    def _wait(self, record: _Record, work: InFlight) -> None:
        record.in_flight[work.request] = Interrupted(
            request=work.request,
            kind=work.kind,
            lease=work.lease,
            saved_denoise_step=work.saved_denoise_step,
        )
        self._waiting.setdefault(work.request, []).append(record)

    def _resolve(self, request: str, outcome: Outcome, at: float, step: int | None, node: str | None) -> None:
        for record in self._waiting.pop(request, ()):
            record.in_flight[request] = replace(
                record.in_flight[request],
                outcome=outcome,
                from_denoise_step=step,
                node=node,
                waited_seconds=max(0.0, at - record.at),
            )
