"""Step tables as files."""

from pathlib import Path

from spotlight_core.diffusion.caching.table import StepTable
from spotlight_core.schema_files import read_schema_file, schema_text

SCHEMA = 1


def table_text(table: StepTable) -> str:
    """What a file of the table holds."""
    return schema_text(table, SCHEMA)


def read_table(path: Path) -> StepTable:
    """The table in a file; BadInputError for anything else."""
    return read_schema_file(path, StepTable, SCHEMA, "step table", "write it with `spotlight calibrate`")
