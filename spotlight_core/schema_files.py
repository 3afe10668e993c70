"""Dataclasses as JSON files with a schema version, nothing unknown in them."""

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from spotlight_core.errors import BadInputError

T = TypeVar("T")


def schema_text(value: Any, schema: int) -> str:
    """What the file of a dataclass holds."""
    return json.dumps({"schema": schema, **dataclasses.asdict(value)}, indent=2) + "\n"


def read_schema_file(path: Path, kind: type[T], schema: int, what: str, remedy: str) -> T:
    """A ``kind`` from a file; ``what`` is its name for people.

    Raises:
        BadInputError: no such file, another schema, an unknown or missing key, a value that does not fit.
    """
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"no {what} at {path} ({error.strerror})", remedy) from error
    except ValueError as error:
        raise BadInputError(f"{path} is no {what} ({error})", remedy) from error
    if not isinstance(record, dict) or "schema" not in record:
        raise BadInputError(f"{path} is no {what}: it names no schema", remedy)
    if (found := record.pop("schema")) != schema:
        raise BadInputError(f"{path} has schema {found!r}, this version reads {schema}", remedy)
    try:
        return TypeAdapter(kind).validate_python(record)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"]) or f"the {what}"
        given = "" if fault["type"] in ("missing", "value_error") else f" = {fault['input']!r}"
        raise BadInputError(f"{path}: {key}{given}: {fault['msg'].lower()}", remedy) from error
