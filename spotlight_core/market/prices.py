"""What a GPU-hour costs in each pool."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spotlight_core.errors import BadInputError


@dataclass(frozen=True)
class PriceBook:
    """USD per GPU-hour of each pool, fixed for the run.

    Raises:
        BadInputError: a price is negative or not finite.
    """

    prices: Mapping[str, float]

    def __post_init__(self) -> None:
        for pool, price in self.prices.items():
            if not 0 <= price < math.inf:
                raise BadInputError(f"prices.{pool} = {price}", "give USD per GPU-hour, 0 or more")
        # Copied and sealed: a caller's dict that changes later would re-price what is already billed.
        object.__setattr__(self, "prices", MappingProxyType(dict(self.prices)))

    def usd_per_hour(self, pool: str) -> float:
        """USD per hour of one GPU of ``pool``.

        Raises:
            BadInputError: no price for that pool.
        """
        try:
            return self.prices[pool]
        except KeyError:
            known = ", ".join(sorted(self.prices)) or "none"
            remedy = f"add prices.{pool} = USD per GPU-hour to the recipe"
            raise BadInputError(f"no price for pool {pool!r} (known: {known})", remedy) from None

    def digest(self) -> str:
        """Sha256 of the table, equal for equal prices in any order."""
        table = json.dumps(sorted((pool, float(price)) for pool, price in self.prices.items()))
        return hashlib.sha256(table.encode()).hexdigest()
