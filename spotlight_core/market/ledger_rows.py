"""The ledger as rows: one for every change of what a node does, with its time and money so far."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, fields

from spotlight_core.market.billing import NodeBill, Piece, gpu_seconds
from spotlight_core.market.ledger import CostLedger

ABSENT, GONE, NOW = "absent", "gone", "now"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """A node's life goes from one state to another at ``at`` (seconds on the coordinator's clock).

    A state is what its GPUs do: one word where all do the same, ``2 rollout + 1 idle`` where not.  A
    life begins from ``absent`` and ends in ``gone``, or in ``now`` while it is billed.  GPU-seconds and
    dollars are those of this life until then.
    """

    at: float
    node: str
    incarnation: int
    pool: str
    from_state: str
    to_state: str
    useful_gpu_seconds: float
    idle_gpu_seconds: float
    lost_gpu_seconds: float
    usd: float


def ledger_rows(ledger: CostLedger, now: float) -> Iterator[LedgerRow]:
    """Every state change up to ``now``, in the order of time; equal times by node."""
    lives = [
        list(_life(bill, pieces, ledger.prices.usd_per_hour(bill.pool) / 3600.0, now))
        for bill, pieces in ledger.lives(now)
    ]
    return heapq.merge(*lives, key=lambda row: (row.at, row.node, row.incarnation))


def csv_lines(rows: Iterable[LedgerRow]) -> Iterator[str]:
    """The rows as CSV, its head first, without line ends.  Names of nodes and pools hold no comma."""
    yield ",".join(field.name for field in fields(LedgerRow))
    for row in rows:
        yield ",".join(repr(value) if isinstance(value, float) else str(value) for value in astuple(row))


def _state(piece: Piece, gpus: int) -> str:
    """What the GPUs of a node do; where more is claimed than there is, who began first comes first."""
    doing: Counter[str] = Counter()
    free = gpus
    for span in piece.spans:
        taken = min(free, span.ranks)
        free -= taken
        doing[span.activity] += taken
    doing["training" if piece.training else "idle"] += free
    claimed = [(name, count) for name, count in doing.items() if count]
    if len(claimed) == 1:
        return claimed[0][0]
    return " + ".join(f"{count} {name}" for name, count in sorted(claimed))


def _life(bill: NodeBill, pieces: list[Piece], usd_per_second: float, now: float) -> Iterator[LedgerRow]:
    parts: dict[str, list[float]] = {"useful": [], "idle": [], "lost": []}

    def row(at: float, before: str, after: str) -> LedgerRow:
        sums = {name: math.fsum(values) for name, values in parts.items()}
        return LedgerRow(
            at=at,
            node=bill.node,
            incarnation=bill.incarnation,
            pool=bill.pool,
            from_state=before,
            to_state=after,
            useful_gpu_seconds=sums["useful"],
            idle_gpu_seconds=sums["idle"],
            lost_gpu_seconds=sums["lost"],
            usd=usd_per_second * bill.gpus * (at - bill.started_at),
        )

    state = ABSENT
    for piece in pieces:
        following = _state(piece, bill.gpus)
        if following != state:
            yield row(piece.start, state, following)
            state = following
        for name, seconds in gpu_seconds(bill, iter([piece])).items():
            parts[name] += seconds
    if state != ABSENT:
        yield row(bill.end(now), state, GONE if bill.stopped_at is not None else NOW)
