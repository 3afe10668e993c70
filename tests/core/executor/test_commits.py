"""Commits of an actor: when they are made, what they bound, and a store that is away, full or empty."""

import logging
import threading
from pathlib import Path

import pytest

from spotlight_core.arrays import arrays_digest, from_bytes, payload_digest
from spotlight_core.errors import SpotlightError
from spotlight_core.executor.commits import StoreAway
from spotlight_core.executor.messages import (
    Began,
    CommittedState,
    Dropped,
    FinishedResult,
    Message,
    Noticed,
    UnstoredState,
)
from tests.core.executor.actor_rig import (
    STEPS,
    MemoryStore,
    bare_digest,
    make_actor,
    point,
    run,
    save_weights,
    start,
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def expected(weights: Path) -> str:
    return bare_digest(weights)


def commits_of(messages: list[Message]) -> list[CommittedState]:
    return [message for message in messages if isinstance(message, CommittedState)]


def check_finished(message: Message, expected: str) -> None:
    assert isinstance(message, FinishedResult)
    assert message.digest == expected
    assert arrays_digest(from_bytes(message.payload)) == expected


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (0, []),
        (1, [1, 2, 3, 4, 5, 6, 7]),
        (2, [1, 2, 3, 4, 5, 6, 7]),
        (4, [2, 4, 6]),
        (6, [3, 6]),
        (100, []),
    ],
)
def test_commits_come_at_half_the_bound(
    tmp_path: Path, weights: Path, expected: str, every: int, steps: list[int]
) -> None:
    actor, _ = make_actor(tmp_path, weights, commit_every=every)
    messages = run(actor, "a")
    assert [(commit.next_denoise_step, commit.released) for commit in commits_of(messages)] == [
        (step, False) for step in steps
    ]
    check_finished(messages[-1], expected)


def test_every_commit_resumes_to_the_same_bits(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights, commit_every=4)
    commits = commits_of(run(actor, "a"))
    assert [commit.next_denoise_step for commit in commits] == [2, 4, 6]
    for commit in commits:
        check_finished(run(actor, f"from-{commit.next_denoise_step}", commit)[-1], expected)


@pytest.mark.parametrize("every", [1, 2, 3, 4, 6])
def test_a_kill_anywhere_costs_no_more_steps_than_the_bound(
    tmp_path: Path, weights: Path, every: int
) -> None:
    for struck in range(1, STEPS):
        actor, deaths = make_actor(
            tmp_path, weights, points=(point("kill", struck),), commit_every=every, store=MemoryStore()
        )
        heard: list[Message] = []
        with pytest.raises(SpotlightError, match="kills this node"):
            heard.extend(actor.generate(start("a")))
        acknowledged = [0, *(commit.next_denoise_step for commit in commits_of(heard))]
        assert len(deaths) == 1
        assert struck - acknowledged[-1] <= every


def test_a_slow_store_holds_the_denoise_thread_at_the_next_commit_only(
    tmp_path: Path, weights: Path, expected: str
) -> None:
    store = MemoryStore()
    store.open.clear()
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 3, 0.01),), commit_every=4, store=store)
    stream = actor.generate(start("a"))
    # Step 3 is reached with the commit of step 2 under way; the one of step 4 waits for it.
    assert [next(stream), next(stream)] == [Began(), Noticed(seconds_left=0.01)]
    assert store.asked == [2]
    store.open.set()
    rest = list(stream)
    assert [commit.next_denoise_step for commit in commits_of(rest)] == [2, 4, 6]
    check_finished(rest[-1], expected)


@pytest.mark.parametrize("trouble", [StoreAway("gone"), SpotlightError("the disk is full", "free some")])
def test_a_store_in_trouble_is_told_of_once_and_fails_no_request(
    tmp_path: Path,
    weights: Path,
    expected: str,
    trouble: StoreAway | SpotlightError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    store.trouble = trouble
    actor, _ = make_actor(tmp_path, weights, commit_every=4, store=store)
    with caplog.at_level(logging.WARNING):
        messages = run(actor, "a")
    assert [type(message) for message in messages] == [Began, FinishedResult]
    check_finished(messages[-1], expected)
    assert store.asked == [2, 4, 6], "each commit tries again"
    assert len(caplog.records) == 1
    store.trouble = None
    assert [commit.next_denoise_step for commit in commits_of(run(actor, "b"))] == [2, 4, 6]


def test_what_lets_go_while_the_store_is_away_travels_with_its_message(
    tmp_path: Path, weights: Path, expected: str
) -> None:
    store = MemoryStore()
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 3, 60.0),), store=store)
    store.trouble = StoreAway("gone")
    stream = actor.generate(start("a"))
    assert [type(next(stream)) for _ in range(2)] == [Began, Noticed]
    actor.yield_lease("a")
    (left,) = stream
    assert isinstance(left, UnstoredState)
    assert left.next_denoise_step == 3
    store.trouble = None
    ref, digest = store.put("a", "r", 3, left.payload)
    commit = CommittedState(next_denoise_step=3, ref=ref, digest=digest, released=True)
    assert digest == payload_digest(left.payload)
    check_finished(run(actor, "b", commit)[-1], expected)


def test_what_lets_go_and_is_refused_is_recomputed(tmp_path: Path, weights: Path) -> None:
    store = MemoryStore()
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 3, 60.0),), store=store)
    store.trouble = SpotlightError("the disk is full", "free some")
    stream = actor.generate(start("a"))
    assert [type(next(stream)) for _ in range(2)] == [Began, Noticed]
    threading.Timer(0.01, actor.yield_lease, ["a"]).start()
    (left,) = stream
    assert left == Dropped(error="its state could not be committed: the disk is full: free some")


def test_a_lost_commit_is_told_apart_from_a_store_that_is_away(
    tmp_path: Path, weights: Path, expected: str
) -> None:
    store = MemoryStore()
    actor, _ = make_actor(tmp_path, weights, store=store)
    lost = CommittedState(next_denoise_step=3, ref="lost", digest="d", released=True)
    assert run(actor, "a", lost) == [Dropped(error="no commit lost: recompute it", commit_lost=True)]
    store.payloads["lost"] = b"no safetensors"
    (damaged,) = run(actor, "b", lost)
    assert isinstance(damaged, Dropped)
    assert damaged.commit_lost
    store.trouble = StoreAway("gone")
    assert run(actor, "c", lost) == [Dropped(error="the Tensor Store is away: gone")]
    check_finished(run(actor, "d")[-1], expected)
