"""A recipe of the least that is needed, with a folder of prompts that nobody reads, and how it is refused."""

from pathlib import Path

import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.recipes import load_recipe

BASE = 'iterations = 3\n[data]\nprompts = "prompts"\n'
REWARDS = (
    "reward={type='weighted', parts=[{weight=1.0, reward={type='ocr'}}, "
    "{weight=0.5, reward={type='function', file='mine.py'}}]}"
)


def write_recipe(folder: Path) -> str:
    path = folder / "mine.toml"
    path.write_text(BASE, encoding="utf-8")
    return str(path)


def refused(recipe: str, *overrides: str) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        load_recipe(recipe, overrides)
    assert "\n" not in str(caught.value)
    return caught.value
