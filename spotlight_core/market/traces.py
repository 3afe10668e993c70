"""When spot nodes come and go: traces by the clock, and our own by a run's progress.

``read_trace`` tells the formats apart by their content:

- Bamboo CSV, ``milliseconds,add|remove,node``
- a count by date and time, ``2021-12-11, 11:11:30, 55``
- SkyPilot JSON, ``{"metadata": {"gap_seconds": 150}, "data": [0, 1, ...]}``, a count per interval
- Parcae JSON lines, ``[milliseconds, "add"|"remove"|"no-op", {"nodes": [...]}]``
- progress-keyed JSON lines, see ``market.progress``

Public files are messy.  What has one plain meaning is repaired and said: rows out of order are
sorted, repeated rows dropped.  Anything else is refused with its line.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spotlight_core.errors import BadInputError
from spotlight_core.market.progress import ProgressTrace, read_progress

FORMATS = (
    "use milliseconds,add|remove,node or date,time,count rows, SkyPilot JSON, Parcae JSON lines, "
    "or progress-keyed JSON lines"
)
Change = Literal["add", "remove"]


class ClockEvent(NamedTuple):
    """A node of the trace came or went ``at_seconds`` after the trace's beginning."""

    at_seconds: float
    change: Change
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTrace:
    """Availability by the clock, in order; ``repairs`` says what was wrong with the file."""

    events: tuple[ClockEvent, ...]
    repairs: tuple[str, ...] = ()


class SlotEvent(NamedTuple):
    """The fleet's spot slot ``slot`` gets a node, or its node gets its notice."""

    at_seconds: float
    slot: int
    change: Literal["join", "notice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    line: int
    at_seconds: float
    change: Change
    node: str


def refuse(path: Path, line: int | str, problem: str, remedy: str = FORMATS) -> BadInputError:
    """The error for one place of a file."""
    return BadInputError(f"{path}:{line}: {problem}", remedy)


def read_trace(path: Path) -> ClockTrace | ProgressTrace:
    """Read a trace in any of the formats above.

    Raises:
        BadInputError: no such file, no known format, or a line that cannot be understood (names it).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInputError(f"cannot read trace {path}", f"check the path ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"trace {path} is not UTF-8 (byte {error.start})", FORMATS) from error
    lines = [
        (number, line.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise BadInputError(f"trace {path} is empty", FORMATS)
    first = lines[0][1]
    if first.startswith("{"):
        whole = _json_object(text)
        if whole is not None and ("data" in whole or "metadata" in whole):
            return _counts(path, list(_skypilot(path, whole)))
        return read_progress(path, lines)
    if first.startswith("["):
        return _adds_and_removes(path, [row for item in lines for row in _parcae(path, *item)])
    if len(first.split(",")) == 3 and first.split(",")[1].strip() in ("add", "remove"):
        return _adds_and_removes(path, [_bamboo(path, *item) for item in lines])
    return _counts(path, [_dated_count(path, *item) for item in lines])


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        whole = json.loads(text)
    except ValueError:
        return None
    return whole if isinstance(whole, dict) else None


def _milliseconds(path: Path, line: int, value: Any) -> float:
    try:
        milliseconds = int(value)
    except (TypeError, ValueError):
        milliseconds = -1
    if milliseconds < 0 or isinstance(value, bool):
        raise refuse(path, line, f"{value!r} is not a time in milliseconds", "give a whole number, 0 or more")
    return milliseconds / 1000.0


def _bamboo(path: Path, line: int, text: str) -> _Row:
    fields = [field.strip() for field in text.split(",")]
    if len(fields) != 3 or not fields[2]:
        raise refuse(path, line, f"{text!r} is not milliseconds,add|remove,node", "mend or remove the line")
    at_seconds, change, node = _milliseconds(path, line, fields[0]), fields[1], fields[2]
    if change not in ("add", "remove"):
        raise refuse(path, line, f"{change!r} is neither add nor remove", "mend or remove the line")
    return _Row(line=line, at_seconds=at_seconds, change="add" if change == "add" else "remove", node=node)


def _parcae(path: Path, line: int, text: str) -> list[_Row]:
    try:
        milliseconds, change, detail = json.loads(text)
        nodes = detail["nodes"]
        known = change in ("add", "remove", "no-op") and all(isinstance(node, str) and node for node in nodes)
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        problem = f'{text!r} is not [milliseconds, "add"|"remove"|"no-op", {{"nodes": [names]}}]'
        raise refuse(path, line, problem, "mend or remove the line")
    at_seconds = _milliseconds(path, line, milliseconds)
    if change == "no-op":
        return []
    return [_Row(line=line, at_seconds=at_seconds, change=change, node=node) for node in nodes]


def _dated_count(path: Path, line: int, text: str) -> tuple[int, float, int]:
    fields = [field.strip() for field in text.split(",")]
    try:
        date, time, count = fields
        at = datetime.strptime(f"{date} {time}", "%Y-%m-%d %H:%M:%S")
        nodes = int(count)
    except ValueError:
        raise refuse(path, line, f"{text!r} is no row of a known trace format") from None
    if nodes < 0:
        raise refuse(path, line, f"{nodes} nodes", "give a count of 0 or more")
    # Differences only are used, so the zone does not matter, and UTC has no hour twice.
    return line, (at - datetime(1970, 1, 1)).total_seconds(), nodes


def _skypilot(path: Path, whole: dict[str, Any]) -> Iterator[tuple[int, float, int]]:
    metadata, data = whole.get("metadata"), whole.get("data")
    gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if not isinstance(gap, int | float) or isinstance(gap, bool) or not gap > 0:
        raise refuse(path, 1, f"metadata.gap_seconds is {gap!r}", "give the seconds between two counts")
    if not isinstance(data, list) or not data:
        raise refuse(path, 1, "data is not a list of counts", 'give "data": [count, count, ...]')
    for index, count in enumerate(data):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise refuse(path, f"data[{index}]", f"{count!r} is not a count of nodes", "give 0 or more")
        yield index + 1, index * float(gap), count


def _sorted(rows: list[Any], repairs: list[str], unit: str) -> list[Any]:
    """Rows by time, stably; the rows of one instant keep the file's order."""
    late = [after.line for before, after in pairwise(rows) if after.at_seconds < before.at_seconds]
    if late:
        repairs.append(f"{len(late)} {unit} out of order, sorted (first at line {late[0]})")
    return sorted(rows, key=lambda row: row.at_seconds)


def _adds_and_removes(path: Path, rows: list[_Row]) -> ClockTrace:
    repairs: list[str] = []
    present: set[str] = set()
    events: list[ClockEvent] = []
    seen: set[tuple[float, str, str]] = set()
    repeated: list[int] = []
    idle: list[str] = []
    for row in _sorted(rows, repairs, "rows"):
        event = (row.at_seconds, row.change, row.node)
        if event in seen:
            repeated.append(row.line)
        elif (row.change == "add") == (row.node in present):
            idle.append(f"line {row.line}: {row.change} {row.node}")
        else:
            present ^= {row.node}
            events.append(ClockEvent(row.at_seconds, row.change, row.node))
        seen.add(event)
    if repeated:
        repairs.append(f"{len(repeated)} repeated rows dropped (first at line {repeated[0]})")
    if idle:
        repairs.append(f"{len(idle)} rows that change nothing dropped (first at {idle[0]})")
    return _clock_trace(path, events, repairs)


class _Count(NamedTuple):
    line: int
    at_seconds: float
    nodes: int


def _counts(path: Path, rows: Iterable[tuple[int, float, int]]) -> ClockTrace:
    """Turn counts into named nodes: the youngest come last, the oldest go first.

    First-in first-out, since with the youngest going first the fleet's few slots, filled from the
    first nodes, would see no preemption until almost all nodes are gone.
    """
    repairs: list[str] = []
    ordered = _sorted([_Count(*row) for row in rows], repairs, "counts")
    events: list[ClockEvent] = []
    repeated: list[int] = []
    oldest = youngest = 0
    last: tuple[float, int] | None = None
    for row in ordered:
        if (row.at_seconds, row.nodes) == last:
            repeated.append(row.line)
        last = (row.at_seconds, row.nodes)
        at_seconds = row.at_seconds - ordered[0].at_seconds
        while youngest - oldest < row.nodes:
            events.append(ClockEvent(at_seconds, "add", f"node-{youngest}"))
            youngest += 1
        while youngest - oldest > row.nodes:
            events.append(ClockEvent(at_seconds, "remove", f"node-{oldest}"))
            oldest += 1
    if repeated:
        repairs.append(f"{len(repeated)} repeated counts dropped (first at line {repeated[0]})")
    return _clock_trace(path, events, repairs)


def _clock_trace(path: Path, events: list[ClockEvent], repairs: list[str]) -> ClockTrace:
    if not events:
        raise BadInputError(f"no node ever joins in trace {path}", "give a trace with at least one node")
    return ClockTrace(events=tuple(events), repairs=tuple(repairs))


def slots(trace: ClockTrace, count: int, speedup: float = 1.0) -> list[SlotEvent]:
    """Play a trace of many nodes on the fleet's ``count`` spot slots.

    A slot holds the first node present that no other slot holds.  When its node goes, it gets a
    notice, and at the same instant another unheld node if there is one (a preemption and a return);
    else it stays empty until one comes.  ``speedup`` trace seconds pass in one second of the result.
    """
    present: dict[str, None] = {}
    holders: list[str | None] = [None] * count
    result: list[SlotEvent] = []
    index = 0
    while index < len(trace.events):
        instant = trace.events[index].at_seconds
        gone: set[str] = set()
        # All changes of an instant first: a node that goes with it must not fill a slot.
        while index < len(trace.events) and trace.events[index].at_seconds == instant:
            event = trace.events[index]
            if event.change == "add":
                present[event.node] = None
            else:
                present.pop(event.node, None)
                gone.add(event.node)
            index += 1
        at_seconds = instant / speedup
        for slot, node in enumerate(holders):
            if node in gone:
                holders[slot] = None
                result.append(SlotEvent(at_seconds, slot, "notice"))
        free = iter([node for node in present if node not in holders])
        for slot, node in enumerate(holders):
            if node is None and (holder := next(free, None)) is not None:
                holders[slot] = holder
                result.append(SlotEvent(at_seconds, slot, "join"))
    return result
