"""Two small journals that keep every promise, and the words they are made of."""

from typing import Any

from spotlight_core import events as ev
from spotlight_core.events import Event, SPGroup, Word
from tests.core.market.words import request

A, B = request("a"), request("b")
S0, S1 = SPGroup(node="s0", incarnation=1), SPGroup(node="s1", incarnation=1)


def stamped(*words: tuple[float, Word], epoch: int = 0, seq: int = 0) -> list[Word]:
    """Events with their times and numbers; a command is at its event's."""
    result: list[Word] = []
    for at, word in words:
        seq += isinstance(word, Event)
        result.append(word.stamped(at, seq, epoch) if isinstance(word, Event) else word)
    return result


def joined(node: str) -> ev.NodeJoined:
    return ev.NodeJoined(node=node, incarnation=1, pool="spot", gpus=1, started_at=0.0)


def lost(node: str, cause: str, at: float) -> tuple[float, Word]:
    return at, ev.Lost(node=node, incarnation=1, cause=cause, stopped_at=at)


def rank_lost(group: SPGroup, rank: int = 0) -> ev.RankLost:
    return ev.RankLost(node=group.node, incarnation=group.incarnation, rank=rank, cause="died", error="x")


def start(lease: str, work: Any, group: SPGroup, step: int = 0, **more: Any) -> ev.Start:
    state = {} if not step else {"state_ref": f"{work.id}@{step}", "state_digest": "c"}
    return ev.Start(group=group, lease=lease, request=work, from_denoise_step=step, **state, **more)


def committed(lease: str, name: str, step: int, released: bool = True) -> ev.Committed:
    ref = f"{name}@{step}"
    return ev.Committed(
        lease=lease, request=name, next_denoise_step=step, ref=ref, digest="c", released=released
    )


def finished(lease: str, name: str, digest: str = "d") -> ev.Finished:
    return ev.Finished(lease=lease, request=name, ref=f"{name}.out", digest=digest)


def done(name: str) -> ev.Settle:
    return ev.Settle(request=name, outcome="done", ref=f"{name}.out")


def notice(node: str) -> ev.Notice:
    return ev.Notice(node=node, incarnation=1, seconds_left=30.0)


def kept() -> list[Word]:
    """s0 gets a notice while it runs a, with b in line; s1 does both."""
    return stamped(
        (0.0, joined("s0")),
        (0.0, joined("s1")),
        (1.0, ev.Submitted(requests=(A, B))),
        (1.0, start("0.1", A, S0)),
        (1.0, start("0.2", B, S0, queued=True)),
        (2.0, ev.Started(lease="0.1")),
        (3.0, notice("s0")),
        (3.0, ev.Yield(lease="0.1", group=S0, by=33.0, reason="notice")),
        (3.0, ev.Abandon(lease="0.2", group=S0)),
        (3.1, ev.Failed(lease="0.2", error="abandoned", fault="nobody")),
        (3.1, start("0.3", B, S1)),
        (4.0, committed("0.1", "a", 5)),
        (4.0, ev.Release(node="s0", incarnation=1)),
        (4.0, start("0.4", A, S1, 5, queued=True)),
        lost("s0", "released", 5.0),
        (9.0, finished("0.3", "b")),
        (9.0, done("b")),
        (9.1, ev.Started(lease="0.4")),
        (12.0, finished("0.4", "a")),
        (12.0, done("a")),
        lost("s1", "shutdown", 20.0),
    )


def killed() -> list[Word]:
    """s0 is killed while it runs a, committed at denoise step 2; s1 does the rest."""
    return stamped(
        (0.0, joined("s0")),
        (0.0, joined("s1")),
        (1.0, ev.Submitted(requests=(A,))),
        (1.0, start("0.1", A, S0)),
        (3.0, committed("0.1", "a", 2, released=False)),
        lost("s0", "killed", 5.0),
        (5.0, start("0.2", A, S1, 2)),
        (9.0, finished("0.2", "a")),
        (9.0, done("a")),
        lost("s1", "shutdown", 20.0),
    )
