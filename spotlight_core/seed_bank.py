"""Every seed that exploration has scored, as Parquet: a file for each batch that it was explored for.

import pandas
bank = pandas.read_parquet("runs/quickstart/seed_bank")
bank[bank.prompt.str.contains("42")].sort_values("reward")
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow
import pyarrow.parquet

from spotlight_core.durable import replacing
from spotlight_core.errors import BadInputError
from spotlight_core.exploration.arms import Arm
from spotlight_core.types import Batch, PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedEntry:
    """A scored seed.

    ``occurrence``: the prompt's appearance in the run, which with ``seed`` names its noise.  ``policy``: the
    version that drew it.  ``selected``: whether it is rolled out.  ``node``: where it was denoised, empty
    when that is not known.  ``at``: when its batch was decided, in Unix seconds.
    """

    iteration: int
    occurrence: str
    prompt: str
    seed: int
    reward: float
    selected: bool
    policy: str
    effective_steps: int
    node: str
    at: float


_TYPES: Mapping[type | str, pyarrow.DataType] = {
    "int": pyarrow.int64(),
    "str": pyarrow.string(),
    "float": pyarrow.float64(),
    "bool": pyarrow.bool_(),
}
SCHEMA = pyarrow.schema(
    [(field.name, _TYPES[getattr(field.type, "__name__", field.type)]) for field in fields(SeedEntry)]
)


def entries_of(
    batch: Batch, arm: Arm, policy: PolicyVersion, at: float, nodes: Mapping[tuple[str, int], str]
) -> list[SeedEntry]:
    """What exploration has scored for a batch; ``nodes`` by occurrence and seed."""
    return [
        SeedEntry(
            iteration=batch.iteration,
            occurrence=planned.prompt.occurrence,
            prompt=planned.prompt.text,
            seed=score.seed,
            reward=score.reward,
            selected=score.seed in planned.seeds,
            policy=policy.name,
            effective_steps=arm.effective_steps,
            node=nodes.get((planned.prompt.occurrence, score.seed), ""),
            at=at,
        )
        for planned in batch.prompts
        for score in planned.explored
    ]


class SeedBank:
    """The files of a run, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, iteration: int, entries: Iterable[SeedEntry]) -> None:
        """Keep what was scored for the batch of ``iteration``; an earlier file of it is replaced."""
        rows = [asdict(entry) for entry in entries]
        if not rows:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._path(iteration)) as temporary:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, SCHEMA), temporary)

    def read(self, iteration: int) -> list[SeedEntry]:
        """What was scored for a batch; none where nothing was explored.

        Raises:
            BadInputError: a file that cannot be read, or that another version wrote.
        """
        path = self._path(iteration)
        if not path.exists():
            return []
        try:
            table = pyarrow.parquet.read_table(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise BadInputError(f"cannot read {path} ({error})", "restore the file, or remove it") from error
        if table.schema != SCHEMA:
            raise BadInputError(f"{path} has other columns than this version writes", "remove the file")
        return [SeedEntry(**row) for row in table.to_pylist()]

    def rewind(self, iteration: int) -> None:
        """Forget batches after ``iteration``: they will be explored again."""
        for path in self._folder.glob("*.parquet"):
            if path.stem.isdigit() and int(path.stem) > iteration:
                path.unlink()

    def _path(self, iteration: int) -> Path:
        return self._folder / f"{iteration:06d}.parquet"
