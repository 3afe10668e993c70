"""Files and functions stay small enough to be read at once."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("flows", "tasks", "spotlight_core", "tests", "infra")
    for path in (ROOT / folder).rglob("*.py")
)


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_file_is_under_500_lines_and_its_functions_under_60(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 500
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions(ast.parse(text))}
    assert {name: length for name, length in lengths.items() if length >= 60} == {}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_function_is_annotated(path: Path) -> None:
    bare = []
    for node in functions(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        named = [argument for argument in arguments if argument.arg not in ("self", "cls")]
        if node.returns is None or any(argument.annotation is None for argument in named):
            bare.append(f"{node.name}, line {node.lineno}")
    assert bare == []
