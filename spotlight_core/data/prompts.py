"""Prompt files in the public format: UTF-8, one prompt a line, the last newline optional."""

import re
from pathlib import Path

from spotlight_core.errors import BadInputError

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


def read_prompts(path: Path) -> list[str]:
    """The prompts of a text file, in order.

    Raises:
        BadInputError: file missing, not UTF-8, empty, or a line without a quoted target (names the line).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"cannot read prompts {path}", f"check the path ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path} is not UTF-8 (byte {error.start})", "save the file as UTF-8") from error
    prompts = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not prompts:
        raise BadInputError(f"no prompts in {path}", "write one prompt a line")
    for number, prompt in prompts:
        try:
            quoted_target(prompt)
        except BadInputError as error:
            raise BadInputError(f"{path}:{number}: {error.problem}", error.remedy) from error
    return [prompt for _, prompt in prompts]
