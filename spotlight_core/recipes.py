"""Recipes: TOML files that say what a run depends on.

Unknown keys are errors.  ``extends = "other"`` starts from another recipe, so that variants differ by
their lines alone.
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from spotlight_core.config import NO_FILE, RunConfig
from spotlight_core.errors import BadInputError

RECIPES = Path(__file__).parent.parent / "flows" / "recipes"


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_recipe(recipe: str, child: Path | None = None) -> Path:
    """A path to a TOML file, or the name of a recipe beside ``child`` or of a shipped one."""
    beside = child.parent if child else Path()
    for candidate in (beside / recipe, beside / f"{recipe}.toml", RECIPES / f"{recipe}.toml"):
        # A user's own quickstart.toml may extend the shipped one of the same name.
        itself = child is not None and candidate.resolve() == child.resolve()
        if candidate.suffix == ".toml" and candidate.is_file() and not itself:
            return candidate
    raise BadInputError(f"no recipe {recipe!r}", f"give a TOML file or one of {', '.join(recipe_names())}")


_PATHS = (
    ("data", "prompts"),
    ("fleet", "trace"),
    ("model", "weights"),
    ("reward", "file"),
    ("evaluation", "held_out_reward", "file"),
)


def _read_tree(path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The recipe's tables with ``extends`` followed and relative paths resolved beside their file."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path} is not valid TOML", str(error)) from error
    except OSError as error:
        raise BadInputError(f"cannot read recipe {path}", f"check the path ({error.strerror})") from error
    for *sections, key in _PATHS:
        table: Any = tree
        for section in sections:
            table = table.get(section) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(table.get(key), str) and table[key] != NO_FILE:
            table[key] = str((path.parent / table[key]).resolve())
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise BadInputError(f"{path}: extends = {parent!r}", "give the name or the path of one recipe")
    extended = find_recipe(parent, path)
    if extended.resolve() in children:
        raise BadInputError(f"{path} extends {parent}, which extends it", "break the circle")
    return _merged(_read_tree(extended, (*children, path.resolve())), tree)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``, table by table; a table with another ``type`` replaces the whole."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = value
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same_type = value.get("type", old.get("type")) == old.get("type")
            result[key] = _merged(old, value) if same_type else value
    return result


def _override(tree: dict[str, Any], assignment: str) -> None:
    """Apply one ``section.key=value``; the value is TOML, or a bare string."""
    key, separator, text = assignment.partition("=")
    if not separator or not key.strip():
        raise BadInputError(
            f"override {assignment!r} is not key=value", "write for example optimizer.lr=1e-4"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    branch: dict[str, Any] = {}
    nested = branch
    *parents, leaf = key.strip().split(".")
    if (*parents, leaf) in _PATHS and value == "":
        raise BadInputError(
            f"override {assignment!r} names no path", "give one, or none where it may be left out"
        )
    if (*parents, leaf) in _PATHS and isinstance(value, str) and value != NO_FILE:
        value = str(Path(value).resolve())
    for parent in parents:
        nested = nested.setdefault(parent, {})
    nested[leaf] = value
    merged = _merged(tree, branch)
    tree.clear()
    tree.update(merged)


def _known_keys(model: type[BaseModel]) -> Iterable[str]:
    for name, field in model.model_fields.items():
        yield name
        for part in getattr(field.annotation, "__args__", (field.annotation,)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _known_keys(part)


def _explain(error: ValidationError, source: str) -> BadInputError:
    """The first fault of a validation as one line that names the key and the remedy."""
    fault = error.errors()[0]
    tags = {"ode", "flow_sde", "nft", "grpo", "none", "fixed_arm", "ocr", "template", "jpeg_size", "function"}
    # A union's tag is no part of the key as a recipe writes it.
    key = ".".join(str(part) for place, part in enumerate(fault["loc"]) if place == 0 or part not in tags)
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(fault["loc"][-1]), set(_known_keys(RunConfig)), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "remove it"
        return BadInputError(f"{source}: unknown key {key!r}", hint)
    if fault["type"] == "missing":
        return BadInputError(f"{source}: {key!r} is missing", "add it")
    if not key:
        return BadInputError(source, fault["msg"].removeprefix("Value error, "))
    return BadInputError(f"{source}: {key} = {fault['input']!r} is not usable", fault["msg"])


def load_recipe(recipe: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read, merge, override and validate a recipe.

    Raises:
        BadInputError: no such recipe, not TOML, an unknown key, a wrong type or an inconsistent pair.
    """
    path = find_recipe(recipe)
    tree = _read_tree(path)
    tree.setdefault("name", path.stem)
    # So that one price can be overridden alone.
    tree.setdefault("prices", dict(RunConfig.model_fields["prices"].default))
    for assignment in overrides:
        _override(tree, assignment)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, path.name) from error
