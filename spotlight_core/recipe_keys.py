"""The recipe's schema as keys: where a dotted key leads, which tables it may meet, what it was meant to be.

A union of tables is told apart by ``type``; pydantic's places name that tag, recipes don't.
"""

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Tables = tuple[type[BaseModel], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a place in a validation leads: the key as a recipe writes it, the tables it may lie in."""

    key: str
    tables: Tables
    """Tables that may hold the last part of the key, narrowed by the tags on the way."""
    siblings: Tables
    """Those of the same union that another ``type`` would give."""


def tables_of(annotation: Any) -> Tables:
    """The tables that a field's annotation allows; those inside of a tuple count."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    if typing.get_origin(annotation) is Literal:
        return ()
    found: list[type[BaseModel]] = []
    for part in typing.get_args(annotation):
        found += [table for table in tables_of(part) if table not in found]
    return tuple(found)


def tag_of(table: type[BaseModel]) -> str | None:
    """The ``type`` of a table in a union."""
    field = table.model_fields.get("type")
    return typing.get_args(field.annotation)[0] if field else None


def locate(root: type[BaseModel], location: Sequence[str | int]) -> Place:
    """Follow a place of a validation from the root of the schema."""
    key: list[str] = []
    tables: Tables = (root,)
    siblings: Tables = ()
    tags_follow = False
    for number, part in enumerate(location):
        chosen = tuple(table for table in tables if tags_follow and tag_of(table) == part)
        if chosen:
            siblings = tuple(table for table in tables if table not in chosen)
            tables, tags_follow = chosen, False
            continue
        key.append(str(part))
        if isinstance(part, int) or number == len(location) - 1:
            continue
        tables = _below(tables, part)
        siblings, tags_follow = (), len(tables) > 1
    return Place(key=".".join(key), tables=tables, siblings=siblings)


def suggestion(root: type[BaseModel], place: Place) -> str:
    """What an unknown key was meant to be: a key of its table, else of another type, else of any table."""
    unknown = place.key.rpartition(".")[2]
    near = difflib.get_close_matches(unknown, {name for table in place.tables for name in table.model_fields})
    if near:
        return f"did you mean {near[0]!r}?"
    owners = [tag for table in place.siblings if unknown in table.model_fields and (tag := tag_of(table))]
    if owners:
        types = " or ".join(repr(owner) for owner in owners)
        return f"only type {types} has it: remove it or change the type"
    keys = {key.rpartition(".")[2]: key for key in _dotted(root, "")}
    near = difflib.get_close_matches(unknown, keys, n=1, cutoff=0.8)
    return f"did you mean {keys[near[0]]!r}?" if near else "remove it"


def without_dropped(tree: Mapping[str, Any], tables: Tables, word: str) -> dict[str, Any]:
    """``tree`` without the keys that are ``word`` and may be absent: TOML has no null."""
    kept: dict[str, Any] = {}
    named = tuple(table for table in tables if tag_of(table) == tree.get("type")) or tables
    for key, value in tree.items():
        if value == word and any(_may_be_absent(field) for field in _fields(named, key)):
            continue
        below = _below(named, key)
        if isinstance(value, Mapping):
            value = without_dropped(value, below, word)
        elif isinstance(value, list):
            value = [without_dropped(v, below, word) if isinstance(v, Mapping) else v for v in value]
        kept[key] = value
    return kept


def _fields(tables: Tables, key: str) -> Iterator[FieldInfo]:
    return (table.model_fields[key] for table in tables if key in table.model_fields)


def _below(tables: Tables, key: str) -> Tables:
    found: list[type[BaseModel]] = []
    for field in _fields(tables, key):
        found += [table for table in tables_of(field.annotation) if table not in found]
    return tuple(found)


def _may_be_absent(field: FieldInfo) -> bool:
    is_union = typing.get_origin(field.annotation) in (typing.Union, UnionType)
    return is_union and type(None) in typing.get_args(field.annotation) and field.default is None


def _dotted(table: type[BaseModel], prefix: str) -> Iterator[str]:
    """Every key of the schema but the tags, sections in their order, the nearest to the root first."""
    for name, field in reversed(table.model_fields.items()):
        if name == "type":
            continue
        yield prefix + name
        for below in tables_of(field.annotation):
            yield from _dotted(below, f"{prefix}{name}.")
