"""What a judge's endpoint may answer, and what of it is a grade."""

import email.utils
import json
import math
from datetime import UTC, datetime
from typing import Any

_EXCERPT = 200  # characters of a refusal that its error shows


class CallFailed(Exception):
    """One call gave nothing usable.

    ``again`` says whether another may; ``wait_seconds`` is how long the endpoint asked to be left alone.
    """

    def __init__(self, cause: str, *, again: bool, wait_seconds: float = 0.0) -> None:
        super().__init__(cause)
        self.again = again
        self.wait_seconds = wait_seconds


def checked(status: int, body: bytes, wait_seconds: float) -> Any:
    """The JSON of an answer.

    Raises:
        CallFailed: a refusal (429 and 5xx may be tried again, others not), or no JSON.
    """
    if status != 200:
        excerpt = " ".join(body.decode("utf-8", "replace").split())[:_EXCERPT]
        again = status == 429 or status >= 500
        raise CallFailed(f"HTTP {status} {excerpt}".strip(), again=again, wait_seconds=wait_seconds)
    try:
        return json.loads(body)
    except ValueError as error:
        raise CallFailed(f"an answer that is no JSON: {body[:_EXCERPT]!r}", again=True) from error


def served_models(answer: Any) -> list[str]:
    """The names in ``{"data": [{"id": ...}]}``.

    Raises:
        CallFailed: an answer of another shape.
    """
    try:
        return [str(model["id"]) for model in answer["data"]]
    except (KeyError, TypeError) as error:
        raise CallFailed(f"no list of models: {str(answer)[:_EXCERPT]}", again=True) from error


def answer_text(answer: Any) -> str:
    """The text of the first choice of a chat completion.

    Raises:
        CallFailed: an answer of another shape.
    """
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise CallFailed(f"no chat completion: {str(answer)[:_EXCERPT]}", again=True) from error
    if not isinstance(text, str):
        raise CallFailed(f"no text in the chat completion: {text!r}", again=True)
    return text


def grade(text: str) -> float:
    """The number in a JSON object with that one member, in 0..10; a ``json`` fence around it is tolerated.

    Raises:
        CallFailed: anything else.
    """
    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```") and len(bare) >= 6:
        bare = bare[3:-3].removeprefix("json").strip()
    try:
        # As pairs: of a member that comes twice, json would keep the last.
        members = json.loads(bare, object_pairs_hook=_Members)
    except ValueError:
        members = None
    if isinstance(members, _Members) and len(members) == 1:
        value = members[0][1]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and math.isfinite(value) and 0 <= value <= 10:
            return float(value)
    raise CallFailed(f'not {{"grade": <0 to 10>}}: {text[:_EXCERPT]!r}', again=True)


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object, told from a JSON array."""


def retry_after_seconds(header: str | None) -> float:
    """Seconds that a ``Retry-After`` header asks for, as a number or a date; 0 for none or nonsense."""
    if header is None:
        return 0.0
    try:
        return max(float(header), 0.0) if math.isfinite(float(header)) else 0.0
    except ValueError:
        pass
    try:
        at = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    # A date without a zone counts as UTC, which HTTP dates are.
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max((at - datetime.now(UTC)).total_seconds(), 0.0)
