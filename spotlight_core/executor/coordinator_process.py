"""The coordinator as a process of its own: ``python -m spotlight_core.executor.coordinator_process``.

    lock ─► build ─► listen, say where in coordinator.json ─► start the nodes ─► serve
    /close, SIGTERM, or a client that has been silent ─► end the nodes, journal their ends, leave

It outlives no driver for long: machines that nobody pays attention to cost money.  And it never
writes beside another: the lock keeps a second one on this machine out, and one that was replaced all
the same, after a pause, finds the newer epoch in the run's folder before its next word.
"""

import argparse
import fcntl
import gc
import json
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TextIO

from pydantic import ValidationError

from spotlight_core.config import RunConfig
from spotlight_core.durable import write_bytes
from spotlight_core.errors import BadInputError, FleetError
from spotlight_core.executor.coordinator import Coordinator, Journal
from spotlight_core.executor.endpoints import HttpServer
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.parts import Build, Parts
from spotlight_core.executor.processes import RUN_VARIABLE
from spotlight_core.executor.service import Service
from spotlight_core.executor.wire import Told, Whereabouts, to_json

LOG = logging.getLogger(__name__)

LINGER_SECONDS = 60.0
"""Silence of every client after which the nodes are released."""
TICK_SECONDS = 0.2
START_END_SECONDS = 30.0
LOCKED, SUPERSEDED = 4, 5
"""Exit codes: another coordinator has the run; another has taken it over."""


class Superseded(FleetError):
    """Raised when a newer coordinator, or a driver that is about to start one, has the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which run, under which epoch; ``run_id`` marks the run's processes."""

    run_folder: Path
    run_id: str
    epoch: int
    linger_seconds: float = LINGER_SECONDS

    @property
    def whereabouts(self) -> Path:
        return self.run_folder / "coordinator.json"


class Fence:
    """Raises Superseded once the run's folder names a higher epoch.  Cheap: two files are looked at."""

    def __init__(self, order: Order) -> None:
        self._epoch = order.epoch
        self._seen: dict[Path, tuple[int, int]] = {}
        self._paths = (order.run_folder / "run.json", order.whereabouts)
        self._newer: int | None = None

    def __call__(self) -> None:
        for path in self._paths:
            # Not there yet, or nothing that a driver writes: it names no epoch.
            with suppress(OSError, ValueError, AttributeError, TypeError):
                self._look(path)
        if self._newer is not None:
            raise Superseded(
                f"epoch {self._newer} has the run, and this coordinator was of epoch {self._epoch}",
                "let the newer one go on",
            )

    def _look(self, path: Path) -> None:
        about = os.stat(path)
        version = (about.st_ino, about.st_mtime_ns)  # each is replaced whole
        if self._seen.get(path) == version:
            return
        epoch = json.loads(path.read_text(encoding="utf-8")).get("epoch", 0)
        self._seen[path] = version
        if epoch > self._epoch:
            self._newer = epoch


def take_lock(run_folder: Path) -> TextIO:
    """The run's one coordinator; the lock is gone with this process, however it ends.

    Raises:
        BadInputError: another living coordinator has it.
    """
    file = (run_folder / "coordinator.lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        pid = file.read().strip() or "another process"
        file.close()
        raise BadInputError(
            f"process {pid} is the coordinator of {run_folder}",
            f"wait for its end, or end it with `spotlight down {run_folder.name}`",
        ) from None
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def announce(path: Path, where: Whereabouts) -> None:
    """Write ``coordinator.json`` durably and for its owner alone, since it holds the token."""
    write_bytes(path, to_json(where), mode=0o600)


def read_recipe(run_folder: Path) -> RunConfig:
    """The run's resolved recipe.

    Raises:
        BadInputError: it is missing, or none of this version.
    """
    path = run_folder / "recipe.json"
    try:
        return RunConfig.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise BadInputError(f"cannot read {path} ({error})", "begin the run again with --fresh") from error


@dataclass(slots=True)
class _Silence:
    """Seconds without a word from a client, as far as this process was awake to hear one."""

    heard_at: float
    seconds: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def tick(self, heard_at: float) -> float:
        now = time.monotonic()
        # A longer tick was a pause of this process: what the client said meanwhile is still in the socket.
        self.seconds = 0.0 if heard_at != self.heard_at else self.seconds + min(now - self._last, 1.0)
        self.heard_at, self._last = heard_at, now
        return self.seconds


class CoordinatorProcess:
    """The coordinator's life, from the built parts to its exit code.  For the main thread."""

    def __init__(self, order: Order, config: RunConfig, build: Build) -> None:
        self._order = order
        self._fence = Fence(order)
        self._fence()
        inbox = Inbox(order.epoch)
        self._parts: Parts = build(config, order.run_folder, order.run_id, inbox)
        self._coordinator = Coordinator(
            decider=self._parts.decider,
            nodes=self._parts.nodes,
            inbox=inbox,
            journal=Journal(order.run_folder / "journal.jsonl", [self._parts.observe], self._fence),
        )
        self._terminated = False
        self._ready = threading.Event()
        self._service = Service(
            coordinator=self._coordinator,
            results=self._parts.results,
            sizes=self._parts.sizes,
            epoch=order.epoch,
            ready=self._ready.is_set,
        )
        self._token = secrets.token_urlsafe(32)
        self._http = HttpServer(self._service, self._token)
        self._starting = threading.Thread(target=self._start_nodes, name="start-nodes", daemon=True)

    def run(self) -> int:
        """Serve until it is time to go; the process's exit code."""
        self._coordinator.start()
        self._http.start()
        where = Whereabouts(epoch=self._order.epoch, pid=os.getpid(), url=self._http.url, token=self._token)
        announce(self._order.whereabouts, where)
        LOG.info("epoch %d listens at %s", self._order.epoch, self._http.url)
        self._starting.start()
        try:
            self._serve()
            self._end()
        except Superseded as error:
            # Not one more word, nor a look at its nodes, which may be the other's by now; those that are
            # still its own hear nothing any more and stop themselves.
            LOG.error("%s", error)
            return SUPERSEDED
        return 0

    def _start_nodes(self) -> None:
        try:
            self._parts.fleet.start()
        except Exception as error:  # told to the client, who asks whether the nodes are there
            if not self._service.closing.is_set():
                LOG.exception("the nodes did not start")
                self._coordinator.fail(Told.of(error).error())
            return
        # What there is by now stays: the collector need not walk through it again and again.  And words
        # hold no cycles, so it seldom has to look at all: at its own pace it would take a tenth of a busy
        # coordinator's time to find nothing.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 100)
        self._ready.set()

    def _serve(self) -> None:
        silence = _Silence(self._service.heard_at)
        self._arm()
        while not (self._service.closing.wait(TICK_SECONDS) or self._terminated):
            self._arm()
            self._fence()
            if silence.tick(self._service.heard_at) > self._order.linger_seconds:
                LOG.warning("no client for %g s: the nodes are released", self._order.linger_seconds)
                return
            if self._ready.is_set() and not self._parts.fleet.alive():
                self._coordinator.fail(
                    FleetError("the Ray head has ended by itself", "continue with --resume (see logs)")
                )

    def _arm(self) -> None:
        """SIGTERM is an orderly end; again and again, since Ray puts its own handler below Python's, which
        aborts the process three seconds after the signal."""
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self._terminated = True  # a flag: to set an event whose lock this very thread may hold would hang

    def _end(self) -> None:
        """The nodes, then the coordinator: each node's end is in the journal.

        Raises:
            Superseded: nodes, or the file that says where it listens, may be another coordinator's by now.
        """
        self._service.closing.set()
        # Ray aborts the process when its head is ended while a thread connects to it.
        self._starting.join(START_END_SECONDS)
        self._fence()
        try:
            self._parts.fleet.close()
        finally:
            self._coordinator.close()
            self._fence()
            self._order.whereabouts.unlink(missing_ok=True)
            self._http.close()


def serve(order: Order, build: Build) -> int:
    """Be the coordinator of a run; the process's exit code.

    What goes wrong before it listens is told in ``coordinator.json``, unless another coordinator's is there.
    """
    try:
        lock = take_lock(order.run_folder)
    except BadInputError as error:
        LOG.error("%s", error)
        return LOCKED
    with lock:
        try:
            process = CoordinatorProcess(order, read_recipe(order.run_folder), build)
        except Superseded as error:
            LOG.error("%s", error)
            return SUPERSEDED
        except Exception as error:  # whatever it was, the driver waits for a word
            LOG.exception("the coordinator did not start")
            told = Told.of(error)
            announce(order.whereabouts, Whereabouts(epoch=order.epoch, pid=os.getpid(), error=told))
            return told.error().exit_code
        return process.run()


def arguments(argv: Sequence[str] | None = None) -> Order:
    """Raises SystemExit for what cannot be understood, as argparse does."""
    parser = argparse.ArgumentParser(prog="coordinator_process", description="The coordinator of a run.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--epoch", type=int, required=True, help="higher than any before")
    parser.add_argument("--run-id", default=os.environ.get(RUN_VARIABLE), help=f"default: {RUN_VARIABLE}")
    parser.add_argument("--linger-seconds", type=float, default=LINGER_SECONDS)
    given = parser.parse_args(argv)
    if not given.run_id:
        parser.error(f"set {RUN_VARIABLE} or give --run-id: it marks the run's processes")
    return Order(
        run_folder=given.run_folder.resolve(),
        run_id=given.run_id,
        epoch=given.epoch,
        linger_seconds=given.linger_seconds,
    )


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> int:
    """The command; ``build`` other than the real parts is for tests."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return serve(arguments(argv), build or _assemble)


def _assemble(config: RunConfig, run_folder: Path, run_id: str, inbox: Inbox) -> Parts:
    from spotlight_core.executor.assembly import assemble  # Ray: a second that a refusal need not take

    return assemble(config, run_folder, run_id, inbox)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads of Ray's would keep the process, and its lock
