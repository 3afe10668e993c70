"""Cost models as files: JSON with a schema version, nothing unknown in it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from spotlight_core.costs.model import CostModel
from spotlight_core.durable import write_bytes
from spotlight_core.errors import BadInputError

SCHEMA = 1
_REMEDY = "write it with `spotlight profile`"


def write_costs(path: Path, costs: CostModel) -> None:
    """Replace ``path`` with the cost model, durably."""
    record = {"schema": SCHEMA, **dataclasses.asdict(costs)}
    write_bytes(path, (json.dumps(record, indent=2) + "\n").encode())


def read_costs(path: Path) -> CostModel:
    """The cost model in a file.

    Raises:
        BadInputError: no such file, another schema, an unknown or missing key, a negative time.
    """
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"no cost model at {path} ({error.strerror})", _REMEDY) from error
    except ValueError as error:
        raise BadInputError(f"{path} is no cost model ({error})", _REMEDY) from error
    if not isinstance(record, dict) or "schema" not in record:
        raise BadInputError(f"{path} is no cost model: it names no schema", _REMEDY)
    if (schema := record.pop("schema")) != SCHEMA:
        raise BadInputError(f"{path} has schema {schema!r}, this version reads {SCHEMA}", _REMEDY)
    try:
        return TypeAdapter(CostModel).validate_python(record)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        given = "" if fault["type"] == "missing" else f" = {fault['input']!r}"
        raise BadInputError(f"{path}: {key}{given}: {fault['msg'].lower()}", _REMEDY) from error
