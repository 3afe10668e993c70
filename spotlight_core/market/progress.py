"""Progress-keyed traces: preemptions that happen at the same place of a run on any machine.

One JSON object a line, ``#`` begins a comment line:

    {"iteration": 2, "phase": "rollout", "node": "spot-0", "event": "notice",
     "nth_request": 1, "denoise_step": 4, "seconds_left": 20}
    {"iteration": 4, "phase": "rollout", "node": "spot-0", "event": "return"}

A ``notice`` or a ``kill`` (no notice) strikes when the node's ``nth_request`` (from 1) of that phase
of that iteration reaches ``denoise_step``; a ``return`` happens when that phase begins.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from spotlight_core.errors import BadInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressPoint:
    """One event of a spot node.  ``seconds_left`` None means the recipe's grace."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    iteration: int
    phase: Literal["rollout", "explore"]
    node: str
    event: Literal["notice", "kill", "return"]
    nth_request: int | None = None
    denoise_step: int | None = None
    seconds_left: float | None = None

    @property
    def order(self) -> tuple[int, int, int, int, int]:
        """Sorts points as a run meets them: returns at a phase's beginning, then by progress."""
        strikes = self.event != "return"
        phase = int(self.phase == "explore")
        return self.iteration, phase, int(strikes), self.nth_request or 0, self.denoise_step or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressTrace:
    """Points in the order a run meets them; ``repairs`` says what was wrong with the file."""

    points: tuple[ProgressPoint, ...]
    repairs: tuple[str, ...] = ()


_POINT = TypeAdapter(ProgressPoint)


def _refuse(path: Path, line: int, problem: str, remedy: str) -> BadInputError:
    return BadInputError(f"{path}:{line}: {problem}", remedy)


def _point(path: Path, line: int, text: str) -> ProgressPoint:
    try:
        point = _POINT.validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"]) or "the line"
        raise _refuse(path, line, f"{key}: {fault['msg']}", "see the format in the shipped trace") from error
    if point.iteration < 0 or not point.node:
        raise _refuse(path, line, "iteration is negative or node is empty", "name a node and an iteration")
    progress = (point.nth_request, point.denoise_step)
    if point.event == "return":
        if progress != (None, None) or point.seconds_left is not None:
            remedy = "remove nth_request, denoise_step and seconds_left"
            raise _refuse(path, line, "a return happens when its phase begins", remedy)
        return point
    if None in progress or (point.nth_request or 0) < 1 or (point.denoise_step or 0) < 0:
        remedy = "give nth_request >= 1 and denoise_step >= 0"
        raise _refuse(path, line, f"when does the {point.event} strike?", remedy)
    if point.event == "kill" and point.seconds_left is not None:
        raise _refuse(path, line, "a kill gives no notice", "remove seconds_left, or make it a notice")
    if point.seconds_left is not None and not point.seconds_left > 0:
        raise _refuse(path, line, f"seconds_left = {point.seconds_left}", "give more than 0, or use a kill")
    return point


def read_progress(path: Path, lines: list[tuple[int, str]]) -> ProgressTrace:
    """The points of numbered, stripped, non-comment lines.

    Raises:
        BadInputError: a line is not a point, or a node strikes or returns twice in a row.
    """
    numbered = [(line, _point(path, line, text)) for line, text in lines]
    repairs: list[str] = []
    late = [line for (_, before), (line, after) in pairwise(numbered) if after.order < before.order]
    if late:
        repairs.append(f"{len(late)} lines out of order, sorted (first at line {late[0]})")
    unique: dict[ProgressPoint, int] = {}
    repeated = [line for line, point in numbered if unique.setdefault(point, line) != line]
    if repeated:
        repairs.append(f"{len(repeated)} repeated lines dropped (first at line {repeated[0]})")
    points = sorted(unique, key=lambda point: point.order)
    away: set[str] = set()
    for point in points:
        if (point.event == "return") != (point.node in away):
            state = "away" if point.node in away else "there"
            problem = f"{point.event} of {point.node} in iteration {point.iteration}, when it is {state}"
            remedy = "a node is there at first, then strikes and returns alternate"
            raise _refuse(path, unique[point], problem, remedy)
        away ^= {point.node}
    return ProgressTrace(points=tuple(points), repairs=tuple(repairs))
