"""Step tables: what they answer, and their files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from spotlight_core.diffusion.caching import Schedule, StepTable
from spotlight_core.diffusion.caching.files import read_table, table_text
from spotlight_core.errors import BadInputError
from spotlight_core.types import Fidelity

SIGMAS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
TABLE = StepTable(
    transformer="FluxTransformer2DModel",
    sigmas=SIGMAS,
    sde_steps=(1, 3),
    rows=8,
    signal=(0.1, 0.2, 1 / 3, 0.4),
    velocity_change=(0.3, 0.2, 0.1, 0.2),
    polynomial=(1.0, 0.0),
    fit_error=0.1,
    identity_error=0.1,
    notes=("the identity is taken",),
    schedules=(
        Schedule(effective_steps=2, threshold=1.0, reused_steps=(1, 2, 3)),
        Schedule(effective_steps=4, threshold=0.2, reused_steps=(1,)),
        Schedule(effective_steps=5, threshold=0.0, reused_steps=()),
    ),
)


def test_the_nearest_count_not_below_is_given() -> None:
    assert TABLE.denoise_steps == 5
    assert TABLE.effective_steps == (2, 4, 5)
    asked = {count: TABLE.reused_steps(count) for count in range(1, 6)}
    assert asked == {1: (1, 2, 3), 2: (1, 2, 3), 3: (1,), 4: (1,), 5: ()}
    assert Fidelity(denoise_steps=5, reused_steps=TABLE.reused_steps(3)).effective_steps == 4


@pytest.mark.parametrize("count", [0, 6])
def test_a_count_out_of_range_names_the_counts_there_are(count: int) -> None:
    with pytest.raises(BadInputError, match=rf"^effective_steps = {count} is not .* give one of 2, 4, 5$"):
        TABLE.reused_steps(count)


def test_a_table_of_another_recipe_is_found_out() -> None:
    TABLE.check("FluxTransformer2DModel", [sigma + 1e-6 for sigma in SIGMAS])
    with pytest.raises(BadInputError, match=r"is of a FluxTransformer2DModel, no Wan.*: calibrate again"):
        TABLE.check("WanTransformer3DModel", SIGMAS)
    with pytest.raises(BadInputError, match="is of 5 denoise steps, not 4"):
        TABLE.check("FluxTransformer2DModel", SIGMAS[1:])
    with pytest.raises(BadInputError, match=r"has sigma 0\.4000 at denoise step 3, the recipe 0\.5000"):
        TABLE.check("FluxTransformer2DModel", (1.0, 0.8, 0.6, 0.5, 0.2, 0.0))


def test_a_file_gives_the_table_again(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(table_text(TABLE))
    assert read_table(file) == TABLE
    held = file.read_bytes()
    file.write_text(table_text(read_table(file)))
    assert file.read_bytes() == held


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "has schema 2, this version reads 1"),
        ({"mine": 1}, r"mine = 1: .*unexpected"),
        ({"rows": 0}, r"rows = 0: input should be greater"),
        ({"signal": [0.1, 0.2, 0.3]}, r"the step table: value error, 6 sigmas are not of 3 signals"),
        ({"polynomial": []}, r"the step table: value error"),
        ({"polynomial": ["a"]}, r"polynomial\.0 = 'a': "),
        ({"schedules": []}, r"effective steps \[\] do not rise to 5"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    file = tmp_path / "table.json"
    file.write_text(table_text(TABLE))
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(BadInputError, match=f"{said}.*: write it with") as raised:
        read_table(file)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("reused", [[0], [4], [1, 1], [2, 1], [1, 2]])
def test_steps_that_cannot_be_reused_are_refused(tmp_path: Path, reused: list[int]) -> None:
    """Beside the four that a trajectory of five steps computes."""
    file = tmp_path / "table.json"
    file.write_text(table_text(TABLE))
    record = json.loads(file.read_text())
    record["schedules"][1]["reused_steps"] = reused
    file.write_text(json.dumps(record))
    with pytest.raises(BadInputError, match="is none of 5 denoise steps"):
        read_table(file)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"no step table at .*absent \(No such file"):
        read_table(tmp_path / "absent")
    for text, said in (("{", "is no step table"), ("[]", "it names no schema"), ("{}", "it names no schema")):
        (tmp_path / "none").write_text(text)
        with pytest.raises(BadInputError, match=said):
            read_table(tmp_path / "none")
    record = {"schema": 1, **dataclasses.asdict(TABLE)}
    del record["sigmas"]
    (tmp_path / "none").write_text(json.dumps(record))
    with pytest.raises(BadInputError, match=r"none: sigmas: field required"):
        read_table(tmp_path / "none")
