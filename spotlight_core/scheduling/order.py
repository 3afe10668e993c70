"""Which request goes next: small classes that see only what lets them choose.

Urgency by kind comes first under every order, then the order's key, then the number of arrival.
"""

import math
from typing import Final, Literal, Protocol

from spotlight_core.errors import BadInputError
from spotlight_core.types import GenerationRequest, Kind

OrderName = Literal["fifo", "shortest_remaining", "earliest_deadline"]
KINDS: Final[tuple[Kind, ...]] = ("rollout", "audit", "evaluate", "explore")  # the most urgent first
URGENCY: Final[dict[Kind, int]] = {kind: urgency for urgency, kind in enumerate(KINDS)}


class Order(Protocol):
    def key(self, request: GenerationRequest, from_denoise_step: int, deadline: float | None) -> float:
        """The smallest goes first; asked once whenever the request begins to wait.

        ``deadline``: seconds on the coordinator's clock, None when its client waits for ever.
        """
        ...


class FirstComeFirstServed:
    """By arrival alone."""

    def key(self, request: GenerationRequest, from_denoise_step: int, deadline: float | None) -> float:
        return 0.0


class ShortestRemainingFirst:
    """The fewest computed denoise steps left, each counted once for every row."""

    def key(self, request: GenerationRequest, from_denoise_step: int, deadline: float | None) -> float:
        fidelity = request.fidelity
        steps = fidelity.effective_steps
        if from_denoise_step:
            done = sum(1 for step in fidelity.reused_steps if step < from_denoise_step)
            steps -= from_denoise_step - done
        return float(steps * len(request.seeds))


class EarliestDeadlineFirst:
    """The one whose client gives up first; those whose clients never do come last."""

    def key(self, request: GenerationRequest, from_denoise_step: int, deadline: float | None) -> float:
        return math.inf if deadline is None else deadline


_ORDERS: dict[str, type[Order]] = {
    "fifo": FirstComeFirstServed,
    "shortest_remaining": ShortestRemainingFirst,
    "earliest_deadline": EarliestDeadlineFirst,
}


def build_order(name: str) -> Order:
    """The order that a recipe's ``fleet.order`` names.

    Raises:
        BadInputError: there is no such order.
    """
    if name not in _ORDERS:
        raise BadInputError(f"no order {name!r}", f"fleet.order is one of {', '.join(_ORDERS)}")
    return _ORDERS[name]()
