"""Cost models as files."""

from pathlib import Path

from spotlight_core.costs.model import CostModel
from spotlight_core.durable import write_text
from spotlight_core.schema_files import read_schema_file, schema_text

SCHEMA = 1


def write_costs(path: Path, costs: CostModel) -> None:
    """Replace ``path`` with the cost model, durably."""
    write_text(path, schema_text(costs, SCHEMA))


def read_costs(path: Path) -> CostModel:
    """The cost model in a file; BadInputError for anything else."""
    return read_schema_file(path, CostModel, SCHEMA, "cost model", "write it with `spotlight profile`")
