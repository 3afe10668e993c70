"""The ends of nodes and of their processes, told whatever else goes wrong; Ray and the store are played."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError

from spotlight_core.events import Event, Lost, RankLost, RankReady, SPGroup
from spotlight_core.executor.inbox import Inbox
from spotlight_core.executor.node_log import NodeLife, NodeLog
from spotlight_core.executor.nodes import Nodes
from spotlight_core.executor.places import Node, Place

GROUP = SPGroup(node="spot-0", incarnation=1)
LIFE = NodeLife(node="spot-0", incarnation=1, pool="spot", gpus=1, started_at=1.0, stopped_at=None)


class Remote:
    """A method of a Ray actor."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def options(self, **_: Any) -> "Remote":
        return self

    async def remote(self, *arguments: Any) -> Any:
        answer = self._answer(*arguments)
        return await answer if asyncio.isfuture(answer) else answer


class Loop:
    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))


class Played:
    """``Nodes`` with one node; ``posted`` and ``killed`` are what came of it."""

    def __init__(self, folder: Path, fence: Callable[[], Any] = dict) -> None:
        self.posted: list[Event] = []
        self.killed: list[tuple[str, int]] = []
        self.loop = Loop()
        self.log = NodeLog(folder=folder / "nodes")

        async def fenced(leases: Mapping[str, str]) -> Any:
            return fence()

        cluster = SimpleNamespace(alive=lambda *_: True, kill_node=lambda *key: self.killed.append(key))
        self.nodes = Nodes(
            loop=cast(Any, self.loop),
            cluster=cast(Any, cluster),
            inbox=Inbox(epoch=1),
            log=self.log,
            store=cast(Any, SimpleNamespace(fence=fenced)),
            post=self.posted.append,
            lease_seconds=60.0,
        )
        self.place = Place(rank=0, actor="dead", last_lease="1.7")
        scheduler = SimpleNamespace(
            renew=Remote(lambda: None),
            respawn=Remote(lambda rank: SimpleNamespace(until_stopped=Remote(asyncio.Future))),
        )
        self.node = Node(life=LIFE, scheduler=scheduler, places={0: self.place}, groups={(0,): GROUP})
        self.nodes.known[self.node.key] = self.node

    async def finish(self) -> None:
        await asyncio.gather(*self.loop.tasks, return_exceptions=True)


def test_a_respawned_process_waits_behind_no_lease_of_the_dead_one(tmp_path: Path) -> None:
    async def play() -> Played:
        played = Played(tmp_path)
        await played.nodes.actor_failed(played.node, played.place, "dead", ActorDiedError())
        for task in played.loop.tasks:
            task.cancel()
        return played

    played = asyncio.run(play())
    assert played.posted == [
        RankLost(node="spot-0", incarnation=1, rank=0, cause="died", error="ActorDiedError"),
        RankReady(node="spot-0", incarnation=1, rank=0),
    ]
    assert played.place.last_lease is None


def broken() -> Any:
    raise ValueError("the store is broken")


@pytest.mark.parametrize("cause", ["killed", "silent"])
def test_a_loss_is_told_when_the_store_is_broken(tmp_path: Path, cause: str) -> None:
    async def play() -> Played:
        played = Played(tmp_path, broken)
        played.log.start("spot-0", 1, "spot", 1, 1.0)
        played.nodes.lose(("spot-0", 1), cause)
        await played.finish()
        return played

    played = asyncio.run(play())
    (lost,) = played.posted
    assert isinstance(lost, Lost)
    life = played.log.life("spot-0", 1)
    assert life is not None
    assert (lost.cause, lost.stopped_at) == (cause, life.stopped_at)
    assert played.killed == [("spot-0", 1)]


@pytest.mark.parametrize("release", [False, True])
def test_an_end_is_told_when_the_log_cannot_be_written(tmp_path: Path, release: bool) -> None:
    (tmp_path / "nodes").write_text("no folder")

    async def play() -> Played:
        played = Played(tmp_path)
        if release:  # its scheduler has no ``acknowledge``: anything may go wrong
            played.nodes.release(("spot-0", 1))
        else:
            played.nodes.lose(("spot-0", 1), "killed")
        await played.finish()
        return played

    (lost,) = asyncio.run(play()).posted
    assert isinstance(lost, Lost)
    assert lost.cause == ("released" if release else "killed")
    assert lost.stopped_at > LIFE.started_at
