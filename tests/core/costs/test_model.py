"""The cost model's interpolations, its file, and the published figures."""

import dataclasses
import json
from pathlib import Path

import pytest

from spotlight_core.costs import CostModel, StepCost
from spotlight_core.costs.files import read_costs, write_costs
from spotlight_core.costs.published import published
from spotlight_core.errors import BadInputError

COSTS = CostModel(
    denoise_step_fixed_seconds=0.1,
    denoise_step_per_row_seconds=0.05,
    tokens=100,
    launch_seconds=0.0,
    load_seconds=1.0,
    score_seconds_per_image=0.0,
    train_seconds=2.0,
    boot_seconds=30.0,
    sharded=(
        StepCost(tokens=100, degree=2, fixed_seconds=0.1, per_row_seconds=0.03),
        StepCost(tokens=100, degree=4, fixed_seconds=0.1, per_row_seconds=0.01),
        StepCost(tokens=300, degree=1, fixed_seconds=0.1, per_row_seconds=0.15),
    ),
)


@pytest.mark.parametrize(
    ("rows", "degree", "tokens", "seconds"),
    [
        (1, 1, None, 0.15),
        (4, 1, None, 0.3),
        (4, 2, None, 0.22),
        (4, 8, None, 0.14),  # above the highest nothing is gained
        (4, 3, None, 0.22 + (1 / 2 - 1 / 3) / (1 / 2 - 1 / 4) * (0.14 - 0.22)),
        (4, 1, 200, 0.5),
        (4, 1, 600, 1.4),  # as the nearest does per token
        (4, 1, 50, 0.15),
        (4, 2, 50, 0.11),
    ],
)
def test_a_denoise_step(rows: int, degree: int, tokens: int | None, seconds: float) -> None:
    assert COSTS.denoise_step_seconds(rows, degree, tokens) == pytest.approx(seconds)


def test_the_published_figures_come_out_as_they_went_in() -> None:
    costs = published("qwen_image_h20")
    for side, row in ((512, (155, 161, 172)), (1024, (605, 350, 207)), (1536, (1557, 880, 464))):
        for degree, milliseconds in zip((1, 2, 4), row, strict=True):
            seconds = costs.denoise_step_seconds(1, degree, (side // 16) ** 2)
            assert seconds == pytest.approx(milliseconds / 1000)
    with pytest.raises(BadInputError, match="no published costs 'h300': the names are qwen_image_h20"):
        published("h300")


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    write_costs(tmp_path / "costs.json", COSTS)
    assert read_costs(tmp_path / "costs.json") == COSTS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"launch_seconds": -1.0}, r"launch_seconds = -1\.0: input should be greater than or equal to 0"),
        ({"launch_seconds": float("nan")}, "launch_seconds = nan"),
        ({"sped": 1}, "sped = 1: "),
        ({"train_seconds": None}, "train_seconds = None"),
        (
            {"sharded": [{"tokens": 1, "degree": 0, "fixed_seconds": 0, "per_row_seconds": 0}]},
            "sharded.0.degree",
        ),
        ({"schema": 7}, "has schema 7, this version reads 1"),
    ],
)
def test_a_file_that_is_not_right_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"schema": 1, **dataclasses.asdict(COSTS), **change}))
    with pytest.raises(BadInputError, match=said):
        read_costs(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00"])
def test_what_is_no_cost_model_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=r"is no cost model.*: write it with `spotlight profile`"):
        read_costs(path)
    with pytest.raises(BadInputError, match=r"no cost model at .*No such file"):
        read_costs(tmp_path / "none.json")
