"""The Coordinator: one per run, owner of the request queue, the journal and the inbox.

    phases ──► client.submit ─┐                        ┌─► executor: Start, Yield, Load, Release
    actors ──► Finished … ────┤ inbox ─► journal ─► decide ─► journal
    fleet  ──► Notice, Lost ──┘                        └─► client: Settle resolves what submit returned

The order is fixed: stamp, journal, decide, dispatch.  Nothing awaits a command; failures come back
as events and deadlines are timer events.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from spotlight_core.drive import Decider, drive
from spotlight_core.errors import FleetError
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
from spotlight_core.executor.inbox import Inbox
from spotlight_core.types import GenerationRequest


class NodeExecutor(Protocol):
    """Executes what concerns nodes and groups; results and failures are posted to the inbox."""

    def execute(self, command: Command) -> None: ...


class Journal:
    """Append-only record of every event and command, one JSON line each, flushed per word."""

    def __init__(self, path: Path, observers: Sequence[Callable[[Word], None]] = ()) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._observers = observers

    def __call__(self, word: Word) -> None:
        self._file.write(encode(word).decode() + "\n")
        self._file.flush()
        for observe in self._observers:
            observe(word)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, which the write before has told
            self._file.close()


class Submission:
    """Requests under way; iterate to get each ``(request, ref)`` as it is done."""

    def __init__(self, requests: Sequence[GenerationRequest], loop: asyncio.AbstractEventLoop) -> None:
        self.requests = {request.id: request for request in requests}
        self._loop = loop
        self._settled: asyncio.Queue[Settle | FleetError] = asyncio.Queue()

    def deliver(self, settled: Settle | FleetError) -> None:
        """Called from the coordinator's thread."""
        self._loop.call_soon_threadsafe(self._settled.put_nowait, settled)

    async def results(self, allow_cancelled: bool = False) -> AsyncIterator[tuple[GenerationRequest, str]]:
        """Each done request with the ref of its result, in order of completion.

        Raises:
            FleetError: a request was aborted, or cancelled (unless ``allow_cancelled``), or the coordinator
                stopped.
        """
        for _ in range(len(self.requests)):
            settled = await self._settled.get()
            if isinstance(settled, FleetError):
                raise settled
            if settled.outcome == "done" and settled.ref is not None:
                yield self.requests[settled.request], settled.ref
            elif settled.outcome == "aborted" or not allow_cancelled:
                raise FleetError(f"request {settled.request} was given up", settled.detail)


class Coordinator:
    """Runs ``drive`` in its own thread and is the client that phases talk to."""

    def __init__(self, *, decider: Decider, nodes: NodeExecutor, inbox: Inbox, journal: Journal) -> None:
        self._decider = decider
        self._nodes = nodes
        self._inbox = inbox
        self._journal = journal
        self._lock = threading.Lock()
        self._waiting: dict[str, Submission] = {}
        self._failure: FleetError | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    # -- the client's side --------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> Submission:
        """Queue requests; call it from the event loop that will read the results."""
        submission = Submission(requests, asyncio.get_running_loop())
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._waiting.update(dict.fromkeys(submission.requests, submission))
        self._inbox.post(Submitted(requests=tuple(requests)))
        return submission

    def change_phase(self, phase: Phase, iteration: int) -> None:
        self._inbox.post(PhaseChanged(phase=phase, iteration=iteration))

    def cancel(self, requests: Sequence[str], reason: str) -> None:
        self._inbox.post(Cancelled(requests=tuple(requests), reason=reason))

    # -- the thread's side --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Finish what is in the inbox, then stop; safe to call twice."""
        self._inbox.close()
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        self._journal.close()

    def events(self) -> Iterator[Event]:
        return self._inbox.events()

    def execute(self, command: Command) -> None:
        match command:
            case SetTimer():
                self._inbox.set_timer(command.id, command.at)
            case Settle():
                with self._lock:
                    submission = self._waiting.pop(command.request, None)
                if submission is not None:
                    submission.deliver(command)
            case Alarm():
                raise FleetError(command.detail, "the run stops here; its journal tells the story")
            case _:
                self._nodes.execute(command)

    def _run(self) -> None:
        try:
            drive(self._decider, self, self._journal)
        except Exception as error:  # every waiting phase must hear of it, whatever it was
            failure = (
                error
                if isinstance(error, FleetError)
                else FleetError(f"the coordinator failed ({error!r})", "see the log")
            )
            with self._lock:
                self._failure = failure
                waiting = list(dict.fromkeys(self._waiting.values()))
                self._waiting.clear()
            for submission in waiting:
                submission.deliver(failure)
            if failure is not error:
                raise
