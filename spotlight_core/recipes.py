"""Recipes: TOML files that say what a run depends on.

Unknown keys are errors.  ``extends = "other"`` starts from another recipe, so that variants differ by
their lines alone.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spotlight_core.config import NO_FILE, RunConfig
from spotlight_core.errors import BadInputError
from spotlight_core.recipe_keys import locate, suggestion, tag_of, without_dropped

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


_REWARDS = (("reward",), ("evaluation", "held_out_reward"))
_PARTS = tuple((*reward, "parts", "*", "reward") for reward in _REWARDS)
_PATHS = (
    ("data", "prompts"),
    ("fleet", "trace"),
    ("fleet", "notices", "path"),
    ("fleet", "store", "url"),  # a folder, unless it names a bucket
    ("replay",),
    ("model", "weights"),
    ("elastic", "costs"),
    ("exploration", "steps"),
    *((*reward, "file") for reward in (*_REWARDS, *_PARTS)),
)
# Hub ids and local folders look alike: a folder of that name beside the recipe decides.
_IDS_OR_PATHS = (
    ("model", "path"),
    *(
        (*reward, key)
        for reward in (*_REWARDS, *_PARTS)
        for key in ("path", "processor", "detector", "classifier")
    ),
)


def _resolve_paths(tree: dict[str, Any], folder: Path, source: str) -> None:
    """Make the relative paths of ``tree``, which was written in ``folder``, absolute."""
    for *sections, key in _PATHS:
        for table in _tables_at(tree, sections):
            if table.get(key) == "":
                raise BadInputError(
                    f"{source} names no path in {'.'.join((*sections, key))}",
                    "give one, or none where it may be left out",
                )
            if isinstance(table.get(key), str) and table[key] != NO_FILE and "://" not in table[key]:
                table[key] = str((folder / table[key]).resolve())
    for *sections, key in _IDS_OR_PATHS:
        for table in _tables_at(tree, sections):
            if isinstance(table.get(key), str) and (folder / table[key]).is_dir() and table[key]:
                table[key] = str((folder / table[key]).resolve())


def _tables_at(tree: Any, sections: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The tables at a path of keys; ``*`` is each one of a list, or of the places an override gives."""
    if not sections:
        if isinstance(tree, dict):
            yield tree
        return
    first, *rest = sections
    if first != "*":
        if isinstance(tree, dict):
            yield from _tables_at(tree.get(first), rest)
    elif isinstance(tree, list | dict):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _tables_at(each, rest)


Anew = dict[str, str | None]
"""Tables that another ``type`` has replaced as a whole, by dotted key, with the type that they had."""


def _read_tree(path: Path, anew: Anew, children: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The recipe's tables with ``extends`` followed and relative paths resolved beside their file."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # syntax, UTF-8, an integer of some thousand digits
        raise BadInputError(f"{path} is not valid TOML", str(error)) from error
    except OSError as error:
        raise BadInputError(f"cannot read recipe {path}", f"check the path ({error.strerror})") from error
    _resolve_paths(tree, path.parent, path.name)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    if not isinstance(parent, str):
        raise BadInputError(f"{path}: extends = {parent!r}", "give the name or the path of one recipe")
    extended = find_recipe(parent, path)
    if extended.resolve() in children:
        raise BadInputError(f"{path} extends {parent}, which extends it", "break the circle")
    return _merged(_read_tree(extended, anew, (*children, path.resolve())), tree, anew)


def _merged(
    below: Mapping[str, Any], above: Mapping[str, Any], anew: Anew, place: str = ""
) -> dict[str, Any]:
    """``above`` over ``below``, table by table; a table with another ``type`` replaces the whole, which
    is noted in ``anew``."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = value
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            if value.get("type", old.get("type")) == old.get("type"):
                result[key] = _merged(old, value, anew, f"{place}{key}.")
            else:
                anew[place + key] = old.get("type")
        elif isinstance(old, list) and isinstance(value, Mapping) and all(map(str.isdecimal, value)):
            result[key] = _merged_list(old, value, anew, f"{place}{key}.")
    return result


def _merged_list(below: list[Any], above: Mapping[str, Any], anew: Anew, place: str) -> list[Any]:
    """An override such as ``reward.parts.0.weight=2`` over the list that it picks from."""
    beyond = [index for index in above if int(index) >= len(below)]
    if beyond:
        raise BadInputError(
            f"an override sets place {beyond[0]} of a list of {len(below)}", "count places from 0"
        )
    listed = {str(index): old for index, old in enumerate(below)}
    chosen = {str(int(index)): value for index, value in above.items()}  # 01 is 1
    return list(_merged(listed, chosen, anew, place).values())


def _override(tree: dict[str, Any], assignment: str, anew: Anew) -> None:
    """Apply one ``section.key=value``; the value is TOML, or a bare string."""
    key, separator, text = assignment.partition("=")
    if not separator or not key.strip():
        raise BadInputError(
            f"override {assignment!r} is not key=value", "write for example optimizer.lr=1e-4"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # no TOML, or an integer of some thousand digits
        value = text.strip()
    branch: dict[str, Any] = {}
    nested = branch
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        nested = nested.setdefault(parent, {})
    nested[leaf] = value
    _resolve_paths(branch, Path(), f"override {assignment!r}")
    merged = _merged(tree, branch, anew)
    tree.clear()
    tree.update(merged)


def _explain(error: ValidationError, source: str, anew: Anew) -> BadInputError:
    """The first fault of a validation as one line that names the key and the remedy."""
    fault = error.errors()[0]
    place = locate(RunConfig, fault["loc"])
    key, said = place.key, fault["msg"].removeprefix("Value error, ")
    match fault["type"]:
        case "extra_forbidden":
            return BadInputError(f"{source}: unknown key {key!r}", suggestion(RunConfig, place))
        case "missing":
            return BadInputError(f"{source}: {key!r} is missing", _missing(key, anew))
        case "union_tag_not_found":
            return BadInputError(f"{source}: {key!r} has no type", f"add type = {_tags(fault['loc'])}")
        case "union_tag_invalid":
            tag = fault["ctx"]["tag"]
            return BadInputError(
                f"{source}: {key}.type = {tag!r} is not usable", f"give {_tags(fault['loc'])}"
            )
    if not key:
        return BadInputError(source, said)
    if isinstance(fault["input"], dict):  # a table as a whole: what is said of it names the value
        return BadInputError(f"{source}: {key} is not usable", said)
    return BadInputError(f"{source}: {key} = {fault['input']!r} is not usable", said)


def _missing(key: str, anew: Anew) -> str:
    table = key.rpartition(".")[0]
    if table not in anew:
        return "add it"
    kind = f"of type {anew[table]!r}" if anew[table] else "without a type"
    return f"add it: [{table}] has another type now and starts anew, nothing of the table {kind} is kept"


def _tags(location: tuple[int | str, ...]) -> str:
    tables = locate(RunConfig, (*location, "")).tables
    return "one of " + ", ".join(repr(tag) for table in tables if (tag := tag_of(table)))


def load_recipe(recipe: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Read, merge, override and validate a recipe.

    Raises:
        BadInputError: no such recipe, not TOML, an unknown key, a wrong type or an inconsistent pair.
    """
    path = find_recipe(recipe)
    try:
        return _loaded(path, overrides)
    except RecursionError as error:
        raise BadInputError(
            f"{path.name} or an override is nested too deep", "write tables as `spotlight keys` lists them"
        ) from error


def _loaded(path: Path, overrides: Iterable[str]) -> RunConfig:
    anew: Anew = {}
    tree = _read_tree(path, anew)
    tree.setdefault("name", path.stem)
    # So that one price can be overridden alone.
    tree.setdefault("prices", dict(RunConfig.model_fields["prices"].default))
    for assignment in overrides:
        _override(tree, assignment, anew)
    try:
        return RunConfig.model_validate(without_dropped(tree, (RunConfig,), NO_FILE))
    except ValidationError as error:
        raise _explain(error, path.name, anew) from error
