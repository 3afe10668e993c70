"""What a coordinator does for its clients, whatever carries their words.

    submit ─► mailbox ◄─ the coordinator's thread delivers each Settle
    settled ◄─ mailbox, from the number on that the client has not seen yet

Everything may be asked twice, since a client repeats what got no answer.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from spotlight_core.errors import BadInputError, FleetError, SpotlightError
from spotlight_core.events import Settle
from spotlight_core.executor.coordinator import Coordinator
from spotlight_core.executor.gauges import prometheus
from spotlight_core.executor.wire import Cancel, ChangePhase, Outcomes, Status, Submit, Told
from spotlight_core.types import GenerationRequest

KEPT_SUBMISSIONS = 64


class Payloads(Protocol):
    """Finished results as bytes; KeyError for one that is not there."""

    def payload(self, ref: str) -> bytes: ...

    def discard(self, ref: str) -> None: ...


class Unknown(FleetError):
    """Raised when a client asks for what is not here."""


class Mailbox:
    """What became of one submission's requests, kept until its client has seen all of it."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._expected = len({request.id for request in requests})
        self._settled: list[Settle] = []
        self._failure: SpotlightError | None = None
        self._news = threading.Condition()

    @property
    def complete(self) -> bool:
        return len(self._settled) >= self._expected

    def deliver(self, settled: Settle | SpotlightError) -> None:
        with self._news:
            if isinstance(settled, SpotlightError):
                self._failure = settled
            else:
                self._settled.append(settled)
            self._news.notify_all()

    def read(self, after: int, wait_seconds: float) -> tuple[Settle, ...]:
        """The outcomes from number ``after`` on; waits for one, and returns none when there was none.

        Raises:
            SpotlightError: the coordinator failed, and all that it did before has been read.
        """
        with self._news:
            self._news.wait_for(
                lambda: len(self._settled) > after or self.complete or self._failure is not None,
                timeout=wait_seconds,
            )
            if len(self._settled) > after:
                return tuple(self._settled[after:])
            if self._failure is not None:
                raise self._failure
            return ()


class Service:
    """See the module's text.

    ``ready`` says whether the first nodes are there; ``sizes`` are more gauges by name.
    """

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        results: Payloads,
        sizes: Callable[[], Mapping[str, float]],
        epoch: int,
        ready: Callable[[], bool],
    ) -> None:
        self.epoch = epoch
        self.closing = threading.Event()
        self._sizes = sizes
        self._phase, self._iteration = "", 0
        self._coordinator = coordinator
        self._results = results
        self._ready = ready
        self._mailboxes: dict[str, Mailbox] = {}
        self._last_phase_change = 0
        self._lock = threading.Lock()
        self._heard_at = time.monotonic()

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, body: Submit) -> None:
        """Queue requests, unless this submission is known.

        Raises:
            SpotlightError: the coordinator has failed.
        """
        with self._lock:
            if body.submission in self._mailboxes:
                return
            mailbox = Mailbox(body.requests)
            self._coordinator.queue(body.requests, mailbox, body.deadline_seconds)
            self._mailboxes[body.submission] = mailbox
            self._forget_old()

    def settled(self, submission: str, after: int, wait_seconds: float) -> Outcomes:
        """What became of a submission's requests, from number ``after`` on.

        Raises:
            Unknown: nobody submitted it, or its client saw its end long ago.
            SpotlightError: the coordinator has failed.
        """
        with self._lock:
            mailbox = self._mailboxes.get(submission)
        if mailbox is None:
            raise Unknown(f"there is no submission {submission}", "submit its requests again")
        return Outcomes(settled=mailbox.read(after, wait_seconds))

    def result(self, ref: str) -> bytes:
        """A finished result's safetensors bytes, which stay here until ``discard``.

        Raises:
            Unknown: there is none, or it was discarded.
        """
        try:
            return self._results.payload(ref)
        except KeyError:
            raise Unknown(f"there is no result {ref}", "continue the run with --resume") from None

    def discard(self, ref: str) -> None:
        """The client has the result."""
        self._results.discard(ref)

    def cancel(self, body: Cancel) -> None:
        self._coordinator.cancel(body.requests, body.reason)

    # -- the run ------------------------------------------------------------------------------------

    def change_phase(self, body: ChangePhase) -> None:
        with self._lock:
            if body.number <= self._last_phase_change:  # said again: its answer was lost
                return
            self._last_phase_change = body.number
            self._phase, self._iteration = body.phase, body.iteration
            self._coordinator.change_phase(body.phase, body.iteration)

    def close(self) -> None:
        """Ask the process to end the nodes and itself; returns at once."""
        self.closing.set()

    def status(self) -> Status:
        failure, gauges = self._coordinator.failure, self._coordinator.gauges()
        return Status(
            epoch=self.epoch,
            pid=os.getpid(),
            ready=self._ready(),
            closing=self.closing.is_set(),
            failure=None if failure is None else Told.of(failure),
            phase=self._phase,
            iteration=self._iteration,
            trainer_alone=None if gauges.queue is None else gauges.queue.trainer_alone,
            requests=gauges.requests(),
            nodes=gauges.nodes(),
        )

    def metrics(self) -> str:
        """The run in numbers, as Prometheus text."""
        return prometheus(self._coordinator.gauges(), self._iteration, self._sizes())

    # -- the client's life --------------------------------------------------------------------------

    def hear(self) -> None:
        """A client of this epoch said something."""
        self._heard_at = time.monotonic()

    @property
    def heard_at(self) -> float:
        """When a client was last heard, on the monotonic clock."""
        return self._heard_at

    def _forget_old(self) -> None:
        """The oldest submissions that have ended: a client that still reads one is long past it."""
        ended = [name for name, mailbox in self._mailboxes.items() if mailbox.complete]
        for name in ended[: max(0, len(self._mailboxes) - KEPT_SUBMISSIONS)]:
            del self._mailboxes[name]


def whole_number(text: str, name: str) -> int:
    """A query's number, 0 or more; BadInputError for anything else."""
    if not text.isascii() or not text.isdigit():
        raise BadInputError(f"{name} = {text!r} is no number", "give a whole number, 0 or more")
    return int(text)
