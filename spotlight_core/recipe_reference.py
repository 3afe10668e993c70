"""The recipe's schema as a text to look things up in: every key, its default and what it means."""

import difflib
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from spotlight_core.config import RunConfig
from spotlight_core.errors import BadInputError
from spotlight_core.recipe_keys import tables_of, tag_of

_KEYS = 34  # columns of the longest key with its default, as a rule


def reference(section: str | None = None) -> str:
    """The keys of one section such as ``sampler`` or ``model.lora``, or of all.

    Raises:
        BadInputError: no such section.
    """
    sections = list(dict.fromkeys(_sections(RunConfig, "")))  # samplers share their windows
    names = sorted({name for name, _ in sections if name})
    if section is not None and section not in names:
        near = difflib.get_close_matches(section, names, n=1)
        raise BadInputError(f"no section {section!r}", f"give one of {', '.join(near or names)}")
    chosen = [
        table
        for name, table in sections
        if section is None or name == section or name.startswith(f"{section}.")
    ]
    return "\n\n".join(chosen)


def _sections(table: type[BaseModel], name: str) -> Iterator[tuple[str, str]]:
    """Each table of the schema, the outer ones first, with its dotted name."""
    yield name, _table(table, name)
    for key, field in table.model_fields.items():
        for below in tables_of(field.annotation):
            yield from _sections(below, f"{name}.{key}" if name else key)


def _table(table: type[BaseModel], name: str) -> str:
    tag = tag_of(table)
    head = [f"[{name}]" if name else "top of the file"]
    if tag is not None:
        head.append(f'type = "{tag}"')
        head.append(f"  {_meaning(table.model_fields['type'])}")
    rows = [
        _row(key, field)
        for key, field in table.model_fields.items()
        if key != "type" and not tables_of(field.annotation)
    ]
    return "\n".join([" ".join(head), *rows])


def _row(key: str, field: FieldInfo) -> str:
    default = _default(field)
    written = f"{key} = {default}" if default else key
    needed = "" if not field.is_required() else "Needed.  "
    return f"  {written:{_KEYS}} {needed}{_meaning(field)}"


def _default(field: FieldInfo) -> str:
    """As TOML has it; empty for none and for tables."""
    value: Any = None if field.is_required() else field.get_default(call_default_factory=True)
    return "" if value is None or isinstance(value, BaseModel | dict) else json.dumps(value, default=str)


def _meaning(field: FieldInfo) -> str:
    return " ".join((field.description or "").replace("``", "").split())
