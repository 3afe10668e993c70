"""What the nodes' own logs say: the check on the ledger, which shares no arithmetic with it.

``nodes/<node>-<incarnation>.jsonl`` holds a start and a stop record, and a strike where a replayed
trace ended the node: the denoise step that it had reached, which nobody else could know.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from spotlight_core.errors import BadInputError
from spotlight_core.events import NodeKey
from spotlight_core.market.prices import PriceBook


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One life of a node by its own log, in wall-clock seconds.  ``stopped_at`` None: no stop was logged."""

    node: str
    incarnation: int
    pool: str
    gpus: int
    started_at: float
    stopped_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A lease's progress when a replayed kill ended its node: ``denoise_step`` was the next to do."""

    at: float
    lease: str
    request: str
    denoise_step: int


def _lines(node_logs: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every whole line with its place; one that a kill cut off says nothing."""
    for path in sorted(node_logs.glob("*.jsonl")):
        text = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(text, start=1):
            if not line.endswith("\n"):
                continue
            place = f"{path}:{number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise _no_record(place, error) from error
            if not isinstance(record, dict):
                raise _no_record(place, "not an object")
            yield place, record


def _no_record(place: str, why: object) -> BadInputError:
    return BadInputError(f"{place} is no record of a node ({why})", "restore the node's log")


def read_lives(node_logs: Path) -> list[NodeRecord]:
    """Every life that the logs tell of; where node and coordinator both logged a stop, the first counts.

    Raises:
        BadInputError: a line that is no start, stop or strike record, or a stop without a start.
    """
    started: dict[NodeKey, tuple[str, int, float]] = {}
    stopped: dict[NodeKey, float] = {}
    for place, record in _lines(node_logs):
        try:
            if record["event"] == "strike":
                continue
            key, at = (str(record["node"]), int(record["incarnation"])), float(record["at"])
            if record["event"] == "start":
                started[key] = (str(record["pool"]), int(record["gpus"]), at)
            elif record["event"] == "stop" and key in started:
                stopped[key] = min(at, stopped.get(key, at))
            else:
                raise ValueError(f"{record['event']!r} before any start")
        except (ValueError, KeyError, TypeError) as error:
            raise _no_record(place, error) from error
    return [
        NodeRecord(
            node=key[0],
            incarnation=key[1],
            pool=pool,
            gpus=gpus,
            started_at=at,
            stopped_at=None if key not in stopped else max(at, stopped[key]),
        )
        for key, (pool, gpus, at) in started.items()
    ]


def read_strikes(node_logs: Path) -> dict[str, Strike]:
    """The strikes that nodes logged, by lease.

    Raises:
        BadInputError: a line that is no record, or a strike that lacks a field.
    """
    found: dict[str, Strike] = {}
    for place, record in _lines(node_logs):
        if record.get("event") != "strike":
            continue
        try:
            strike = Strike(
                at=float(record["at"]),
                lease=str(record["lease"]),
                request=str(record["request"]),
                denoise_step=int(record["denoise_step"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise _no_record(place, error) from error
        found[strike.lease] = strike
    return found


def recompute_usd(node_logs: Path, prices: PriceBook, now: float) -> dict[str, float]:
    """Dollars by pool from the nodes' own start and stop logs: the check on ``CostLedger.usd``.

    Exact rationals, rounded once.  A node that logged no stop runs until ``now``.

    Raises:
        BadInputError: as ``read_lives``.
    """
    totals: dict[str, Fraction] = {}
    for life in read_lives(node_logs):
        end = now if life.stopped_at is None else life.stopped_at
        seconds = max(Fraction(0), Fraction(end) - Fraction(life.started_at))
        usd = Fraction(prices.usd_per_hour(life.pool)) * life.gpus * seconds / 3600
        totals[life.pool] = totals.get(life.pool, Fraction(0)) + usd
    return {pool: float(total) for pool, total in totals.items()}
