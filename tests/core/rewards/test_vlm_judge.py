"""The judge against a local endpoint that refuses, hangs, rate-limits and talks nonsense."""

import base64
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from spotlight_core.config import VlmJudgeRewardConfig
from spotlight_core.errors import BadInputError, ScorerError
from spotlight_core.rewards import vlm_judge
from spotlight_core.rewards.base import ScorerGaveUp, build_reward
from spotlight_core.rewards.scorer import ScorerPool
from spotlight_core.rewards.selftest import self_test
from spotlight_core.rewards.vlm_judge import VlmJudgeReward
from tests.core.rewards.endpoint import MODEL, Answer, Endpoint, graded, ok, serving
from tests.core.rewards.prompts import rows


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as state:
        yield state


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm_judge, "BACKOFF_SECONDS", (0.01, 0.02))


def _judge(endpoint: Endpoint, **changes: Any) -> VlmJudgeReward:
    fields = {"type": "vlm_judge", "url": endpoint.url, "model": MODEL, "timeout_seconds": 5.0} | changes
    return VlmJudgeReward(VlmJudgeRewardConfig(**fields))


def _images(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 6, 5, 3), dtype=np.uint8)


def _pixels(body: dict[str, Any]) -> np.ndarray:
    (message,) = body["messages"]
    _, picture = message["content"]
    kind, data = picture["image_url"]["url"].split(",", 1)
    assert kind == "data:image/png;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.format == "PNG"
    return np.asarray(image)


def test_the_request_holds_model_question_and_pixels(endpoint: Endpoint) -> None:
    images = _images(1)
    assert _judge(endpoint).score(images, rows('a {red} "car"')) == [0.7]
    (body,) = endpoint.calls
    assert body["model"] == MODEL
    assert body["temperature"] == 0
    (message,) = body["messages"]
    assert message["role"] == "user"
    text, _ = message["content"]
    assert text["type"] == "text"
    assert text["text"].endswith('Answer with JSON only: {"grade": <number>}.\nPrompt: a {red} "car"')
    assert np.array_equal(_pixels(body), images[0])
    assert endpoint.paths == ["GET /v1/models", "POST /v1/chat/completions"]
    assert "Authorization" not in endpoint.headers[1]


def test_answers_come_in_order_from_parallel_calls(endpoint: Endpoint) -> None:
    images = _images(6)
    images[:, 0, 0, 0] = range(6)

    def by_first_pixel(body: dict[str, Any], call: int) -> Answer:
        number = int(_pixels(body)[0, 0, 0])
        time.sleep(0.02 * (6 - number))  # the first image is answered last
        return ok(json.dumps({"grade": number}))

    endpoint.answer = by_first_pixel
    scores = _judge(endpoint, concurrency=3).score(images, rows(*"abcdef"))
    assert scores == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert 2 <= endpoint.most_busy <= 3


def test_the_same_image_and_prompt_get_the_same_grade(endpoint: Endpoint) -> None:
    endpoint.answer = lambda body, call: ok(json.dumps({"grade": call}))  # never the same
    judge, image = _judge(endpoint, concurrency=1), _images(1)
    twice = np.concatenate([image, image])
    assert judge.score(twice, rows("a", "a")) == [0.1, 0.1]
    assert judge.score(image, rows("a")) == [0.1]
    assert judge.score(image, rows("b")) == [0.2]
    assert judge.score(255 - image, rows("a")) == [0.3]
    assert judge.score(image.reshape(1, 5, 6, 3), rows("a")) == [0.4]  # the same bytes in another shape
    assert len(endpoint.calls) == 4
    assert judge.judge(image[0], "a") == 0.5  # asked anew


def test_the_cache_is_bounded(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm_judge, "CACHED_GRADES", 2)
    judge = _judge(endpoint)
    assert judge.score(_images(3), rows("a", "b", "c")) == [0.7] * 3
    assert judge.score(_images(3)[2:], rows("c")) == [0.7]
    assert len(endpoint.calls) <= 4
    assert len(judge._grades) == 2


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ((500, {}, b"out of memory"), "HTTP 500 out of memory"),
        ((503, {}, b""), "HTTP 503"),
        ((429, {"Retry-After": "0.01"}, b"slow down"), "HTTP 429 slow down"),
        ((200, {}, b"<html>"), "no JSON"),
        ((200, {}, b'{"choices": []}'), "no chat completion"),
        (ok("I would say 7."), "I would say 7"),
        (ok('{"grade": 11}'), "11"),
    ],
)
def test_what_may_pass_is_tried_again_and_ends_in_an_error(
    endpoint: Endpoint, failure: Answer, cause: str
) -> None:
    endpoint.answer = lambda body, call: failure if call < 3 else ok('{"grade": 4}')
    judge = _judge(endpoint, attempts=3)
    assert judge.score(_images(1), rows("a")) == [0.4]
    assert len(endpoint.calls) == 3
    endpoint.answer = lambda body, call: failure
    with pytest.raises(ScorerError, match=cause) as caught:
        judge.score(_images(1), rows("b"))
    assert isinstance(caught.value, ScorerGaveUp)
    assert f"scorer 'vlm_judge' (model 'judge-7b' at {endpoint.url}) failed 3 times" in caught.value.problem
    assert len(endpoint.calls) == 6


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_final(endpoint: Endpoint, status: int) -> None:
    endpoint.answer = lambda body, call: (status, {}, b"no such thing")
    with pytest.raises(ScorerGaveUp, match=f"failed 1 time .HTTP {status} no such thing"):
        _judge(endpoint).score(_images(1), rows("a"))
    assert len(endpoint.calls) == 1


def test_a_silent_endpoint_is_given_up(endpoint: Endpoint) -> None:
    released = threading.Event()

    def hang(body: dict[str, Any], call: int) -> Answer:
        released.wait(10)
        return ok('{"grade": 1}')

    endpoint.answer = hang
    judge = _judge(endpoint, timeout_seconds=0.2, attempts=2)
    began = time.monotonic()
    with pytest.raises(ScorerGaveUp, match=r"failed 2 times .ReadTimeout"):
        judge.score(_images(1), rows("a"))
    assert 0.4 <= time.monotonic() - began < 3.0
    released.set()


def test_an_answer_without_end_is_cut_off(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm_judge, "LONGEST_ANSWER_BYTES", 1000)
    endpoint.answer = lambda body, call: (200, {}, b" " * 100_000)
    with pytest.raises(ScorerGaveUp, match="an answer without end"):
        _judge(endpoint, attempts=1).score(_images(1), rows("a"))


def test_one_bad_image_among_good_ones_is_an_error_and_the_good_ones_are_kept(endpoint: Endpoint) -> None:
    images = _images(3)
    images[1] = 0

    def not_black(body: dict[str, Any], call: int) -> Answer:
        return ok('{"grade": 7}') if _pixels(body).any() else (400, {}, b"black")

    endpoint.answer = not_black
    judge = _judge(endpoint, concurrency=1)
    with pytest.raises(ScorerGaveUp, match="HTTP 400 black"):
        judge.score(images, rows("a", "b", "c"))
    calls = len(endpoint.calls)
    assert judge.score(images[:1], rows("a")) == [0.7]
    assert len(endpoint.calls) == calls


def test_retry_after_is_honoured_within_reason(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.answer = lambda body, call: (
        (429, {"Retry-After": "0.5"}, b"") if call == 1 else graded(body, call)
    )
    began = time.monotonic()
    assert _judge(endpoint).score(_images(1), rows("a")) == [0.7]
    assert time.monotonic() - began >= 0.5
    monkeypatch.setattr(vlm_judge, "LONGEST_WAIT_SECONDS", 0.1)
    endpoint.answer = lambda body, call: (503, {"Retry-After": "3600"}, b"")
    began = time.monotonic()
    with pytest.raises(ScorerGaveUp, match="failed 2 times"):
        _judge(endpoint, attempts=2).score(_images(1), rows("b"))
    assert 0.1 <= time.monotonic() - began < 3.0


def test_an_endpoint_that_is_not_there_is_named() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
        config = VlmJudgeRewardConfig(type="vlm_judge", url=url, model=MODEL, attempts=2)
        with pytest.raises(ScorerGaveUp, match=rf"model 'judge-7b' at {url}\) failed 2 times .ConnectError"):
            build_reward(config)


def test_a_model_that_is_not_served_is_named(endpoint: Endpoint) -> None:
    with pytest.raises(
        BadInputError, match=rf"{endpoint.url} does not serve the model 'judge-8b'.*judge-7b, other"
    ):
        _judge(endpoint, model="judge-8b")
    endpoint.models = (200, {}, b'{"models": []}')
    with pytest.raises(ScorerGaveUp, match="no list of models"):
        _judge(endpoint)


def test_the_key_is_sent_and_never_shown(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-123")
    judge = _judge(endpoint, api_key_variable="JUDGE_KEY")
    assert endpoint.headers[0]["Authorization"] == "Bearer secret-123"
    endpoint.answer = lambda body, call: (401, {}, b"the key secret-123 has expired")
    with pytest.raises(ScorerGaveUp, match=r"the key \*\*\* has expired") as caught:
        judge.score(_images(1), rows("a"))
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    for value, problem in (("", "is empty"), ("schlüssel", "no HTTP header")):
        monkeypatch.setenv("JUDGE_KEY", value)
        with pytest.raises(BadInputError, match=f"JUDGE_KEY.*{problem}") as refused:
            _judge(endpoint, api_key_variable="JUDGE_KEY")
        assert "schlüssel" not in str(refused.value)


def test_a_question_that_cannot_be_filled_in(endpoint: Endpoint) -> None:
    for question in ('{"grade": 1} {prompt}', "{} {prompt}", "{prompt", "{prompt.text}", "{prompt:d}"):
        with pytest.raises(ValidationError, match=r"it cannot be filled in, .*: write {prompt} where"):
            _judge(endpoint, question=question)
    with pytest.raises(ValidationError, match=r"it has no {prompt}: write {prompt} where"):
        _judge(endpoint, question="Is it good? {{prompt}}")
    assert endpoint.paths == []


def test_the_self_test_asks_twice_past_the_cache(endpoint: Endpoint) -> None:
    judge = _judge(endpoint)
    self_test(judge)
    assert len(endpoint.calls) == 2
    assert np.array_equal(_pixels(endpoint.calls[0]), _pixels(endpoint.calls[1]))
    endpoint.answer = lambda body, call: ok(json.dumps({"grade": call}))
    with pytest.raises(ScorerError, match=r"vlm_judge graded one image 0\.3 and 0\.4"):
        self_test(judge)
    judge.close()


def test_a_judge_that_gave_up_in_its_process_is_not_asked_again(endpoint: Endpoint) -> None:
    config = VlmJudgeRewardConfig(type="vlm_judge", url=endpoint.url, model=MODEL, attempts=2)
    pool = ScorerPool(config, None)
    try:
        pool.check()
        assert pool.submit(_images(2), rows("a", "b")).result(60).scores == (0.7, 0.7)
        asked = len(endpoint.calls)
        assert asked == 4  # the golden image twice
        endpoint.answer = lambda body, call: (500, {}, b"out of memory")
        with pytest.raises(ScorerError) as caught:
            pool.submit(_images(1), rows("c")).result(60)
        assert caught.value.problem.startswith("scorer 'vlm_judge' failed 1 time (ScorerGaveUp: ")
        assert f"at {endpoint.url}) failed 2 times (HTTP 500 out of memory)" in caught.value.problem
        assert len(endpoint.calls) == asked + 2
        endpoint.answer = graded
        assert pool.submit(_images(1), rows("c")).result(60).scores == (0.7,)
    finally:
        pool.close()
