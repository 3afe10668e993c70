"""Scoring in processes of their own, so that an OCR engine neither shares a GIL nor a crash with the run.

    submit ──► queue ──► dispatcher thread ──► scorer process (spotlight_core.rewards.scorer_process)
       ▲                      │ crash, hang or error: restart, back off, retry, at last ScorerError
       └──── Future ◄─────────┘

A request is scored as one fixed batch, so the same image always gets the same reward.  Messages are
a JSON line and raw pixels over pipes: nothing is unpickled.
"""

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import tenacity

from spotlight_core.child_process import child_environment
from spotlight_core.config import RewardConfig
from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards.patience import request_seconds, start_seconds
from spotlight_core.rewards.scored import Scored
from spotlight_core.types import PromptRow

ATTEMPTS = 4
BACKOFF_SECONDS = (0.2, 5.0)  # first and largest wait between attempts
CLOSE_SECONDS = 5.0
TIMED_REQUESTS = 256

Which = Literal["reward", "held_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    which: Which
    images: np.ndarray
    prompts: tuple[PromptRow, ...]
    future: "Future[Scored]" = field(default_factory=Future)


class ScorerPool:
    """Scorer processes behind one queue; ``held_out`` is the reward that is never trained."""

    def __init__(self, config: RewardConfig, held_out: RewardConfig | None, processes: int = 1) -> None:
        """Starts the processes, which load and test themselves meanwhile (see ``check``)."""
        rewards: dict[Which, RewardConfig] = {"reward": config}
        if held_out is not None:
            rewards["held_out"] = held_out
        recipe = json.dumps({which: reward.model_dump(mode="json") for which, reward in rewards.items()})
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._spent: deque[tuple[float, int]] = deque(maxlen=TIMED_REQUESTS)
        self._closed = threading.Event()
        self._submitting = threading.Lock()
        start = sum(start_seconds(reward) for reward in rewards.values())
        self._configs = rewards
        self._processes = [_ScorerProcess(recipe, start) for _ in range(processes)]
        self._threads = [
            threading.Thread(target=self._dispatch, args=(process,), name=f"scorer-{number}", daemon=True)
            for number, process in enumerate(self._processes)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the scorers that run now."""
        return [process.pid for process in self._processes if process.pid is not None]

    @property
    def seconds_per_image(self) -> float | None:
        """Mean seconds to score one image under the trained reward, lately; None before the first."""
        spent = list(self._spent)
        return sum(seconds for seconds, _ in spent) / sum(n for _, n in spent) if spent else None

    def check(self) -> None:
        """Wait until every scorer has loaded and passed its self-test on golden images.

        Raises:
            BadInputError: the recipe's reward cannot be built (a missing file or package).
            ScorerError: the self-test failed.
        """
        for process in self._processes:
            try:
                process.ensure_ready()
            except _ScoringFailed as error:
                raise ScorerError(
                    f"a scorer did not start ({error})",
                    "score an image with the recipe's rewards by hand to see why, and mend them",
                ) from error

    def submit(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> "Future[Scored]":
        """Score images (uint8 ``[B, height, width, 3]``) under the trained reward.

        Videos have a frame axis after the first, and score as ``score_request`` says.
        """
        return self._submit("reward", images, prompts)

    def submit_held_out(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> "Future[Scored]":
        """Score images under the reward that is never trained."""
        return self._submit("held_out", images, prompts)

    def close(self) -> None:
        """End the processes; what is still queued is cancelled.  Safe to call twice."""
        with self._submitting:
            self._closed.set()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.future.cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for process in self._processes:
            process.stop()
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def _submit(self, which: Which, images: np.ndarray, prompts: Sequence[PromptRow]) -> "Future[Scored]":
        if which not in self._configs:
            raise ValueError("this pool was built without a held-out reward")
        if images.dtype != np.uint8 or images.ndim not in (4, 5) or len(images) != len(prompts):
            raise ValueError(
                f"{images.dtype}{list(images.shape)} is not one uint8 image for {len(prompts)} prompts"
            )
        job = _Job(which=which, images=np.ascontiguousarray(images), prompts=tuple(prompts))
        with self._submitting:  # a job put after close() drained the queue would never be answered
            if self._closed.is_set():
                raise ScorerError("the scorer pool is closed", "submit before the run ends")
            self._jobs.put(job)
        return job.future

    def _dispatch(self, process: "_ScorerProcess") -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            began = time.monotonic()
            try:
                job.future.set_result(self._score(process, job))
                if job.which == "reward":
                    self._spent.append((time.monotonic() - began, len(job.images)))
            except Exception as error:  # whatever it is belongs to whoever waits for the future
                job.future.set_exception(error)

    def _score(self, process: "_ScorerProcess", job: _Job) -> Scored:
        first, longest = BACKOFF_SECONDS
        config = self._configs[job.which]
        images = job.images.shape[0] * (job.images.shape[1] if job.images.ndim == 5 else 1)
        retrying = tenacity.Retrying(
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(ATTEMPTS), tenacity.stop_when_event_set(self._closed)
            ),
            wait=tenacity.wait_exponential(multiplier=first, max=longest),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
            retry=tenacity.retry_if_exception(_may_be_tried_again),
        )
        try:
            return retrying(
                process.score, job.which, job.images, job.prompts, request_seconds(config, images)
            )
        except _ScoringFailed as error:
            attempts = retrying.statistics["attempt_number"]
            raise ScorerError(
                f"scorer {config.type!r} failed {attempts} time{'s' * (attempts > 1)} ({error})",
                "fix the reward and continue with --resume; a failure is never counted as a score of 0",
            ) from error


class _ScoringFailed(Exception):
    """One attempt failed: the scorer raised, died or hung.  ``again`` says whether another may succeed."""

    def __init__(self, cause: str, *, again: bool = True) -> None:
        super().__init__(cause)
        self.again = again


def _may_be_tried_again(error: BaseException) -> bool:
    return isinstance(error, _ScoringFailed) and error.again


class _ScorerProcess:
    """One child process, started when needed.  Used by one thread at a time (``_lock``)."""

    def __init__(self, recipe: str, start_seconds: float) -> None:
        self._recipe = recipe
        self._start_seconds = start_seconds
        self._lock = threading.Lock()
        self._stopped = False
        self._ready = False
        self._child: subprocess.Popen[bytes] | None = None
        self._start()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def ensure_ready(self) -> None:
        """Wait for the self-test of a fresh child."""
        with self._lock:
            self._handshake()

    def score(self, which: Which, images: np.ndarray, prompts: Sequence[PromptRow], seconds: float) -> Scored:
        """One attempt of at most ``seconds``.  ``_ScoringFailed`` may be retried; other errors may not."""
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                self._start()
            self._handshake()
            rows = [{"text": prompt.text, "metadata": dict(prompt.metadata)} for prompt in prompts]
            header = {"which": which, "prompts": rows, "shape": list(images.shape)}
            answer = self._exchange(json.dumps(header).encode() + b"\n" + images.tobytes(), seconds)
        if "error" in answer:
            raise _ScoringFailed(answer["error"], again=not answer["final"])
        return Scored(
            scores=tuple(answer["scores"]),
            parts={name: tuple(scores) for name, scores in answer["parts"].items()},
        )

    def stop(self) -> None:
        """Terminate the child, and kill it when it does not listen."""
        self._stopped = True
        child = self._child
        if child is None:
            return
        child.terminate()
        try:
            child.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        with self._lock:  # whoever waited for an answer has seen the pipe end by now
            self._close_pipes()

    def _close_pipes(self) -> None:
        if self._child is not None and self._child.stdin is not None and self._child.stdout is not None:
            with contextlib.suppress(BrokenPipeError):  # unsent bytes of a request that died with the child
                self._child.stdin.close()
            self._child.stdout.close()

    def _start(self) -> None:
        if self._stopped:
            raise ScorerError("the scorer pool is closed", "submit before the run ends")
        self._ready = False
        self._close_pipes()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "spotlight_core.rewards.scorer_process", self._recipe],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(threads=1),
            process_group=0,  # a Ctrl-C at the terminal is the run's to handle, not the scorer's to die of
        )
        if self._stopped:  # stop() may have looked before this child existed
            self._child.kill()

    def _handshake(self) -> None:
        if self._ready:
            return
        answer = self._exchange(b"", self._start_seconds)
        if "error" in answer:
            kind = BadInputError if answer.get("kind") == "BadInputError" else ScorerError
            raise kind(answer["error"], answer.get("remedy", "fix the reward"))
        self._ready = True

    def _exchange(self, message: bytes, seconds: float) -> dict[str, Any]:
        """Send and wait for one answer line; after silent ``seconds`` the child is killed."""
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        hung = threading.Event()

        def kill() -> None:
            hung.set()
            child.kill()

        watchdog = threading.Timer(seconds, kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            child.stdin.write(message)
            child.stdin.flush()
            line = child.stdout.readline()
        except (BrokenPipeError, OSError) as error:
            line, cause = b"", f"the scorer process died: {error}"
        else:
            cause = "the scorer process ended"
        finally:
            watchdog.cancel()
        if hung.is_set():
            raise _ScoringFailed(f"no answer in {seconds:g} seconds")
        if not line.endswith(b"\n"):
            raise _ScoringFailed(f"{cause} with exit code {child.wait(CLOSE_SECONDS)}")
        return json.loads(line)
