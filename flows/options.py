"""What several commands of the command line share."""

from pathlib import Path
from typing import Annotated

import typer

Runs = Annotated[Path, typer.Option("--runs", help="Folder of all runs.")]
RunName = Annotated[str, typer.Argument(help="Name of a run in --runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RUNS = Path("runs")
