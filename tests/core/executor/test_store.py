"""Who finds which keeper, and the keeper that comes back; Ray is played."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError

from spotlight_core.errors import SpotlightError
from spotlight_core.executor import store as store_module
from spotlight_core.executor.commits import StoreAway
from spotlight_core.executor.store import KeptStore, RayStore
from spotlight_core.executor.store_keeper import StoreKeeper
from tests.core.commits import payload

MEMORY_BYTES = 2**20


class FakeRay:
    """Named actors whose methods are plain ones; ``unborn`` names are listed and cannot be got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors: dict[str, Any] = {}
        self.unborn: list[str] = []
        self.util = SimpleNamespace(list_named_actors=lambda: [*self.actors, *self.unborn])
        monkeypatch.setattr(store_module, "ray", self)

    def get_actor(self, name: str) -> Any:
        if name not in self.actors:
            raise ValueError(f"no actor {name}")
        return self.actors[name]

    def get(self, call: Callable[[], Any], timeout: float) -> Any:
        return call()


def keeper(get: Callable[[str, str], bytes]) -> Any:
    return SimpleNamespace(get=SimpleNamespace(remote=lambda ref, digest: lambda: get(ref, digest)))


def test_a_node_finds_a_keeper_however_many_numbers_were_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    played = FakeRay(monkeypatch)
    played.actors = {f"tensor-store-epoch-1-{number}": keeper(lambda *_: b"old") for number in (0, 9)}
    played.actors["tensor-store-epoch-1-10"] = keeper(lambda *_: b"latest")
    played.actors["tensor-store-epoch-11-99"] = keeper(lambda *_: b"another run's")
    played.unborn = ["tensor-store-epoch-1-11"]
    assert RayStore("tensor-store-epoch-1-0").get("ref", "digest") == b"latest"


def test_a_keeper_that_another_thread_forgets_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch)
    checks: list[Any] = []

    class Racing(RayStore):
        @property  # type: ignore[override]
        def _keeper(self) -> Any:
            """There at the check, gone at the next look."""
            checks.append(None)
            return keeper(lambda *_: b"payload") if len(checks) == 1 else None

        @_keeper.setter
        def _keeper(self, value: Any) -> None: ...

    assert Racing("tensor-store-epoch-1-0").get("ref", "digest") == b"payload"


def test_no_keeper_is_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRay(monkeypatch)
    with pytest.raises(StoreAway, match=r"tensor-store-epoch-1-\*"):
        RayStore("tensor-store-epoch-1-0").put("lease", "request", 1, b"")


class Actor:
    """A StoreKeeper as Ray would have it, until ``dead`` is set."""

    def __init__(self, held: StoreKeeper) -> None:
        self._held = held
        self.dead = False

    def __getattr__(self, method: str) -> Any:
        async def remote(*arguments: Any) -> Any:
            if self.dead:
                raise ActorDiedError
            return getattr(self._held, method)(*arguments)

        return SimpleNamespace(remote=remote)


def test_a_keeper_comes_back_after_any_trouble_and_knows_the_lost_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RETRY_SECONDS", 0.0)
    kept = KeptStore(loop=cast(Any, None), url=str(tmp_path), memory_bytes=MEMORY_BYTES, epoch=1)
    troubles: list[Exception] = [ValueError("the name is taken"), ActorDiedError(), OSError("no memory")]
    names: list[str] = []

    def create(fenced: tuple[str, ...] = ()) -> Actor:
        names.append(kept.name)
        if troubles:
            raise troubles.pop()
        return Actor(StoreKeeper(str(tmp_path), MEMORY_BYTES, fenced))

    monkeypatch.setattr(kept, "_create", create)

    async def play() -> tuple[Any, Any]:
        first = Actor(StoreKeeper(str(tmp_path), MEMORY_BYTES))
        kept._keeper = first
        ref, digest = await kept.put("1.1", "0/a", 4, payload())
        first.dead = True
        assert await kept.fence({"1.1": "0/a"}) == {}, "the store is away"
        await kept._another()
        with pytest.raises(SpotlightError, match=r"lease 1\.1 is over"):
            await kept.put("1.1", "0/a", 6, payload())
        found = await kept.fence({"1.1": "0/a"})
        return (found["1.1"].next_denoise_step, found["1.1"].ref, found["1.1"].digest), (4, ref, digest)

    found, expected = asyncio.run(play())
    assert found == expected
    assert names == [f"tensor-store-epoch-1-{number}" for number in (1, 2, 3, 4)]
