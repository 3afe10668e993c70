"""Rows of a prompt file, for tests of rewards."""

from spotlight_core.types import PromptRow


def rows(*texts: str) -> list[PromptRow]:
    """One of each text, without metadata."""
    return [PromptRow(text=text) for text in texts]
