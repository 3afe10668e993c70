"""GenEval: are the objects that a prompt names there, as many, of that colour and in that place?

Pure scoring of given detections (arXiv 2310.11513 and its public evaluator).  Thresholds, the order of
the checks and the test of a position are the evaluator's; ``graded`` is the score that is trained.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Score = Literal["graded", "strict_correct", "correct", "compat"]

DETECTION_CONFIDENCE = 0.3
COUNTING_CONFIDENCE = 0.9  # under the tag "counting"; a doubtful object is no object to count
MOST_PER_CLASS = 16
POSITION_THRESHOLD = 0.1  # of the two objects' sizes: overlap that an offset must exceed
# The evaluator suppresses boxes at an overlap of 1.0, which is never: there is no suppression here.


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One object: its class as COCO's prompts spell it, and its box in pixels.

    ``color`` is one of the ten colours, None where nobody has looked.
    """

    label: str
    confidence: float
    box_xyxy: tuple[float, float, float, float]
    color: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """One include clause on one image.

    ``colored`` counts the objects of the right colour, where a colour is asked and the count is right.
    ``place`` is None unless a position is asked and both count and colours are right.
    """

    count: int
    found: int
    counted: bool
    asks_more: bool
    colored: int | None
    place: Literal["right", "wrong", "no target"] | None

    @property
    def right(self) -> bool:
        colors = self.colored is None or self.colored == self.count
        return self.counted and colors and self.place in (None, "right")


def score_image(detections: Sequence[Detection], metadata: Mapping[str, Any], score: Score) -> float:
    """The score of one image whose objects are ``detections``; ``metadata`` as ``check_metadata`` wants.

    graded          mean over the terms of all include clauses, each at least 0: ``1 - |n - found| / n``;
                    with the right count a colour term ``1 - |n - #colour| / n`` and, with the right
                    colours, a position term 1 or 0; a wrong count adds one 0 in their place
    strict_correct  1 if every count is equal and colours and positions are right, nothing excluded
    correct         the official metric: counts may be larger, the n most certain objects are looked at
    compat          the graded score of a public trainer: terms may be negative, and a wrong position
                    counts as a 0 and a 1

    Raises:
        ValueError: an object whose colour matters has none.
    """
    objects = kept(detections, metadata["tag"])
    outcomes = list(_outcomes(objects, metadata["include"], exact=score != "correct"))
    if score in ("correct", "strict_correct"):
        return float(all(outcome.right for outcome in outcomes) and not _excluded(objects, metadata))
    terms = [term for outcome in outcomes for term in _terms(outcome, compat=score == "compat")]
    return sum(terms) / len(terms)


def kept(detections: Sequence[Detection], tag: str) -> dict[str, list[Detection]]:
    """The detections that count, by class, the most certain first: at most 16 above the threshold."""
    threshold = COUNTING_CONFIDENCE if tag == "counting" else DETECTION_CONFIDENCE
    objects: dict[str, list[Detection]] = {}
    for detection in sorted(detections, key=lambda detection: -detection.confidence):
        if detection.confidence > threshold:
            objects.setdefault(detection.label, []).append(detection)
    return {label: found[:MOST_PER_CLASS] for label, found in objects.items()}


def needs_color(detections: Sequence[Detection], metadata: Mapping[str, Any]) -> list[Detection]:
    """The detections whose colour a score of ``metadata`` looks at, under any of the scores."""
    objects = kept(detections, metadata["tag"])
    wanted: dict[int, Detection] = {}  # by identity: two detections may be equal, and have a colour each
    for clause in metadata["include"]:
        found = objects.get(clause["class"], [])[: clause["count"]]
        if "color" in clause and len(found) == clause["count"]:
            wanted |= {id(detection): detection for detection in found}
    return list(wanted.values())


def relations(box: Sequence[float], target: Sequence[float]) -> set[str]:
    """Where ``box`` lies seen from ``target`` (both xyxy): a subset of left of, right of, above, below.

    A tenth of both sizes is taken off the offset of the centres; a direction holds when what is left of
    it is more than half of the whole offset.
    """
    corners = np.array([box, target], dtype=np.float64).reshape(2, 2, 2)  # [object, corner, x or y]
    offset = corners[0].mean(axis=0) - corners[1].mean(axis=0)
    sizes = np.abs(corners[:, 1] - corners[:, 0]).sum(axis=0)
    clear = np.maximum(np.abs(offset) - POSITION_THRESHOLD * sizes, 0.0) * np.sign(offset)
    if np.all(np.abs(clear) < 1e-3):
        return set()
    right, down = clear / np.linalg.norm(offset)
    holds = {"left of": right < -0.5, "right of": right > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {relation for relation, true in holds.items() if true}


def _outcomes(
    objects: Mapping[str, list[Detection]], include: Sequence[Mapping[str, Any]], exact: bool
) -> Iterator[_Outcome]:
    matched: list[list[Detection] | None] = []  # of each clause so far; None where it failed
    for clause in include:
        count, found = clause["count"], objects.get(clause["class"], [])
        looked_at = found if exact else found[:count]
        counted = len(looked_at) == count
        colored = _colored(looked_at, clause["color"]) if counted and "color" in clause else None
        place = None
        if counted and colored in (None, count) and "position" in clause:
            relation, target = clause["position"]
            place = _place(looked_at, relation, matched[target])
        outcome = _Outcome(
            count=count,
            found=len(found),
            counted=counted,
            asks_more="color" in clause or "position" in clause,
            colored=colored,
            place=place,
        )
        matched.append(looked_at if outcome.right else None)
        yield outcome


def _colored(objects: Sequence[Detection], color: str) -> int:
    for detection in objects:
        if detection.color is None:
            raise ValueError(f"nobody has looked at the colour of {detection}")
    return sum(detection.color == color for detection in objects)


def _place(
    objects: Sequence[Detection], relation: str, targets: Sequence[Detection] | None
) -> Literal["right", "wrong", "no target"]:
    if targets is None:
        return "no target"
    everywhere = all(
        relation in relations(detection.box_xyxy, target.box_xyxy)
        for detection in objects
        for target in targets
    )
    return "right" if everywhere else "wrong"


def _terms(outcome: _Outcome, compat: bool) -> Iterator[float]:
    share = 1.0 - abs(outcome.count - outcome.found) / outcome.count
    yield share if compat else max(share, 0.0)
    if not outcome.counted:
        if outcome.asks_more:
            yield 0.0
        return
    if outcome.colored is not None:
        yield 1.0 - abs(outcome.count - outcome.colored) / outcome.count
    if outcome.place is not None:
        yield float(outcome.place == "right")
        if compat and outcome.place == "wrong":
            yield 1.0


def _excluded(objects: Mapping[str, list[Detection]], metadata: Mapping[str, Any]) -> bool:
    """Whether a class of an exclude clause is there as often as that clause says."""
    return any(
        len(objects.get(clause["class"], [])) >= clause["count"] for clause in metadata.get("exclude", ())
    )
