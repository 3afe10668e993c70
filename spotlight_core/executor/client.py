"""The driver's side of the coordinator: the same surface, with HTTP between.

    phases ──► outbox ──► one thread, in order ──► /submit /phase /cancel
    /settled ──► one thread a submission ──► Submission.deliver
    /alive ──► one thread, every few seconds: the coordinator's failure, and our own sign of life

No call here waits for the network but ``take``, ``wait_ready`` and ``close``.  Everything is said
again when no answer came; a coordinator that is gone, or silent for long, fails whoever waits.
"""

import asyncio
import logging
import queue
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import psutil

from spotlight_core.arrays import Arrays, from_bytes
from spotlight_core.errors import FleetError, SpotlightError
from spotlight_core.events import Phase
from spotlight_core.executor.submission import Submission
from spotlight_core.executor.wire import (
    EPOCH_HEADER,
    POLL_SECONDS,
    Cancel,
    ChangePhase,
    Outcomes,
    Status,
    Submit,
    Whereabouts,
    decode_error,
    to_json,
)
from spotlight_core.types import GenerationRequest

LOG = logging.getLogger(__name__)
ALIVE_SECONDS = 2.0
ANSWER_SECONDS = 15.0
SILENT_SECONDS = 60.0
"""Without an answer for this long a coordinator that still runs counts as gone."""
RETRY_SECONDS = 0.2
READY_SECONDS = 600.0
ALONE_SECONDS = 300.0  # as long as a request may take to let go
ALONE_POLL_SECONDS = 0.02
CLOSE_ANSWER_SECONDS = 5.0
CLOSE_SECONDS = 90.0
"""More than an orderly end takes: a start that is under way, then every node's grace."""
LISTEN_SECONDS = 60.0
ENDED = "the coordinator has ended by itself"
REMEDY = "continue with --resume (see logs/coordinator.log of the run)"


def find(path: Path, epoch: int, process: "subprocess.Popen[bytes] | None" = None) -> Whereabouts:
    """What ``coordinator.json`` says once the coordinator of ``epoch`` has written it.

    Raises:
        SpotlightError: it did not start; the very error that it met there.
    """
    deadline = time.monotonic() + LISTEN_SECONDS
    while time.monotonic() < deadline:
        ended = process is not None and process.poll() is not None  # before the look: it may tell why
        where = _read(path)
        if where is not None and where.epoch == epoch and (process is None or where.pid == process.pid):
            if where.error is not None:
                raise where.error.error()
            return where
        if ended:
            assert process is not None
            raise FleetError(
                f"the coordinator ended with exit code {process.returncode} while it started",
                f"see {path.parent / 'logs' / 'coordinator.log'}",
            )
        time.sleep(0.02)
    raise FleetError(
        f"no coordinator of epoch {epoch} came up in {LISTEN_SECONDS:g} s",
        f"see {path.parent / 'logs' / 'coordinator.log'}",
    )


def _read(path: Path) -> Whereabouts | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Whereabouts)
    except (OSError, msgspec.MsgspecError):
        return None


class CoordinatorClient:
    """See the module's text.  ``process`` is the coordinator's, when this process started it."""

    def __init__(self, where: Whereabouts, process: "subprocess.Popen[bytes] | None" = None) -> None:
        self._where = where
        self._process = process
        self._http = httpx.Client(
            base_url=where.url,
            headers={"Authorization": f"Bearer {where.token}", EPOCH_HEADER: str(where.epoch)},
            timeout=httpx.Timeout(ANSWER_SECONDS, read=ANSWER_SECONDS + POLL_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            trust_env=False,  # a proxy for the world must not see the token, nor can it reach 127.0.0.1
        )
        self._lock = threading.Lock()
        self._failure: SpotlightError | None = None
        self._submissions: dict[str, Submission] = {}
        self._phase_changes = 0
        self._closed = threading.Event()
        self._answered_at = time.monotonic()
        self._outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        for name, work in (("coordinator-outbox", self._send), ("coordinator-alive", self._stay_alive)):
            threading.Thread(target=work, name=name, daemon=True).start()

    # -- the phases' side ---------------------------------------------------------------------------

    @property
    def failure(self) -> SpotlightError | None:
        """Why nothing more will come from the coordinator, if that is so."""
        return self._failure

    def submit(
        self, requests: Sequence[GenerationRequest], deadline_seconds: float | None = None
    ) -> Submission:
        """Queue requests; call it from the event loop that will read the results.

        Raises:
            SpotlightError: the coordinator has failed, or is gone.
        """
        submission = Submission(requests, asyncio.get_running_loop())
        name = uuid.uuid4().hex
        body = Submit(submission=name, requests=tuple(requests), deadline_seconds=deadline_seconds)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._submissions[name] = submission
        self._outbox.put(lambda: self._submit(body))
        return submission

    def change_phase(self, phase: Phase, iteration: int) -> None:
        with self._lock:
            self._phase_changes += 1
            body = ChangePhase(number=self._phase_changes, phase=phase, iteration=iteration)
            self._outbox.put(lambda: self._post("/phase", body))

    def cancel(self, requests: Sequence[str], reason: str) -> None:
        body = Cancel(requests=tuple(requests), reason=reason)
        self._outbox.put(lambda: self._post("/cancel", body))

    def take(self, ref: str) -> Arrays:
        """A finished result, which the coordinator then forgets.  Blocks while it travels.

        Raises:
            SpotlightError: there is no such result, or the coordinator is gone.
        """
        path = f"/results/{quote(ref, safe='')}"
        arrays = from_bytes(self._ask("GET", path).content)
        self._outbox.put(lambda: self._forget(path))
        return arrays

    # -- the run's side -----------------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Until the first nodes are there.

        Raises:
            SpotlightError: they did not come, or the coordinator is gone.
        """
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._failure is not None:
                raise self._failure
            if self.status().ready:
                return
            self._closed.wait(RETRY_SECONDS)
        raise FleetError(f"no nodes came up in {READY_SECONDS:g} s", "see logs/coordinator.log of the run")

    def wait_alone(self, iteration: int) -> None:
        """Until training has the reserved GPUs to itself in this iteration, whose phase has been told.

        Raises:
            SpotlightError: their ranks did not let go of them, or the coordinator is gone.
        """
        deadline = time.monotonic() + ALONE_SECONDS
        while time.monotonic() < deadline:
            if self._failure is not None:
                raise self._failure
            if self.status().trainer_alone == iteration:
                return
            self._closed.wait(ALONE_POLL_SECONDS)
        raise FleetError(
            f"ranks of reserved nodes hold their GPUs {ALONE_SECONDS:g} s after training began",
            "see logs/coordinator.log of the run, or set elastic.sleep = false",
        )

    def status(self) -> Status:
        """How the coordinator is; what failed there is kept as ``failure``."""
        status = msgspec.json.decode(self._ask("POST", "/alive").content, type=Status)
        if status.failure is not None:
            self._fail(status.failure.error())
        return status

    def alive(self) -> bool:
        """Whether the coordinator's process runs."""
        if self._process is not None:
            return self._process.poll() is None
        try:
            return psutil.Process(self._where.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def close(self) -> None:
        """Have the nodes ended and wait for the coordinator's own end: each node's is in the journal then.

        Safe to call twice, and when it is gone.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._outbox.put(None)
        if self.alive():
            try:
                self._http.post("/close", timeout=CLOSE_ANSWER_SECONDS)
            except httpx.TransportError as error:
                LOG.warning("the coordinator does not hear that it should end: %s", error)
            self._wait_for_end()
        self._fail(FleetError("the coordinator was closed", "continue with --resume"))
        self._http.close()

    def _wait_for_end(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.alive():
            LOG.warning("the coordinator has not ended in %g s", CLOSE_SECONDS)

    # -- the threads --------------------------------------------------------------------------------

    def _send(self) -> None:
        """What the phases say, in the order they say it."""
        while (message := self._outbox.get()) is not None:
            try:
                message()
            except SpotlightError as error:
                self._fail(error)
            except Exception as error:  # a fault of ours must not leave phases waiting for ever
                LOG.exception("a word to the coordinator failed")
                self._fail(FleetError(f"a word to the coordinator failed ({error!r})", "see logs/driver.log"))

    def _submit(self, body: Submit) -> None:
        self._post("/submit", body)
        threading.Thread(
            target=self._follow, args=(body.submission,), name="coordinator-settled", daemon=True
        ).start()

    def _follow(self, name: str) -> None:
        """Deliver what becomes of a submission's requests, as it is told."""
        with self._lock:
            submission = self._submissions.get(name)
        if submission is None:
            return
        seen = 0
        try:
            while seen < len(submission.requests) and not self._closed.is_set():
                answer = self._ask("GET", "/settled", params={"submission": name, "after": seen})
                for settled in msgspec.json.decode(answer.content, type=Outcomes).settled:
                    seen += 1
                    submission.deliver(settled)
        except Exception as error:  # whatever it was, the phase that waits must hear of it
            failure = error if isinstance(error, SpotlightError) else FleetError(repr(error), "see the log")
            self._fail(failure)
            return
        with self._lock:
            self._submissions.pop(name, None)

    def _stay_alive(self) -> None:
        while not self._closed.wait(ALIVE_SECONDS):
            try:
                self.status()
            except SpotlightError as error:
                self._fail(error)
                return

    def _fail(self, error: SpotlightError) -> None:
        """Tell whoever waits; the first failure is the one that is told."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            waiting = list(self._submissions.values())
            self._submissions.clear()
        for submission in waiting:
            submission.deliver(error)

    # -- one request --------------------------------------------------------------------------------

    def _post(self, path: str, body: Any) -> None:
        self._ask("POST", path, content=to_json(body))

    def _forget(self, path: str) -> None:
        self._ask("DELETE", path)

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The answer; said again until there is one.

        Raises:
            SpotlightError: what the coordinator answered instead; that it is gone, silent, or was closed.
        """
        while True:
            try:
                answer = self._http.request(method, path, **request)
            except (httpx.TransportError, RuntimeError) as error:  # RuntimeError: closed meanwhile
                self._check_there(error)
                self._closed.wait(RETRY_SECONDS)
                continue
            self._answered_at = time.monotonic()
            if answer.is_success:
                return answer
            raise decode_error(answer.content, answer.status_code)

    def _check_there(self, error: Exception) -> None:
        if self._closed.is_set():
            raise FleetError("the coordinator was closed", "continue with --resume") from error
        if not self.alive():
            raise FleetError(ENDED, REMEDY) from error
        if time.monotonic() - self._answered_at > SILENT_SECONDS:
            raise FleetError(f"the coordinator has not answered for {SILENT_SECONDS:g} s", REMEDY) from error
