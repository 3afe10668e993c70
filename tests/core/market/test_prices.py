import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.market.prices import PriceBook


def test_knows_its_pools_and_refuses_others() -> None:
    book = PriceBook({"reserved": 10.08, "spot": 2.87})
    assert book.usd_per_hour("spot") == 2.87
    with pytest.raises(
        BadInputError, match=r"no price for pool 'edge' \(known: reserved, spot\): add prices.edge"
    ):
        book.usd_per_hour("edge")


@pytest.mark.parametrize("price", [-0.01, float("inf"), float("nan")])
def test_refuses_prices_that_are_none(price: float) -> None:
    with pytest.raises(BadInputError, match=r"prices\.spot"):
        PriceBook({"spot": price})


def test_digest_names_the_table_and_nothing_else() -> None:
    book = PriceBook({"reserved": 10.0, "spot": 2.0})
    assert book.digest() == PriceBook({"spot": 2, "reserved": 10}).digest()
    assert book.digest() != PriceBook({"reserved": 10.0, "spot": 2.1}).digest()
    # printf '[["reserved", 10.0], ["spot", 2.0]]' | sha256sum
    assert book.digest() == ("70114736116149aabf542edea5b8a264094baa44ce292f81fe3e1817556c8aed")


def test_is_sealed_against_later_changes() -> None:
    table = {"spot": 2.0}
    book = PriceBook(table)
    table["spot"] = 99.0
    assert book.usd_per_hour("spot") == 2.0
    with pytest.raises(TypeError):
        book.prices["spot"] = 99.0  # type: ignore[index]
