"""The README shows what is there: its two commands and a file tree without a wrong path."""

from pathlib import Path

from tests.architecture.readme_tree import tree_paths

ROOT = Path(__file__).parents[2]


def test_tree_reader_follows_indentation_drawings_and_comments() -> None:
    readme = """
# Title
```
make demo
```
```text
flows/            the runs
  recipes/*.toml  one run per file
spotlight_core/
├── config.py     # the recipe, and more
├── market/
│   └── prices.py
└── types.py
Makefile          commands
```
"""
    assert tree_paths(readme) == [
        "flows",
        "flows/recipes/*.toml",
        "spotlight_core",
        "spotlight_core/config.py",
        "spotlight_core/market",
        "spotlight_core/market/prices.py",
        "spotlight_core/types.py",
        "Makefile",
    ]
    assert tree_paths("no tree") == []


def test_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in readme
    assert "make test" in readme


def test_every_path_of_the_readmes_tree_exists() -> None:
    paths = tree_paths((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(paths) > 10
    assert [path for path in paths if not any(ROOT.glob(path))] == []
    shown = {path.split("/")[0] for path in paths}
    assert {"flows", "tasks", "spotlight_core", "tests"} <= shown
