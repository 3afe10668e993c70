"""The Tensor Store from the processes that use it: a node's actors, and the executor, which restarts it.

The keeper is found by its name, which ends in a number: Ray does not give a dead actor's name away
again, so a successor has a higher one, and its users take the highest that there is.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from spotlight_core.errors import FleetError, SpotlightError
from spotlight_core.executor.cluster import HEAD, SHARE, node_resource
from spotlight_core.executor.commits import StoreAway
from spotlight_core.executor.loop import LoopThread
from spotlight_core.executor.store_keeper import NewestCommit, StoreKeeper

LOG = logging.getLogger(__name__)

CALL_SECONDS = 10.0
AWAY_SECONDS = 30.0  # a killed keeper is back within this, or something else is wrong
FENCE_SECONDS = 1.0
RETRY_SECONDS = 0.2


class RayStore:
    """The store as the actors of a node use it; from any thread."""

    def __init__(self, name: str) -> None:
        self._prefix = name.rpartition("-")[0] + "-"
        self._keeper: Any = None

    def put(self, lease: str, request: str, next_denoise_step: int, payload: bytes) -> tuple[str, str]:
        """Returns ``(ref, digest)`` when durable.

        Raises:
            SpotlightError: the store refuses.
            StoreAway: no answer; not tried again, since the request must go on.
        """
        known = self._keeper is not None
        try:
            stored: tuple[str, str] = self._call("put", lease, request, next_denoise_step, payload)
        except StoreAway:
            if not known:
                raise
            stored = self._call("put", lease, request, next_denoise_step, payload)  # a successor, if any
        return stored

    def get(self, ref: str, digest: str) -> bytes:
        """The commit; waits for a store that is away, since nothing can begin without it.

        Raises:
            SpotlightError: it is missing or damaged.
            StoreAway: no answer for ``AWAY_SECONDS``.
        """
        deadline = time.monotonic() + AWAY_SECONDS
        while True:
            try:
                payload: bytes = self._call("get", ref, digest)
            except StoreAway:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                return payload

    def _call(self, method: str, *arguments: object) -> Any:
        keeper = self._keeper  # another thread may forget it at any moment
        try:
            if keeper is None:
                keeper = self._keeper = self._find()
            return ray.get(getattr(keeper, method).remote(*arguments), timeout=CALL_SECONDS)
        except RayTaskError as error:
            if isinstance(error.cause, SpotlightError):
                raise error.cause from None
            raise StoreAway(str(error)) from error
        except RayError as error:
            if self._keeper is keeper:
                self._keeper = None
            raise StoreAway(str(error)) from error

    def _find(self) -> Any:
        """The latest keeper that there is: some numbers are of keepers that never came up."""
        numbers = [
            int(name.removeprefix(self._prefix))
            for name in ray.util.list_named_actors()
            if name.startswith(self._prefix)
        ]
        for number in sorted(numbers, reverse=True):
            try:
                return ray.get_actor(f"{self._prefix}{number}")
            except ValueError:  # it died since
                continue
        raise StoreAway(f"there is no actor {self._prefix}*")


class KeptStore:
    """The executor's side: keeps a keeper there, and speaks to it from the loop."""

    def __init__(self, *, loop: LoopThread, url: str, memory_bytes: int, epoch: int) -> None:
        self._epoch = epoch
        self._number = 0
        self._loop = loop
        self._url = url
        self._memory_bytes = memory_bytes
        self._keeper: Any = None
        self._closing = False
        self._committed: set[str] = set()  # requests that have commits to discard
        self._fenced: dict[str, str] = {}  # lost leases and their requests, which no keeper may forget

    @property
    def name(self) -> str:
        """The present keeper's name."""
        return f"tensor-store-epoch-{self._epoch}-{self._number}"

    def start(self) -> None:
        """Bring the keeper up; from another thread than the loop's.

        Raises:
            SpotlightError: the store cannot be opened.
        """
        keeper = self._create()
        try:
            ray.get(keeper.ready.remote())
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, SpotlightError) else _no_store(error)) from error
        except RayError as error:
            raise _no_store(error) from error
        self._loop.call(self._watch, keeper)

    def close(self) -> None:
        self._closing = True

    async def put(self, lease: str, request: str, next_denoise_step: int, payload: bytes) -> tuple[str, str]:
        """As an actor's, but waits for a store that is away.

        Raises:
            SpotlightError: the store refuses, or stays away for ``AWAY_SECONDS``.
        """
        deadline = time.monotonic() + AWAY_SECONDS
        while time.monotonic() < deadline:
            try:
                stored: tuple[str, str] = await self._keeper.put.remote(
                    lease, request, next_denoise_step, payload
                )
            except RayTaskError as error:
                if isinstance(error.cause, SpotlightError):
                    raise error.cause from None
                raise
            except RayError:
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return stored
        raise SpotlightError(
            f"the Tensor Store {self._url} does not answer", "see the coordinator's log, then resume the run"
        )

    async def fence(self, leases: Mapping[str, str]) -> dict[str, NewestCommit]:
        """Last commits of lost leases, none of which commits any more; nothing from a store that is away."""
        if not leases:
            return {}
        self._fenced.update(leases)
        try:
            call = self._keeper.fence.remote(dict(leases))
            found: dict[str, NewestCommit] = await asyncio.wait_for(_answer(call), FENCE_SECONDS)
        except Exception as error:  # whatever it was, the loss of the leases must be told
            LOG.warning("the last commits of %s are unknown: %r", ", ".join(leases), error)
            return {}
        return found

    def holds(self, request: str) -> None:
        """The request has commits."""
        self._committed.add(request)

    def discard(self, request: str, running: Sequence[str] = ()) -> None:
        """The request is settled: its commits may go, and its ``running`` leases make no more.

        A namesake that is submitted later must not go on from what they would leave.
        """
        self._fenced.update(dict.fromkeys(running, request))
        if running or request in self._committed:
            self._committed.discard(request)
            self._keeper.discard.remote([request], list(running))

    def forget_before(self, iteration: int) -> None:
        """An iteration began: no request of an earlier one resumes any more.  From any thread."""
        self._loop.call(lambda: self._keeper.forget_before.remote(iteration))

    # -- on the loop ----------------------------------------------------------------------------------

    def _watch(self, keeper: Any) -> None:
        self._keeper = keeper
        self._loop.spawn(self._stay(keeper))

    async def _stay(self, keeper: Any) -> None:
        """Another keeper whenever this one dies."""
        while not self._closing:
            try:
                await keeper.until_stopped.options(concurrency_group="life").remote()
            except Exception as error:
                if self._closing:
                    return
                LOG.warning("the Tensor Store's process died (%s), another one starts", type(error).__name__)
            keeper = await self._another()

    async def _another(self) -> Any:
        while not self._closing:
            try:
                self._number += 1
                known = dict(self._fenced)
                keeper = await asyncio.to_thread(self._create, tuple(known))
                await keeper.ready.remote()
                if missed := dict(self._fenced.items() - known.items()):
                    await keeper.fence.remote(missed)
                self._keeper = keeper
            except Exception as error:  # whatever it was, without a store no node's work is safe
                LOG.warning("the Tensor Store is not back yet: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return keeper
        return self._keeper

    def _create(self, fenced: tuple[str, ...] = ()) -> Any:
        remote = ray.remote(concurrency_groups={"life": 1})(StoreKeeper)
        actor = remote.options(
            name=self.name,
            num_cpus=0,
            resources={node_resource(*HEAD): SHARE},
            max_concurrency=8,
            max_restarts=0,
            max_task_retries=0,
        )
        return actor.remote(self._url, self._memory_bytes, fenced)


async def _answer(reference: Any) -> Any:
    return await reference


def _no_store(error: Exception) -> FleetError:
    return FleetError(f"the Tensor Store did not start ({error})", "see the run's log, and try again")
