"""The Tensor Store from the processes that use it: a node's actors, and the executor, which restarts it.

The keeper is found by its name, which ends in a number: Ray does not give a dead actor's name away
again, so a successor has the next one, and its users find it by looking.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from spotlight_core.errors import FleetError, SpotlightError
from spotlight_core.executor.cluster import HEAD, SHARE, node_resource
from spotlight_core.executor.commits import StoreAway
from spotlight_core.executor.loop import LoopThread
from spotlight_core.executor.store_keeper import NewestCommit, StoreKeeper
from spotlight_core.tensor_store import StoreUsage

LOG = logging.getLogger(__name__)

CALL_SECONDS = 10.0
AWAY_SECONDS = 30.0  # a killed keeper is back within this, or something else is wrong
FENCE_SECONDS = 1.0
RETRY_SECONDS = 0.2
LOOK_AHEAD = 4  # successors that one look may have missed


class RayStore:
    """The store as the actors of a node use it; from any thread."""

    def __init__(self, name: str) -> None:
        base, _, number = name.rpartition("-")
        self._base, self._number = base, int(number)
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
        try:
            if self._keeper is None:
                self._keeper = self._find()
            return ray.get(getattr(self._keeper, method).remote(*arguments), timeout=CALL_SECONDS)
        except RayTaskError as error:
            if isinstance(error.cause, SpotlightError):
                raise error.cause from None
            raise StoreAway(str(error)) from error
        except RayError as error:
            self._keeper = None
            raise StoreAway(str(error)) from error

    def _find(self) -> Any:
        """The latest keeper that there is."""
        found = None
        for number in range(self._number, self._number + LOOK_AHEAD):
            with contextlib.suppress(ValueError):  # there is no actor of that name
                found = ray.get_actor(f"{self._base}-{number}")
                self._number = number
        if found is None:
            raise StoreAway(f"there is no actor {self._base}-{self._number}")
        return found


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
        try:
            call = self._keeper.fence.remote(dict(leases))
            found: dict[str, NewestCommit] = await asyncio.wait_for(_answer(call), FENCE_SECONDS)
        except (RayError, TimeoutError) as error:
            LOG.warning("the last commits of %s are unknown: %r", ", ".join(leases), error)
            return {}
        return found

    def usage(self) -> StoreUsage | None:
        """What the store holds, None while it is away; from another thread than the loop's."""
        if self._keeper is None:
            return None
        try:
            usage: StoreUsage = ray.get(self._keeper.usage.remote(), timeout=FENCE_SECONDS)
        except RayError:
            return None
        return usage

    def holds(self, request: str) -> None:
        """The request has commits."""
        self._committed.add(request)

    def discard(self, request: str) -> None:
        """The request is settled: its commits may go."""
        if request in self._committed:
            self._committed.discard(request)
            self._keeper.discard.remote([request])

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
            except RayError as error:
                if self._closing:
                    return
                LOG.warning("the Tensor Store's process died (%s), another one starts", type(error).__name__)
            keeper = await self._another()

    async def _another(self) -> Any:
        while not self._closing:
            try:
                self._number += 1
                keeper = await asyncio.to_thread(self._create)
                await keeper.ready.remote()
                self._keeper = keeper
            except RayError as error:
                LOG.warning("the Tensor Store is not back yet: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return keeper
        return self._keeper

    def _create(self) -> Any:
        remote = ray.remote(concurrency_groups={"life": 1})(StoreKeeper)
        actor = remote.options(
            name=self.name,
            num_cpus=0,
            resources={node_resource(*HEAD): SHARE},
            max_concurrency=8,
            max_restarts=0,
            max_task_retries=0,
        )
        return actor.remote(self._url, self._memory_bytes)


async def _answer(reference: Any) -> Any:
    return await reference


def _no_store(error: Exception) -> FleetError:
    return FleetError(f"the Tensor Store did not start ({error})", "see the run's log, and try again")
