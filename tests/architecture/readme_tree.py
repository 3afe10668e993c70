"""Reads the file tree that a README shows."""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_DRAWING = str.maketrans(dict.fromkeys("│├└─┬", " "))
_NAME = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")


def tree_paths(readme: str) -> list[str]:
    """The paths of the file tree in ``readme``, without comments, or an empty list when there is none.

    The tree is the first fenced block with a line that starts with ``spotlight_core/``.  A line is
    ``<indentation><name>[  <comment>]``: the indentation (spaces or drawn branches) says below which
    folder, a folder ends with ``/``, two spaces or ``#`` begin the comment, and ``*`` stands for many.
    """
    for block in _FENCE.findall(readme):
        lines = [line.translate(_DRAWING).rstrip() for line in block.splitlines()]
        if any(line.strip().startswith("spotlight_core/") for line in lines):
            return list(_paths(lines))
    return []


def _paths(lines: list[str]) -> Iterator[str]:
    folders: list[tuple[int, str]] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        name = re.split(r"\s{2,}|\s+#", line.strip())[0]
        if not _NAME.fullmatch(name) or not ("." in name or name.endswith("/") or name[:1].isupper()):
            continue
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        path = PurePosixPath(*(folder for _, folder in folders), name)
        yield str(path)
        if name.endswith("/"):
            folders.append((indent, name))
