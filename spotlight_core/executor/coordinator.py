"""The Coordinator: one per run, owner of the request queue, the journal and the inbox.

    phases ──► submit ─────────┐                        ┌─► executor: Start, Yield, Load, Release
    actors ──► Finished … ─────┤ inbox ─► journal ─► decide ─► journal
    fleet  ──► Notice, Lost ───┘                        └─► listener: Settle tells what became of a request

The order is fixed: stamp, journal, decide, dispatch.  Nothing awaits a command; failures come back
as events and deadlines are timer events.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from spotlight_core.drive import Decider, drive
from spotlight_core.errors import BadInputError, FleetError, SpotlightError
from spotlight_core.events import (
    Alarm,
    Cancelled,
    Command,
    Event,
    Phase,
    PhaseChanged,
    SetTimer,
    Settle,
    Submitted,
    Word,
    encode,
)
from spotlight_core.executor.gauges import Gauges
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.submission import Listener
from spotlight_core.journal import drop_cut_line
from spotlight_core.types import GenerationRequest

LOG = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0


class NodeExecutor(Protocol):
    """Executes what concerns nodes and groups; results and failures are posted to the inbox."""

    def execute(self, command: Command) -> None: ...


def _nobody_else() -> None:
    """The fence of a coordinator that nothing can replace."""


class Journal:
    """Append-only record of every event and command, one JSON line each, flushed per word.

    ``fence`` is asked before each event and its commands; what it raises keeps them out of the file.
    """

    def __init__(
        self,
        path: Path,
        observers: Sequence[Callable[[Word], None]] = (),
        fence: Callable[[], None] = _nobody_else,
    ) -> None:
        drop_cut_line(path)
        self._file: BinaryIO = path.open("ab")
        self._observers = observers
        self._fence = fence

    def __call__(self, word: Word) -> None:
        if isinstance(word, Event):
            self._fence()
        self._file.write(encode(word) + b"\n")
        # Before the command is executed: what a killed coordinator has done must be on record.
        self._file.flush()
        for observe in self._observers:
            observe(word)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which the write before has told
            self._file.close()


class Coordinator:
    """Runs ``drive`` in its own thread; its other methods are for any thread."""

    def __init__(self, *, decider: Decider, nodes: NodeExecutor, inbox: Inbox, journal: Journal) -> None:
        self._decider = decider
        self._nodes = nodes
        self._inbox = inbox
        self._journal = journal
        self._lock = threading.Lock()
        self._deciding = threading.Lock()
        self._waiting: dict[str, Listener] = {}
        self._failure: SpotlightError | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    # -- the clients' side --------------------------------------------------------------------------

    @property
    def failure(self) -> SpotlightError | None:
        """Why nothing more will be decided, if that is so."""
        return self._failure

    def gauges(self) -> Gauges:
        """What the deciders know between two events."""
        with self._deciding:
            return Gauges.of(self._decider)

    def queue(
        self,
        requests: Sequence[GenerationRequest],
        listener: Listener,
        deadline_seconds: float | None = None,
    ) -> None:
        """Queue requests; ``listener`` hears of each one's end.

        Raises:
            BadInputError: one of them is under way, and only one listener hears of its end.
            SpotlightError: the coordinator has failed.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            under_way = [request.id for request in requests if request.id in self._waiting]
            if under_way:
                raise BadInputError(
                    f"request {under_way[0]} is under way already",
                    "wait for its end before it is submitted again",
                )
            self._waiting.update((request.id, listener) for request in requests)
        deadline = None if deadline_seconds is None else self._inbox.clock.now() + deadline_seconds
        self._inbox.post(Submitted(requests=tuple(requests), deadline=deadline))

    def change_phase(self, phase: Phase, iteration: int) -> None:
        self._inbox.post(PhaseChanged(phase=phase, iteration=iteration))

    def cancel(self, requests: Sequence[str], reason: str) -> None:
        self._inbox.post(Cancelled(requests=tuple(requests), reason=reason))

    # -- the process's side -------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def fail(self, failure: SpotlightError) -> None:
        """Tell everybody who waits that nothing more will come; the first failure is the one that is told."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            waiting = list({id(listener): listener for listener in self._waiting.values()}.values())
            self._waiting.clear()
        for listener in waiting:
            listener.deliver(failure)

    def close(self) -> None:
        """Finish what is in the inbox, then stop; safe to call twice."""
        self._inbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout=CLOSE_SECONDS)
        self.fail(FleetError("the coordinator was closed", "continue with --resume"))
        self._journal.close()

    # -- the thread's side --------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        return self._inbox.events()

    def decide(self, event: Event) -> list[Command]:
        with self._deciding:  # others look at the deciders' state in between
            return self._decider.decide(event)

    def execute(self, command: Command) -> None:
        match command:
            case SetTimer():
                self._inbox.set_timer(command.id, command.at)
            case Settle():
                with self._lock:
                    listener = self._waiting.pop(command.request, None)
                if listener is not None:
                    listener.deliver(command)
                self._nodes.execute(command)  # its commits may go
            case Alarm():
                raise FleetError(command.detail, "the run stops here; its journal tells the story")
            case _:
                self._nodes.execute(command)

    def _run(self) -> None:
        try:
            drive(self, self, self._journal)
        except Exception as error:  # every waiting phase must hear of it, whatever it was
            LOG.exception("the coordinator failed")
            if not isinstance(error, SpotlightError):
                error = FleetError(f"the coordinator failed ({error!r})", "see the log")
            self.fail(error)
            self._journal_the_rest()

    def _journal_the_rest(self) -> None:
        """Nothing is decided any more, but nodes end, and the ledger has to hear of it."""
        try:
            for event in self.events():
                self._journal(event)
        except Exception as error:  # a full disk, or another coordinator's journal: what failed before
            LOG.warning("nothing more is journalled: %s", error)
