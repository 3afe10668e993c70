"""The actor in this process: yields, commits, strikes; what it gives is what a bare engine gives."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spotlight_core.arrays import arrays_digest, from_bytes
from spotlight_core.config import DataConfig, FleetConfig, OdeConfig, RunConfig, TinyModelConfig
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.diffusion.tiny.model import TinyQwenImage, build_transformer
from spotlight_core.errors import SpotlightError
from spotlight_core.events import SPGroup, Start
from spotlight_core.executor.actors import (
    ActorSetup,
    Began,
    CommittedState,
    DenoiseActor,
    FinishedResult,
    Message,
    Noticed,
)
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.market.progress import ProgressPoint
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from spotlight_core.weights.store import WeightStore

STEPS = 5
POLICY = PolicyVersion(label="base", number=0, digest="unused")
REQUEST = GenerationRequest(
    id="1/rollout/p/0",
    kind="rollout",
    prompts=(Prompt(occurrence="p", text='A sign that reads "42"'),),
    seeds=(0, 3),
    policy=POLICY,
    fidelity=Fidelity(denoise_steps=STEPS, reused_steps=(3,)),
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    TinyQwenImage(build_transformer()).save_weights(path)
    return path


@pytest.fixture(scope="module")
def expected(weights: Path) -> str:
    engine = DenoiseEngine(
        build_model(TinyModelConfig(weights=weights), "rollout"), OdeConfig(denoise_steps=STEPS), 0
    )
    generated = engine.generate(REQUEST)
    assert isinstance(generated, Generated)
    return arrays_digest(generated.arrays)


def point(event: str, denoise_step: int, seconds_left: float | None = None) -> ProgressPoint:
    return ProgressPoint(
        iteration=1,
        phase="rollout",
        node="spot-0",
        event=event,  # type: ignore[arg-type]
        nth_request=1,
        denoise_step=denoise_step,
        seconds_left=seconds_left,
    )


def make_actor(
    folder: Path, weights: Path, points: tuple[ProgressPoint, ...] = (), commit_every: int = 0
) -> tuple[DenoiseActor, list[float]]:
    config = RunConfig(
        name="test",
        iterations=1,
        model=TinyModelConfig(weights=weights),
        data=DataConfig(prompts=folder),
        sampler=OdeConfig(denoise_steps=STEPS),
        fleet=FleetConfig(commit_every_steps=commit_every),
    )
    setup = ActorSetup(
        node="spot-0",
        incarnation=1,
        pool="spot",
        gpus=1,
        config=config.model_dump_json(),
        weights=folder / "published",
        nodes=folder / "nodes",
        points=points,
    )
    deaths: list[float] = []
    return DenoiseActor(setup, die=lambda: deaths.append(time.time())), deaths


def start(lease: str, commit: CommittedState | None = None) -> Start:
    step = 0 if commit is None else commit.next_denoise_step
    return Start(
        group=SPGroup(node="spot-0", generation=1),
        lease=lease,
        request=REQUEST,
        from_denoise_step=step,
        state_ref=None if commit is None else "ref",
    )


def run(actor: DenoiseActor, lease: str, commit: CommittedState | None = None) -> list[Message]:
    return list(actor.generate(start(lease, commit), None if commit is None else commit.payload))


def check_finished(message: Message, expected: str) -> None:
    assert isinstance(message, FinishedResult)
    assert message.digest == expected
    assert arrays_digest(from_bytes(message.payload)) == expected


def test_a_request_gives_what_the_engine_gives(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights)
    messages = run(actor, "a")
    assert [type(message) for message in messages] == [Began, FinishedResult]
    check_finished(messages[-1], expected)


def test_every_periodic_commit_resumes_to_the_same_bits(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights, commit_every=2)
    commits = [message for message in run(actor, "a") if isinstance(message, CommittedState)]
    assert [(commit.next_denoise_step, commit.released) for commit in commits] == [(2, False), (4, False)]
    for commit in commits:
        check_finished(run(actor, f"from-{commit.next_denoise_step}", commit)[-1], expected)


def test_a_notice_waits_for_its_yield_and_commits_there(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 3, 60.0),))
    stream = actor.generate(start("a"), None)
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
def test_a_kill_dies_at_its_step(tmp_path: Path, weights: Path, denoise_step: int) -> None:
    actor, deaths = make_actor(tmp_path, weights, points=(point("kill", denoise_step),))
    stream: Iterator[Message] = actor.generate(start("a"), None)
    assert next(stream) == Began()
    with pytest.raises(SpotlightError, match="kills this node"):
        next(stream)
    assert len(deaths) == 1


def test_a_notice_before_the_first_step_yields_after_it(tmp_path: Path, weights: Path) -> None:
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 0, 60.0),))
    actor.yield_lease("a")  # as if it had arrived while the notice was under way
    messages = run(actor, "a")
    assert [type(message) for message in messages] == [Began, Noticed, CommittedState]


def test_abandoned_work_ends_without_a_word(tmp_path: Path, weights: Path, expected: str) -> None:
    actor, _ = make_actor(tmp_path, weights, points=(point("notice", 2, 60.0),))
    stream = actor.generate(start("a"), None)
    assert [type(next(stream)) for _ in range(2)] == [Began, Noticed]
    threading.Timer(0.05, actor.abandon, ["a"]).start()
    assert list(stream) == []
    check_finished(run(actor, "b")[-1], expected)


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


def test_its_own_log_says_when_it_started_and_stopped(tmp_path: Path, weights: Path) -> None:
    before = time.time()
    actor, _ = make_actor(tmp_path, weights)
    log = NodeLog(folder=tmp_path / "nodes")
    (life,) = log.lives()
    assert before <= life.started_at <= time.time()
    assert actor.started_at() == life.started_at
    assert life.stopped_at is None
    stopped_at = actor.stop()
    assert actor.stop() == stopped_at
    (life,) = log.lives()
    assert life.stopped_at == stopped_at
