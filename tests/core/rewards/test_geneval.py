"""GenEval's clauses on given detections, each worked by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spotlight_core.data.prompts import read_rows
from spotlight_core.errors import BadInputError
from spotlight_core.rewards import geneval
from spotlight_core.rewards.geneval import (
    Detection,
    Score,
    kept,
    needs_color,
    relations,
    score_image,
)
from spotlight_core.rewards.geneval_metadata import CLASSES, COLORS, OTHER_SPELLINGS, check_metadata
from spotlight_core.types import PromptRow

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "prompts" / "geneval"

LEFT, MIDDLE, RIGHT = (0.0, 40.0, 20.0, 60.0), (40.0, 40.0, 60.0, 60.0), (80.0, 40.0, 100.0, 60.0)
TOP, BOTTOM = (40.0, 0.0, 60.0, 20.0), (40.0, 80.0, 60.0, 100.0)


def _seen(
    label: str,
    count: int = 1,
    *,
    color: str | None = None,
    box: tuple[float, float, float, float] = MIDDLE,
    confidence: float = 0.95,
) -> list[Detection]:
    return [Detection(label=label, confidence=confidence, box_xyxy=box, color=color) for _ in range(count)]


def _scores(detections: list[Detection], metadata: dict[str, Any]) -> tuple[float, float, float, float]:
    """graded, strict_correct, correct, compat."""
    check_metadata(metadata)
    kinds: tuple[Score, ...] = ("graded", "strict_correct", "correct", "compat")
    graded, strict, correct, compat = (score_image(detections, metadata, kind) for kind in kinds)
    return graded, strict, correct, compat


COUNT_2 = {"tag": "two_object", "include": [{"class": "dog", "count": 2}]}
COUNT_1 = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}


@pytest.mark.parametrize(
    ("metadata", "found", "expected"),
    [
        (COUNT_2, 2, (1.0, 1.0, 1.0, 1.0)),  # the right count
        (COUNT_2, 3, (0.5, 0.0, 1.0, 0.5)),  # too many: the official metric does not mind
        (COUNT_2, 1, (0.5, 0.0, 0.0, 0.5)),  # too few
        (COUNT_2, 0, (0.0, 0.0, 0.0, 0.0)),  # none
        (COUNT_1, 2, (0.0, 0.0, 1.0, 0.0)),
        (COUNT_1, 5, (0.0, 0.0, 1.0, -3.0)),  # graded is clamped, compat is not
    ],
)
def test_counts(metadata: dict[str, Any], found: int, expected: tuple[float, ...]) -> None:
    assert _scores(_seen("dog", found), metadata) == expected


@pytest.mark.parametrize(
    ("colors", "expected"),
    [
        (["red", "red"], (1.0, 1.0, 1.0, 1.0)),
        (["red", "blue"], (0.75, 0.0, 0.0, 0.75)),  # count 1, colour 1/2
        (["blue", "green"], (0.5, 0.0, 0.0, 0.5)),  # count 1, colour 0
        (["red"], (0.25, 0.0, 0.0, 0.25)),  # count 1/2, and a 0 in the colour's place
        (["red", "red", "blue"], (0.25, 0.0, 1.0, 0.25)),  # official: the two most certain ones
        (["blue", "red", "red"], (0.25, 0.0, 0.0, 0.25)),
        ([], (0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_colors(colors: list[str], expected: tuple[float, ...]) -> None:
    metadata = {"tag": "colors", "include": [{"class": "car", "count": 2, "color": "red"}]}
    detections = [
        Detection(label="car", confidence=0.95 - 0.01 * place, box_xyxy=MIDDLE, color=color)
        for place, color in enumerate(colors)
    ]
    assert _scores(detections, metadata) == pytest.approx(expected)


PLACED = {
    "tag": "position",
    "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["right of", 0]}],
}


@pytest.mark.parametrize(
    ("detections", "expected"),
    [
        (_seen("dog") + _seen("cat", box=RIGHT), (1.0, 1.0, 1.0, 1.0)),
        (_seen("dog") + _seen("cat", box=LEFT), (2 / 3, 0.0, 0.0, 0.75)),  # compat: 1 + 1 + 0 + 1 of 4
        (_seen("cat", box=RIGHT), (1 / 3, 0.0, 0.0, 1 / 3)),  # no dog to be right of
        (_seen("dog", 2) + _seen("cat", box=RIGHT), (1 / 3, 0.0, 1.0, 1 / 3)),  # 0, 1, and no target
        (_seen("dog"), (1 / 3, 0.0, 0.0, 1 / 3)),  # 1, then 0 and a 0 in the position's place
        (_seen("dog") + _seen("cat", 2, box=RIGHT), (1 / 3, 0.0, 1.0, 1 / 3)),
    ],
)
def test_positions(detections: list[Detection], expected: tuple[float, ...]) -> None:
    assert _scores(detections, PLACED) == pytest.approx(expected)


def test_every_pair_must_be_in_place() -> None:
    metadata = {
        "tag": "position",
        "include": [
            {"class": "dog", "count": 1},
            {"class": "cat", "count": 2, "position": ["right of", 0]},
        ],
    }
    one_is_left = _seen("dog") + _seen("cat", box=RIGHT) + _seen("cat", box=LEFT)
    assert _scores(one_is_left, metadata) == pytest.approx((2 / 3, 0.0, 0.0, 0.75))
    assert _scores(_seen("dog") + _seen("cat", 2, box=RIGHT), metadata) == (1.0, 1.0, 1.0, 1.0)


def test_color_and_position_in_one_clause() -> None:
    clause = {"class": "cat", "count": 1, "color": "black", "position": ["above", 0]}
    metadata = {"tag": "color_attr", "include": [{"class": "dog", "count": 1}, clause]}
    dog = _seen("dog")
    assert _scores(dog + _seen("cat", color="black", box=TOP), metadata) == (1.0, 1.0, 1.0, 1.0)
    # The wrong colour: 1, 1, 0 and no position term.
    wrong_color = dog + _seen("cat", color="white", box=TOP)
    assert _scores(wrong_color, metadata) == pytest.approx((2 / 3, 0.0, 0.0, 2 / 3))
    # The wrong place: 1, 1, 1, 0 against 1, 1, 1, 0, 1.
    wrong_place = dog + _seen("cat", color="black", box=BOTTOM)
    assert _scores(wrong_place, metadata) == pytest.approx((0.75, 0.0, 0.0, 0.8))
    # The wrong count: 1, 0 and one 0 for both.
    assert _scores(dog, metadata) == pytest.approx((1 / 3, 0.0, 0.0, 1 / 3))


def test_a_target_of_the_wrong_color_is_no_target() -> None:
    metadata = {
        "tag": "position",
        "include": [
            {"class": "dog", "count": 1, "color": "red"},
            {"class": "cat", "count": 1, "position": ["left of", 0]},
        ],
    }
    detections = _seen("dog", color="blue") + _seen("cat", box=LEFT)
    assert _scores(detections, metadata) == pytest.approx((0.5, 0.0, 0.0, 0.5))  # 1, 0, 1, 0


def test_two_include_clauses_share_the_mean_and_one_cannot_sink_the_other() -> None:
    metadata = {"tag": "two_object", "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1}]}
    assert _scores(_seen("dog") + _seen("cat"), metadata) == (1.0, 1.0, 1.0, 1.0)
    assert _scores(_seen("dog"), metadata) == (0.5, 0.0, 0.0, 0.5)
    # Five dogs are -3 to compat, 0 to graded.
    assert _scores(_seen("dog", 5) + _seen("cat"), metadata) == (0.5, 0.0, 1.0, -1.0)


def test_exclude_is_honoured_where_answers_are_right_or_wrong() -> None:
    counting = {
        "tag": "counting",
        "include": [{"class": "cup", "count": 2}],
        "exclude": [{"class": "cup", "count": 3}],
    }
    assert _scores(_seen("cup", 2), counting) == (1.0, 1.0, 1.0, 1.0)
    assert _scores(_seen("cup", 3), counting) == (0.5, 0.0, 0.0, 0.5)
    no_fork = {"tag": "single_object", "include": [{"class": "cup", "count": 1}]} | {
        "exclude": [{"class": "fork", "count": 1}]
    }
    assert _scores(_seen("cup") + _seen("fork"), no_fork) == (1.0, 0.0, 0.0, 1.0)


def test_the_threshold_is_higher_for_counting_and_exclusive() -> None:
    doubtful = _seen("cup", confidence=0.9) + _seen("cup", confidence=0.900001)
    counting = {"tag": "counting", "include": [{"class": "cup", "count": 1}]}
    single = {"tag": "single_object", "include": [{"class": "cup", "count": 2}]}
    assert _scores(doubtful, counting) == (1.0, 1.0, 1.0, 1.0)
    assert _scores(doubtful, single) == (1.0, 1.0, 1.0, 1.0)
    assert kept(_seen("cup", confidence=0.3), "single_object") == {}
    assert len(kept(_seen("cup", confidence=0.300001), "single_object")["cup"]) == 1


def test_at_most_sixteen_of_a_class_the_most_certain_first() -> None:
    crowd = [
        Detection(label="sheep", confidence=0.4 + 0.01 * number, box_xyxy=MIDDLE) for number in range(20)
    ]
    objects = kept(crowd + _seen("cow"), "single_object")
    assert [detection.confidence for detection in objects["sheep"]] == [
        pytest.approx(0.59 - 0.01 * place) for place in range(16)
    ]
    assert len(objects["cow"]) == 1
    metadata = {"tag": "single_object", "include": [{"class": "sheep", "count": 8}]}
    assert _scores(crowd, metadata)[3] == 0.0  # 16 of 8, and not 20 of 8


def test_equal_boxes_are_not_suppressed() -> None:
    assert len(kept(_seen("dog", 3), "single_object")["dog"]) == 3


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        (RIGHT, {"right of"}),
        (LEFT, {"left of"}),
        (TOP, {"above"}),
        (BOTTOM, {"below"}),
        (MIDDLE, set()),
        ((43.0, 40.0, 63.0, 60.0), set()),  # 3 off: within a tenth of 20 + 20
        ((44.0, 40.0, 64.0, 60.0), set()),  # 4 off: exactly that
        ((47.0, 40.0, 67.0, 60.0), set()),  # 7 off: 3 are left, less than half of 7
        ((33.0, 40.0, 53.0, 60.0), set()),
        ((40.0, 33.0, 60.0, 53.0), set()),
        ((40.0, 47.0, 60.0, 67.0), set()),
        ((48.5, 40.0, 68.5, 60.0), {"right of"}),  # 8.5 off: 4.5 are left, more than half
        ((80.0, 80.0, 100.0, 100.0), {"right of", "below"}),  # diagonal: 36 / 56.6 each
        ((80.0, 0.0, 100.0, 20.0), {"right of", "above"}),
        ((60.0, 40.0, 140.0, 60.0), {"right of"}),  # large: 50 off, 10 are taken
    ],
)
def test_relations(box: tuple[float, ...], expected: set[str]) -> None:
    assert relations(box, MIDDLE) == expected


def test_only_colors_that_matter_are_looked_at() -> None:
    metadata = {
        "tag": "color_attr",
        "include": [{"class": "dog", "count": 1, "color": "red"}, {"class": "cat", "count": 1}],
    }
    sure, doubtful = _seen("dog"), _seen("dog", confidence=0.5)
    assert needs_color(doubtful + sure + _seen("cat"), metadata) == sure
    assert needs_color(_seen("cat"), metadata) == []
    twins = _seen("car", 2)
    wanted = needs_color(twins, {"tag": "colors", "include": [{"class": "car", "count": 2, "color": "red"}]})
    assert {id(one) for one in wanted} == {id(one) for one in twins}  # equal, and yet two
    with pytest.raises(ValueError, match="nobody has looked"):
        score_image(sure, metadata, "graded")


def _changed(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "tag": "position",
        "include": [
            {"class": "dog", "count": 1, "color": "red"},
            {"class": "cat", "count": 2, "position": ["left of", 0]},
        ],
        "exclude": [{"class": "dog", "count": 2}],
    }
    return {key: value for key, value in (good | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tag": "position_2"}, "did you mean 'position'"),
        ({"tag": None}, "tag is None"),
        ({"include": None}, "include is None"),
        ({"include": []}, r"include is \[\]"),
        ({"include": {"class": "dog"}}, "include is"),
        ({"exclude": {"class": "dog"}}, "exclude is"),
        ({"include": ["dog"]}, r"include\[0\] is 'dog'"),
        ({"include": [{"class": "dog"}]}, r"include\[0\]\.count is None"),
        ({"include": [{"class": "dog", "count": True}]}, "count is True"),
        ({"include": [{"class": "dog", "count": 1.5}]}, r"count is 1\.5"),
        ({"include": [{"class": "dog", "count": 0}]}, "count is 0"),
        ({"include": [{"class": "dog", "count": 1, "size": 2}]}, "unknown key 'size'"),
        ({"include": [{"class": "dgo", "count": 1}]}, "'dgo': did you mean 'dog'"),
        ({"include": [{"class": 7, "count": 1}]}, "class is 7"),
        ({"include": [{"class": "mouse", "count": 1}]}, "write 'computer mouse'"),
        ({"include": [{"class": "dog", "count": 1, "color": "grey"}]}, "color is 'grey'"),
        ({"include": [{"class": "dog", "count": 1, "color": ["red"]}]}, "color is"),
        ({"exclude": [{"class": "dog", "count": 1, "color": "red"}]}, r"exclude\[0\] has the unknown key"),
        ({"include": [{"class": "dog", "count": 1, "position": ["left of", 0]}]}, "points to clause 0"),
        ({"include": [{"class": "dog", "count": 1, "position": "left of"}]}, "position is 'left of'"),
        ({"exlude": []}, "unknown key 'exlude': did you mean 'exclude'"),
    ],
)
def test_bad_metadata_is_named(changes: dict[str, Any], problem: str) -> None:
    check_metadata(_changed())
    with pytest.raises(BadInputError, match=problem):
        check_metadata(_changed(**changes))


@pytest.mark.parametrize("position", [["inside", 0], ["left of", 1], ["left of", -1], ["left of", True]])
def test_a_position_names_a_relation_and_an_earlier_clause(position: list[Any]) -> None:
    second = {"class": "cat", "count": 1, "position": position}
    with pytest.raises(BadInputError, match=r"include\[1\]\.position"):
        check_metadata(_changed(include=[{"class": "dog", "count": 1}, second]))


def test_scoring_and_checking_need_no_torch() -> None:
    program = (
        "import sys, spotlight_core.rewards.geneval; print({'torch', 'transformers'} & set(sys.modules))"
    )
    root = Path(geneval.__file__).parents[2]
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "set()\n"


def test_the_words() -> None:
    assert len(CLASSES) == len(set(CLASSES)) == 80
    assert len(COLORS) == 10
    assert set(OTHER_SPELLINGS.values()) <= set(CLASSES)
    assert not set(OTHER_SPELLINGS) & set(CLASSES)


def test_what_is_beside_belongs_to_other_rewards() -> None:
    check_metadata(_changed(prompt="a photo", style="oil"))


def test_the_reader_names_file_and_line(tmp_path: Path) -> None:
    rows = [_changed(prompt="a"), _changed(prompt="b", tag="none")]
    file = tmp_path / "test_metadata.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(BadInputError, match=r"test_metadata\.jsonl:2: tag is 'none'"):
        read_rows(file, [lambda row: check_metadata(row.metadata)])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public GenEval prompts are not on this machine")
def test_the_public_prompts_pass_and_are_spelled_alike() -> None:
    seen: set[str] = set()

    def check(row: PromptRow) -> None:
        check_metadata(row.metadata)
        seen.update(clause["class"] for clause in row.metadata["include"])

    rows = read_rows(SHARED / "test_metadata.jsonl", [check])
    assert len(rows) == 2212
    assert seen == set(CLASSES)
