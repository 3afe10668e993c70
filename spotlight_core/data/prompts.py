"""Prompt files in the public formats, read unchanged.

<split>.txt               UTF-8, one prompt a line, the last newline optional
<split>_metadata.jsonl    one JSON object a line: ``prompt``, and what a reward wants to know beside it
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from spotlight_core.errors import BadInputError
from spotlight_core.types import PromptRow

Split = Literal["train", "test"]
RowCheck = Callable[[PromptRow], None]
"""Raises BadInputError for a row that a reward cannot score; the reader adds file and line."""

DEEPEST = 32
"""Levels of lists and objects in a row of metadata; the public sets have three."""

_QUOTED = re.compile(r'"([^"]*)"')


def quoted_target(prompt: str) -> str:
    """The text between the first two double quotes; BadInputError when missing or empty."""
    match = _QUOTED.search(prompt)
    if match is None or not match.group(1).strip():
        raise BadInputError(
            f"no quoted target in prompt {prompt!r}",
            'write the text to draw in double quotes, as in A sign that reads "407"',
        )
    return match.group(1)


def prompt_file(folder: Path, split: Split) -> Path:
    """The file of a split.

    Raises:
        BadInputError: no such folder, neither file, or both.
    """
    if not folder.is_dir():
        raise BadInputError(
            f"no prompt folder {folder}", "set data.prompts to a folder with a train and a test file"
        )
    found = [path for path in _candidates(folder, split) if path.exists()]
    if len(found) == 1:
        return found[0]
    text, metadata = (path.name for path in _candidates(folder, split))
    if found:
        raise BadInputError(f"{folder} holds both {text} and {metadata}", "keep one of them")
    other: Split = "test" if split == "train" else "train"
    there = [path.name for path in _candidates(folder, other) if path.exists()]
    beside = f"only {there[0]}" if there else "no prompts"
    raise BadInputError(
        f"{folder} holds {beside}: there is no {split} split",
        f"add {text}, one prompt a line, or {metadata}, one JSON object a line",
    )


def _candidates(folder: Path, split: Split) -> tuple[Path, Path]:
    return folder / f"{split}.txt", folder / f"{split}_metadata.jsonl"


def read_prompts(folder: Path, split: Split, checks: Sequence[RowCheck] = ()) -> list[PromptRow]:
    """The rows of a split, in order.

    Raises:
        BadInputError: see ``read_rows``.
    """
    return read_rows(prompt_file(folder, split), checks)


def read_rows(path: Path, checks: Sequence[RowCheck] = ()) -> list[PromptRow]:
    """The rows of a prompt file, in order.

    Raises:
        BadInputError: file missing, not UTF-8 or empty; broken JSON; a row that fails a check (names
            file and line).
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")  # bytes: text mode would turn a lone \r into a new line
    except OSError as error:
        raise BadInputError(f"cannot read prompts {path}", f"check the path ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8 (byte {error.start})", "save the file as UTF-8") from error
    # Not splitlines(): a prompt may hold U+2028, a form feed or another separator that it knows.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise BadInputError(f"no prompts in {path}", "write one prompt a line")
    parse = _json_row if path.suffix == ".jsonl" else _text_row
    rows = []
    for number, line in lines:
        try:
            row = parse(line.rstrip("\r"))
            for check in checks:
                check(row)
        except BadInputError as error:
            raise BadInputError(f"{path}:{number}: {error.problem}", error.remedy) from error
        rows.append(row)
    return rows


def _text_row(line: str) -> PromptRow:
    return PromptRow(text=line)


def _json_row(line: str) -> PromptRow:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInputError(
            f"broken JSON ({error.msg} at column {error.colno})", "write one whole JSON object a line"
        ) from error
    except ValueError as error:  # Python reads integers of some thousand digits only
        raise BadInputError(
            "a number that is too long", "write numbers of fewer digits, or as text"
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    _check_depth(record)
    _check_encodable(record)
    text = record.pop("prompt", None) if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise BadInputError("no text under the key 'prompt'", 'write {"prompt": "a photo of ...", ...}')
    return PromptRow(text=text, metadata=record)


def _check_depth(record: Any) -> None:
    """Rows travel as JSON between processes, each of which must be able to read them."""
    level = [record]
    for _ in range(DEEPEST):
        level = [
            inner
            for value in level
            if isinstance(value, list | dict)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
    if any(isinstance(value, list | dict) for value in level):
        raise _too_deep()


def _too_deep() -> BadInputError:
    return BadInputError(f"brackets nested more than {DEEPEST} deep", "write a flat JSON object a line")


def _check_encodable(record: Any) -> None:
    try:
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:  # half of a pair such as \ud83d\ude00
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise BadInputError(
            f"{half} alone is no character", "write the whole pair, or the character itself in UTF-8"
        ) from error
