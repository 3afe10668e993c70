"""Where two resolved recipes differ, key by key."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from spotlight_core.config import RunConfig

# What two runs may differ in and still end with the same weights: none of it reaches a trained number.
WITHOUT_EFFECT = (
    *("name", "fleet", "services", "prices", "decisions", "replay", "exploration_deadline_seconds"),
)
WITH_EFFECT = ("services.torch_threads",)  # sums depend on threads


class Difference(NamedTuple):
    """A dotted key with its two values, as JSON has them."""

    key: str
    old: Any
    new: Any


def differences(old: RunConfig, new: RunConfig) -> list[Difference]:
    """Keys that differ, in the recipe's order."""
    return list(_differences("", old.model_dump(mode="json"), new.model_dump(mode="json")))


def effective_differences(old: RunConfig, new: RunConfig) -> list[Difference]:
    """Those that can make the trained weights differ when the decisions are the same."""
    return [
        difference
        for difference in differences(old, new)
        if difference.key in WITH_EFFECT or not _below(difference.key, WITHOUT_EFFECT)
    ]


def shown(value: Any) -> str:
    """As a recipe would have it; a table by its type."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return f"a table of type {value['type']!r}" if "type" in value else "a table"
    return repr(value) if isinstance(value, str) else json.dumps(value)


def _below(key: str, tables: tuple[str, ...]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def _differences(key: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        if old != new:
            yield Difference(key, old, new)
        return
    for part in {**old, **new}:
        yield from _differences(f"{key}.{part}" if key else str(part), old.get(part), new.get(part))
