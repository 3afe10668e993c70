"""The actor in this process: yields, strikes, leases in line; what it gives is what a bare engine gives."""

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from spotlight_core.arrays import arrays_digest, from_bytes
from spotlight_core.config import TinyModelConfig
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.tiny.model import build_transformer
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.executor.messages import Began, CommittedState, FinishedResult, Message, Noticed
from spotlight_core.types import Fidelity, PolicyVersion
from spotlight_core.weights.store import WeightStore
from tests.core.executor.actor_rig import (
    REQUEST,
    MemoryStore,
    bare_digest,
    make_actor,
    point,
    run,
    save_weights,
    start,
)
from tests.core.executor.rig import wait_until


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def expected(weights: Path) -> str:
    return bare_digest(weights)


def check_finished(message: Message, expected: str) -> None:
    assert isinstance(message, FinishedResult)
    assert message.digest == expected
    assert arrays_digest(from_bytes(message.payload)) == expected


def test_a_request_gives_what_the_engine_gives(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights)
    messages = run(actor, "a")
    assert [type(message) for message in messages] == [Began, FinishedResult]
    check_finished(messages[-1], expected)


def test_a_sleeper_holds_no_weights_until_work_comes(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights)
    actor.sleep()
    assert sum(parameter.numel() for parameter in actor._engine.model.transformer.parameters()) == 0
    check_finished(run(actor, "a")[-1], expected)


def test_a_sleeper_loads_a_version(tmp_path: Path, weights: Path) -> None:
    actor, _ = make_actor(tmp_path, weights)
    torch.manual_seed(1)
    policy = WeightStore(tmp_path / "published").publish("old", 1, build_transformer().state_dict())
    actor.sleep()
    assert actor.load(policy) == policy.digest


def test_a_notice_waits_for_its_yield_and_commits_there(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 3, 60.0),))
    stream = actor.generate(start("a"))
    assert next(stream) == Began()
    assert next(stream) == Noticed(seconds_left=60.0)
    actor.yield_lease("a")
    (commit,) = stream
    assert isinstance(commit, CommittedState)
    assert (commit.next_denoise_step, commit.released) == (3, True)
    check_finished(run(actor, "b", commit)[-1], expected)


def test_a_notice_that_nobody_answers_holds_no_longer_than_its_seconds(
    tmp_path: Path, weights: Path, expected: str
) -> None:
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 3, 0.2),))
    began = time.monotonic()
    messages = run(actor, "a")
    assert time.monotonic() - began >= 0.2
    assert [type(message) for message in messages] == [Began, Noticed, FinishedResult]
    check_finished(messages[-1], expected)


@pytest.mark.parametrize("denoise_step", [0, 2])
def test_a_kill_dies_at_its_step_and_records_it_before(
    tmp_path: Path, weights: Path, denoise_step: int
) -> None:
    actor, deaths = make_actor(tmp_path, weights, points=(point("kill", denoise_step),))
    stream: Iterator[Message] = actor.generate(start("a"))
    assert next(stream) == Began()
    with pytest.raises(SpotlightError, match="kills this node"):
        next(stream)
    assert len(deaths) == 1
    (line,) = (tmp_path / "nodes" / "spot-0-1.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record.pop("at") <= deaths[0]
    assert record == {
        "event": "strike",
        "lease": "a",
        "request": REQUEST.id,
        "denoise_step": denoise_step,
    }


def test_only_the_first_rank_follows_the_trace(tmp_path: Path, weights: Path) -> None:
    actor, deaths = make_actor(tmp_path, weights, points=(point("kill", 2),), rank=1)
    assert isinstance(run(actor, "a")[-1], FinishedResult)
    assert deaths == []


def test_a_notice_before_the_first_step_yields_after_it(tmp_path: Path, weights: Path) -> None:
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 0, 60.0),))
    actor.yield_lease("a")  # as if it had arrived while the notice was under way
    messages = run(actor, "a")
    assert [type(message) for message in messages] == [Began, Noticed, CommittedState]


def test_abandoned_work_ends_without_a_word(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 2, 60.0),))
    stream = actor.generate(start("a"))
    assert [type(next(stream)) for _ in range(2)] == [Began, Noticed]
    threading.Timer(0.05, actor.abandon, ["a"]).start()
    assert list(stream) == []
    check_finished(run(actor, "b")[-1], expected)


def test_a_queued_request_begins_when_the_one_before_ends(
    tmp_path: Path, weights: Path, expected: str
) -> None:
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 2, 60.0),))
    with ThreadPoolExecutor() as pool:
        # The queued call arrives first, and waits for the one that it comes behind.
        queued = pool.submit(list, actor.generate(start("b"), after="a"))
        running = actor.generate(start("a"))
        assert [type(next(running)) for _ in range(2)] == [Began, Noticed]
        assert not queued.done()
        actor.yield_lease("a")
        (commit,) = running
        assert isinstance(commit, CommittedState)
        assert commit.released
        check_finished(queued.result(20)[-1], expected)


def test_an_abandoned_queued_request_ends_at_once_and_never_begins(tmp_path: Path, weights: Path) -> None:
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 2, 60.0),))
    running = actor.generate(start("a"))
    assert [type(next(running)) for _ in range(2)] == [Began, Noticed]
    with ThreadPoolExecutor() as pool:
        queued = pool.submit(list, actor.generate(start("b"), after="a"))
        actor.abandon("b")
        assert queued.result(20) == []
    actor.yield_lease("a")
    (commit,) = running
    assert isinstance(commit, CommittedState)


def test_late_orders_and_calls_of_an_ended_lease_change_nothing(tmp_path: Path, weights: Path) -> None:
    actor, _ = make_actor(tmp_path, weights)
    first = run(actor, "a")
    actor.yield_lease("a")
    actor.abandon("a")
    assert run(actor, "a") == []
    assert run(actor, "b") == first


def test_a_requests_own_fault_is_raised(tmp_path: Path, weights: Path) -> None:
    actor, _ = make_actor(tmp_path, weights)
    bad = dataclasses.replace(REQUEST, fidelity=Fidelity(denoise_steps=8, reused_steps=(0,)))
    stream = actor.generate(start("a", request=bad))
    assert next(stream) == Began()
    with pytest.raises(BadInputError, match="step 0 has nothing to reuse"):
        next(stream)


def test_load_confirms_what_it_runs(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights)
    store = WeightStore(tmp_path / "published")
    torch.manual_seed(1)
    other = store.publish("old", 1, build_transformer().state_dict())
    base = store.publish(
        "old", 0, build_model(TinyModelConfig(weights=weights), "rollout").transformer.state_dict()
    )
    assert actor.load(other) == other.digest
    changed = run(actor, "a")[-1]
    assert isinstance(changed, FinishedResult)
    assert changed.digest != expected
    assert actor.load(base) == base.digest
    check_finished(run(actor, "b")[-1], expected)
    with pytest.raises(SpotlightError, match="old-7"):
        actor.load(PolicyVersion(label="old", number=7, digest="d"))


def test_work_that_is_abandoned_after_its_last_step_gives_no_result(tmp_path: Path, weights: Path) -> None:
    actor, _ = make_actor(tmp_path, weights)
    stream = actor.generate(start("a"))
    assert next(stream) == Began()
    with pytest.raises(SpotlightError, match="old-7"):  # a load comes after all denoising before it
        actor.load(PolicyVersion(label="old", number=7, digest="d"))
    actor.abandon("a")
    assert list(stream) == []


def test_a_request_whose_state_takes_long_keeps_its_place_in_line(
    tmp_path: Path, weights: Path, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotlight_core.executor.leases.TURN_SECONDS", 0.2)
    store = MemoryStore()
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 3, 60.0),), store=store)
    actor.yield_lease("first")
    commit = run(actor, "first")[-1]
    assert isinstance(commit, CommittedState)
    store.readable.clear()
    began: list[str] = []

    def follow(lease: str, commit: CommittedState | None, after: str | None) -> list[Message]:
        messages = []
        for message in actor.generate(start(lease, commit), after):
            began.extend([lease] if message == Began() else [])
            messages.append(message)
        return messages

    with ThreadPoolExecutor() as pool:
        ahead = pool.submit(follow, "a", commit, "first")
        behind = pool.submit(follow, "b", None, "a")
        lined_up = wait_until(lambda: "b" in actor._leases._in_line, 20)
        began_meanwhile = wait_until(lambda: bool(began), 0.5)
        store.readable.set()
        check_finished(ahead.result(20)[-1], expected)
        check_finished(behind.result(20)[-1], expected)
    assert (lined_up, began_meanwhile) == (True, False)
    assert began == ["a", "b"]


def test_a_request_that_is_abandoned_before_its_state_is_there_holds_nobody_up(
    tmp_path: Path, weights: Path, expected: str
) -> None:
    store = MemoryStore()
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 3, 60.0),), store=store)
    actor.yield_lease("first")
    commit = run(actor, "first")[-1]
    assert isinstance(commit, CommittedState)
    store.readable.clear()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(run, actor, "a", commit)
        assert wait_until(lambda: "a" in actor._leases._in_line, 20)
        actor.abandon("a")
        check_finished(run(actor, "b")[-1], expected)
        store.readable.set()
        assert waiting.result(20) == []
