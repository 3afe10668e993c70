"""What a profile measures."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

_FILE = "task.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """SP ``degrees``, ``rows`` of a request, denoise ``steps`` of each of ``repeats`` requests."""

    degrees: tuple[int, ...]
    rows: tuple[int, ...]
    steps: int
    repeats: int

    @property
    def records(self) -> int:
        """How many records the first rank gives."""
        requests = len(self.degrees) * len(self.rows) + len(self.rows)  # those of reused steps as well
        return (requests + 2 + (max(self.degrees) > 1)) * self.repeats + 1

    def write(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "ProfilePlan":
        record = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        degrees, rows = tuple(record.pop("degrees")), tuple(record.pop("rows"))
        return cls(degrees=degrees, rows=rows, **record)
