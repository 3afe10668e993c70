"""Requests under way, each scored as it arrives: denoising and scoring overlap within a phase."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np

from spotlight_core.arrays import Arrays
from spotlight_core.events import Phase
from spotlight_core.executor.submission import Submission
from spotlight_core.rewards.scored import Scored
from spotlight_core.types import GenerationRequest, PromptRow

Score = Callable[[np.ndarray, Sequence[PromptRow]], "Future[Scored]"]


class Results(Protocol):
    """Where the arrays of finished requests are until somebody takes them."""

    def take(self, ref: str) -> Arrays: ...


class Requests(Protocol):
    """The coordinator, as the phases talk to it: ``take`` and ``wait_alone`` block."""

    def submit(
        self, requests: Sequence[GenerationRequest], deadline_seconds: float | None = None
    ) -> Submission: ...

    def take(self, ref: str) -> Arrays: ...

    def change_phase(self, phase: Phase, iteration: int) -> None: ...

    def cancel(self, requests: Sequence[str], reason: str) -> None: ...

    def wait_alone(self, iteration: int) -> None: ...


class Generation:
    """A submission whose results are collected and scored; rows are in the order of each request's seeds.

    Of each result only the arrays named in ``keep`` stay in memory.
    """

    def __init__(
        self,
        submission: Submission,
        results: Results,
        scorers: Mapping[str, Score],
        keep: Collection[str] = (),
    ) -> None:
        self.requests: tuple[GenerationRequest, ...] = tuple(submission.requests.values())
        self.arrays: dict[str, Arrays] = {}
        self.collecting: asyncio.Task[None] | None = None
        self._submission = submission
        self._results = results
        self._scorers = scorers
        self._keep = keep
        self._scores: dict[str, dict[str, asyncio.Future[Scored]]] = {name: {} for name in scorers}

    async def collect(self, *, allow_cancelled: bool = False) -> None:
        """Until every request is done; hands each result to the scorers at once.

        Raises:
            FleetError: a request was given up (cancelled ones only unless ``allow_cancelled``).
        """
        async for request, ref in self._submission.results(allow_cancelled):
            # In a thread: a real model's trajectories take a while to come over.
            arrays = await asyncio.to_thread(self._results.take, ref)
            for name, score in self._scorers.items():
                # The request is the scorer's batch: a batch of another make-up may differ in the last bits.
                self._scores[name][request.id] = asyncio.wrap_future(
                    score(arrays["images"], request.row_prompts)
                )
            self.arrays[request.id] = {key: value for key, value in arrays.items() if key in self._keep}

    async def scores(self, name: str = "score") -> dict[str, list[float]]:
        """Rewards by request id, of what was collected, in the order of submission."""
        futures = self._scores[name]
        return {
            request.id: list((await futures[request.id]).scores)
            for request in self.requests
            if request.id in futures
        }

    def parts(self) -> dict[str, dict[str, list[float]]]:
        """The scores of each of several rewards, by name and request id; ``scores`` must have returned."""
        found: dict[str, dict[str, list[float]]] = {}
        for request_id, future in self._scores["score"].items():
            for name, scores in future.result().parts.items():
                found.setdefault(name, {})[request_id] = list(scores)
        return found

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Ids without a result so far."""
        return tuple(request.id for request in self.requests if request.id not in self.arrays)
