"""Step tables as files: JSON with a schema version, nothing unknown in it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from spotlight_core.diffusion.caching.table import StepTable
from spotlight_core.errors import BadInputError

SCHEMA = 1
_REMEDY = "write it with `spotlight calibrate`"


def table_text(table: StepTable) -> str:
    """What a file of the table holds."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(table)}, indent=2) + "\n"


def read_table(path: Path) -> StepTable:
    """The table in a file.

    Raises:
        BadInputError: no such file, another schema, an unknown or missing key, steps that cannot be reused.
    """
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"no step table at {path} ({error.strerror})", _REMEDY) from error
    except ValueError as error:
        raise BadInputError(f"{path} is no step table ({error})", _REMEDY) from error
    if not isinstance(record, dict) or "schema" not in record:
        raise BadInputError(f"{path} is no step table: it names no schema", _REMEDY)
    if (schema := record.pop("schema")) != SCHEMA:
        raise BadInputError(f"{path} has schema {schema!r}, this version reads {SCHEMA}", _REMEDY)
    try:
        return TypeAdapter(StepTable).validate_python(record)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"]) or "the table"
        value = fault["type"] not in ("missing", "value_error")
        given = f" = {fault['input']!r}" if value else ""
        raise BadInputError(f"{path}: {key}{given}: {fault['msg'].lower()}", _REMEDY) from error
