"""VLM judge: a vision-language model behind an OpenAI-compatible endpoint grades each image.

score ──► cache (same image and prompt, same grade) ──► threads ──► POST {url}/chat/completions
                                                          ▲               │ busy, silent or garbage:
                                                          └── wait, again ◄┘ at last ScorerGaveUp
"""

import base64
import hashlib
import io
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx
import numpy as np
import tenacity
from PIL import Image

from spotlight_core.config import VlmJudgeRewardConfig
from spotlight_core.errors import BadInputError
from spotlight_core.rewards.base import ScorerGaveUp
from spotlight_core.rewards.judge_answers import (
    CallFailed,
    answer_text,
    checked,
    grade,
    retry_after_seconds,
    served_models,
)
from spotlight_core.rewards.patience import CONNECT_SECONDS, LONGEST_WAIT_SECONDS
from spotlight_core.types import PromptRow

T = TypeVar("T")
BACKOFF_SECONDS = (0.5, 20.0)  # first and largest wait between attempts, unless the endpoint asks for more
CACHED_GRADES = 100_000
LONGEST_ANSWER_BYTES = 1 << 20


class VlmJudgeReward:
    """Grades of 0 to 10 become scores of 0 to 1.  An endpoint that does not grade is never a 0."""

    name = "vlm_judge"

    def __init__(self, config: VlmJudgeRewardConfig, environment: Mapping[str, str] = os.environ) -> None:
        """Ask the endpoint which models it serves.

        Raises:
            BadInputError: it does not serve this one; no key in the environment; a broken question.
            ScorerGaveUp: it does not answer.
        """
        self._config = config
        self._ask("")  # a question that cannot be filled in is found now
        self._key = _key(config.api_key_variable, environment)
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(
                config.timeout_seconds, connect=min(CONNECT_SECONDS, config.timeout_seconds)
            ),
            limits=httpx.Limits(max_connections=config.concurrency),
        )
        self._threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="vlm-judge")
        self._grades: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()
        self._check_model()

    def score(self, images: np.ndarray, prompts: Sequence[PromptRow]) -> list[float]:
        """One score in 0..1 for each image (uint8 ``[B, height, width, 3]``) and its prompt's text.

        An image that has been graded under the same prompt gets its grade of then, whatever the endpoint
        would say now.

        Raises:
            ScorerGaveUp: an image got no grade in any of the attempts.
        """
        names = [_name(image, prompt.text) for image, prompt in zip(images, prompts, strict=True)]
        with self._lock:
            known = {name: self._grades[name] for name in names if name in self._grades}
        fresh = {
            name: (image, prompt.text)
            for name, image, prompt in zip(names, images, prompts, strict=True)
            if name not in known
        }
        grades = self._threads.map(lambda item: self._remembered(item[0], *item[1]), fresh.items())
        known |= dict(zip(fresh, grades, strict=True))
        return [known[name] for name in names]

    def judge(self, image: np.ndarray, prompt: str) -> float:
        """The endpoint's score of one image (uint8 ``[height, width, 3]``), asked anew.

        Raises:
            ScorerGaveUp: no grade in any of the attempts.
        """
        body = {
            "model": self._config.model,
            "temperature": 0,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": self._ask(prompt)},
                        {"type": "image_url", "image_url": {"url": _data_url(image)}},
                    ],
                }
            ],
        }
        return self._tried(lambda: grade(answer_text(self._call("POST", "/chat/completions", body))) / 10.0)

    def close(self) -> None:
        """Let go of threads and connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _remembered(self, name: str, image: np.ndarray, prompt: str) -> float:
        score = self.judge(image, prompt)
        with self._lock:
            self._grades[name] = score
            while len(self._grades) > CACHED_GRADES:
                self._grades.popitem(last=False)
        return score

    def _ask(self, prompt: str) -> str:
        try:
            return self._config.question.format(prompt=prompt)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise BadInputError(
                f"reward.question cannot be filled in ({type(error).__name__}: {error})",
                "write {prompt} where the prompt goes, and other braces twice",
            ) from error

    def _check_model(self) -> None:
        served = self._tried(lambda: served_models(self._call("GET", "/models")))
        if self._config.model not in served:
            raise BadInputError(
                f"{self._config.url} does not serve the model {self._config.model!r}",
                f"set reward.model to one of {', '.join(sorted(served)) or 'its models: it has none now'}",
            )

    def _tried(self, call: Callable[[], T]) -> T:
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._config.attempts),
            wait=_wait,
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, CallFailed) and error.again),
            reraise=True,
        )
        try:
            return retrying(call)
        except CallFailed as error:
            attempts = retrying.statistics["attempt_number"]
            raise ScorerGaveUp(
                f"scorer 'vlm_judge' (model {self._config.model!r} at {self._config.url}) failed "
                f"{attempts} time{'s' * (attempts > 1)} ({self._without_key(str(error))})",
                "check that the endpoint runs, serves the model and is not overloaded; a failure is never a "
                "score of 0",
            ) from None  # a cause may quote headers

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON of one answer, which must have come whole when the timeout is over."""
        deadline = time.monotonic() + self._config.timeout_seconds
        received = bytearray()
        try:
            with self._client.stream(method, f"{self._config.url}{path}", json=body) as response:
                for piece in response.iter_bytes():
                    received += piece
                    if time.monotonic() > deadline or len(received) > LONGEST_ANSWER_BYTES:
                        raise CallFailed(f"an answer without end: {len(received)} bytes so far", again=True)
        except httpx.RequestError as error:
            raise CallFailed(f"{type(error).__name__}: {error}", again=True) from error
        wait = retry_after_seconds(response.headers.get("Retry-After"))
        return checked(response.status_code, bytes(received), wait)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _wait(state: tenacity.RetryCallState) -> float:
    """Exponential, or what the endpoint asked for if that is longer; never above a minute."""
    first, longest = BACKOFF_SECONDS
    backoff = min(first * 2 ** (state.attempt_number - 1), longest)
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.wait_seconds if isinstance(error, CallFailed) else 0.0
    return min(max(backoff, asked), LONGEST_WAIT_SECONDS)


def _key(variable: str | None, environment: Mapping[str, str]) -> str | None:
    if variable is None:
        return None
    key = environment.get(variable, "").strip()
    if not key:
        raise BadInputError(
            f"the environment variable {variable} of reward.api_key_variable is empty", "export the key in it"
        )
    if not key.isascii() or not key.isprintable():
        raise BadInputError(
            f"the environment variable {variable} holds characters that no HTTP header can carry",
            "export the bare key",
        )
    return key


def _name(image: np.ndarray, prompt: str) -> str:
    header = json.dumps([list(image.shape), prompt]).encode()
    return hashlib.sha256(header + b"\n" + np.ascontiguousarray(image).tobytes()).hexdigest()


def _data_url(image: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
