"""Running the flow and ending it: signals, exit, and nothing of the run left behind.

The flow runs in a thread and the main thread only waits for signals: inside the flow's own thread
Prefect would replace the SIGTERM handler, and a handler that raises anywhere in an event loop ends
in whatever state it hit.

    first SIGINT, SIGTERM, SIGHUP   cancel the flow, close fleet, scorer and servers; checkpoints stay
                              (while everything starts: as the second)
    second, or 8 s later            SIGKILL everything of the run and leave at once
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from flows.reaper import reap_after_exit
from flows.targets import Target, chosen_weights
from spotlight_core.config import RunConfig
from spotlight_core.durable import write_text
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.executor.processes import reap, run_environment
from spotlight_core.types import PromptRow
from tasks.display import Display
from tasks.logs import log_to, stop_logging
from tasks.recovery import held
from tasks.run_folder import RunFolder
from tasks.services import PrefectServer

if TYPE_CHECKING:
    from flows.evaluate import Evaluated
    from tasks.plant import Plant

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLOSE_SECONDS = 8.0
INTERRUPTED = 130


class InterruptedRun(SpotlightError):
    """Raised when a signal ended the run; it can be resumed."""

    exit_code = INTERRUPTED


def train(config: RunConfig, folder: RunFolder, *, resume: bool, fresh: bool, display: Display) -> str:
    """Run ``post-train`` to its end; returns the hash of the final weights.

    The state of the folder is looked at again under its lock: another run may have begun meanwhile.

    Raises:
        InterruptedRun: a signal ended it.
        SpotlightError: whatever made it fail.
    """
    os.environ.update(run_environment(folder.run_id))  # every child inherits it, and is found by it
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.acquire()
    try:
        if fresh:
            folder.empty()
        if folder.exists() is not resume:
            state = "there is none to resume" if resume else "it has been begun meanwhile"
            raise BadInputError(
                f"run {folder.name}: {state}", "look at the folder, then choose --resume or --name"
            )
        folder.create()
        # Resumed too: the coordinator reads it, and the services may be others than before.
        write_text(folder.recipe, config.model_dump_json(indent=2) + "\n")
        driver = _Driver(config, folder, display)
        _supervise(driver, folder)
        return driver.result()
    finally:
        folder.release()


def interrupted(folder: RunFolder) -> InterruptedRun:
    return InterruptedRun(f"run {folder.name} was interrupted", "continue it with --resume")


class _Driver:
    """The thread that owns the run and its event loop."""

    def __init__(self, config: RunConfig, folder: RunFolder, display: Display) -> None:
        self._config = config
        self._folder = folder
        self._display = display
        self._stop = threading.Event()
        self._cancel: Callable[[], object] | None = None
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.failure: SpotlightError | None = None
        self._digest: str | None = None
        self.starting = True
        self._plant: Plant | None = None
        self.thread = threading.Thread(target=self._run, name="driver", daemon=True)

    def stop(self) -> None:
        """Ask the run to end; returns at once."""
        with self._lock:
            self._stop.set()
            if self._cancel is not None:
                self._cancel()

    def dead_part(self) -> SpotlightError | None:
        """What the run cannot go on without and has ended, if something has."""
        return None if self.starting or self._plant is None else self._plant.dead_part()

    def fail(self, error: SpotlightError) -> None:
        """End the run because of ``error``."""
        self.failure = error
        self.stop()

    def result(self) -> str:
        if self._digest is not None:
            return self._digest
        if self.failure is not None:
            raise self.failure
        if self._stop.is_set():
            raise interrupted(self._folder) from self._error
        if self._error is not None:
            raise self._error
        assert self._digest is not None
        return self._digest

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # handed to the main thread, which raises it
            self._error = error

    def _work(self) -> None:
        # First, since Prefect reads its settings when it is imported, which `tasks.plant` does.
        prefect = PrefectServer(self._folder, self._config.services.prefect_port)

        from tasks.plant import Plant

        log = log_to(self._folder.logs / "driver.log")
        plant = Plant(self._config, self._folder, prefect=prefect, display=self._display)
        try:
            checkpoint = plant.start()
            self._plant, self.starting = plant, False
            asyncio.run(self._flow(plant, checkpoint))
        finally:
            plant.close()
            stop_logging(log)

    async def _flow(self, plant: "object", checkpoint: "object") -> None:
        from flows.post_train import post_train
        from tasks.live_run import LiveRun, set_current_run

        run = LiveRun(plant, checkpoint)  # type: ignore[arg-type]
        set_current_run(run)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        with self._lock:
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            if self._stop.is_set():
                return
        try:
            await post_train(run=self._config.name, iterations=self._config.iterations)
        finally:
            with self._lock:
                self._cancel = None
        self._digest = run.weights_digest


def _supervise(driver: _Driver, folder: RunFolder) -> None:
    """Wait for the driver in the main thread; turn signals into an orderly or an immediate end."""
    asked = threading.Event()

    def leave_now() -> None:
        reap_after_exit(folder)
        error = driver.failure or interrupted(folder)
        with contextlib.suppress(OSError):  # a terminal that has hung up
            sys.stderr.write(f"\nerror: {error}\n")  # others may have left a line open
            sys.stderr.flush()
        os._exit(error.exit_code)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if asked.is_set() or driver.starting:
            # While servers and nodes start there is no orderly way back, and nothing to save.
            leave_now()
        asked.set()
        driver.stop()

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number in SIGNALS:
            signal.signal(number, on_signal)
        driver.thread.start()
        while driver.thread.is_alive() and not asked.is_set():
            dead = driver.dead_part()
            if dead is not None:
                asked.set()
                driver.fail(dead)
            driver.thread.join(timeout=0.2)  # not without end: signal handlers run between two waits
        driver.thread.join(timeout=CLOSE_SECONDS if asked.is_set() else None)
        if driver.thread.is_alive():
            leave_now()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def evaluate_target(
    target: Target, rows: Sequence[PromptRow], grid: Path | None, advance: Callable[[int], None]
) -> "Evaluated":
    """Score a run's newest evaluated weights, or a checkpoint's, under an embedded API of its own.

    The grid goes to the run's images when ``grid`` is None; ``advance`` hears of images that are done.

    Raises:
        BadInputError: the run has no evaluated weights, or is being trained.
    """
    config, folder = target.config, target.folder
    with held(folder):
        # Threads before torch is imported: the last bits depend on them, here as in the run.
        threads = {"OMP_NUM_THREADS": str(config.services.torch_threads)}
        os.environ.update(run_environment(folder.run_id) | threads)
        policy, weights = chosen_weights(target)
        server = PrefectServer(folder, config.services.prefect_port)
        try:
            server.start()
            from flows.evaluate import EvaluationOrder, evaluate_policy

            order = EvaluationOrder(
                config=config,
                policy=policy,
                weights=weights,
                rows=rows,
                grid=grid or folder.images / f"evaluate-{policy.name}.png",
            )
            return asyncio.run(evaluate_policy(order, advance))
        finally:
            server.stop()
            reap(folder.run_id)
