"""What counts as a grade, and what an endpoint may say instead."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from spotlight_core.rewards.judge_answers import CallFailed, answer_text, grade, retry_after_seconds


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 0.0), ("7", 7.0), ("-3", 0.0), ("soon", 0.0), ("inf", 0.0), ("nan", 0.0)],
)
def test_retry_after_as_a_number(header: str | None, seconds: float) -> None:
    assert retry_after_seconds(header) == seconds


def test_retry_after_as_a_date() -> None:
    in_a_minute = datetime.now(UTC) + timedelta(seconds=60)
    assert 50 < retry_after_seconds(format_datetime(in_a_minute, usegmt=True)) <= 60
    assert retry_after_seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('{"grade": 7}', 7.0),
        (' {"score": 0.5}\n', 0.5),
        ('```json\n{"grade": 10}\n```', 10.0),
        ('```\n{"grade": 0}\n```', 0.0),
    ],
)
def test_a_grade(text: str, number: float) -> None:
    assert grade(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[7]",
        '[["grade", 7]]',
        '"7"',
        "{}",
        '{"grade": "7"}',
        '{"grade": true}',
        '{"grade": null}',
        '{"grade": NaN}',
        '{"grade": Infinity}',
        '{"grade": -0.1}',
        '{"grade": 10.5}',
        '{"grade": 1, "grade": 9}',
        '{"grade": 1, "quality": 9}',
        '{"grade": {"value": 3}}',
        'Sure! {"grade": 7}',
        "```json```",
        "``````",
    ],
)
def test_no_grade(text: str) -> None:
    with pytest.raises(CallFailed, match="not ") as caught:
        grade(text)
    assert caught.value.again


def test_an_answer_of_another_shape_has_no_text() -> None:
    answers: tuple[Any, ...] = (
        None,
        [],
        {},
        {"choices": [{}]},
        {"choices": [{"message": {"content": None}}]},
    )
    for answer in answers:
        with pytest.raises(CallFailed, match="chat completion"):
            answer_text(answer)
