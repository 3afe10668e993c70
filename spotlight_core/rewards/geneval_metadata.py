"""GenEval's metadata of a prompt: its words, and the check of a row before anything is scored."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from spotlight_core.errors import BadInputError

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
_KEYS = ("tag", "include", "exclude", "prompt")

# The 80 classes of COCO, spelled as the public prompt files do.
# fmt: off
CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow",
    "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee",
    "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard",
    "tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple",
    "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch",
    "potted plant", "bed", "dining table", "toilet", "tv", "laptop", "computer mouse", "tv remote",
    "computer keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book",
    "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on

# What detectors call them instead (COCO's own names, and those of the older VOC list).
OTHER_SPELLINGS = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
    "hair dryer": "hair drier",
}


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Whether GenEval can score a prompt with this metadata.

    ``{"tag", "include": [{"class", "count", "color"?, "position"?: [relation, earlier clause]}],
    "exclude"?: [{"class", "count"}]}``.  Other keys beside these belong to other rewards.

    Raises:
        BadInputError: an unknown tag, class, colour, relation or key of a clause; a value of another type.
    """
    _check_keys_beside(metadata)
    _one_of("tag", metadata.get("tag"), TAGS)
    include, exclude = metadata.get("include"), metadata.get("exclude", [])
    if not isinstance(include, list) or not include:
        raise BadInputError(
            f"include is {include!r}", 'list the objects: "include": [{"class": "dog", "count": 1}]'
        )
    if not isinstance(exclude, list):
        raise BadInputError(f"exclude is {exclude!r}", "make it a list of clauses")
    for number, clause in enumerate(include):
        _check_clause(clause, f"include[{number}]", ("class", "count", "color", "position"))
        if "color" in clause:
            _one_of(f"include[{number}].color", clause["color"], COLORS)
        if "position" in clause:
            _check_position(clause["position"], number)
    for number, clause in enumerate(exclude):
        _check_clause(clause, f"exclude[{number}]", ("class", "count"))


def _check_keys_beside(metadata: Mapping[str, Any]) -> None:
    """A key that is nearly one of ours is a slip of the pen: ignoring it would score something else."""
    for key in metadata:
        near = difflib.get_close_matches(str(key), _KEYS, n=1, cutoff=0.75)
        if near and key not in _KEYS:
            raise BadInputError(f"unknown key {key!r}", f"did you mean {near[0]!r}?")


def _check_clause(clause: Any, where: str, keys: tuple[str, ...]) -> None:
    if not isinstance(clause, dict):
        raise BadInputError(f"{where} is {clause!r}", 'write {"class": "dog", "count": 1}')
    for key in clause:
        if key not in keys:
            raise BadInputError(f"{where} has the unknown key {key!r}", f"its keys are {', '.join(keys)}")
    label = clause.get("class")
    if isinstance(label, str) and label in OTHER_SPELLINGS:
        raise BadInputError(f"{where}.class is {label!r}", f"write {OTHER_SPELLINGS[label]!r}")
    _one_of(f"{where}.class", label, CLASSES)
    count = clause.get("count")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadInputError(f"{where}.count is {count!r}", "give a whole number of at least 1")


def _check_position(position: Any, number: int) -> None:
    where = f"include[{number}].position"
    if not isinstance(position, list) or len(position) != 2:
        raise BadInputError(f"{where} is {position!r}", 'write it as in ["right of", 0]')
    relation, target = position
    _one_of(where, relation, RELATIONS)
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target < number:
        raise BadInputError(
            f"{where} points to clause {target!r}", "give the number of an earlier include clause, from 0"
        )


def _one_of(where: str, value: Any, known: Iterable[str]) -> None:
    words = list(known)
    if value in words:
        return
    near = difflib.get_close_matches(value, words, n=1) if isinstance(value, str) else []
    remedy = f"did you mean {near[0]!r}?" if near else f"it is one of {', '.join(words)}"
    raise BadInputError(f"{where} is {value!r}", remedy)
