"""Synthetic markets have the rates that were asked for, and are read back as they were made."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight_core.errors import BadInputError
from spotlight_core.market.generator import MarketModel, bamboo_csv, generated_trace
from spotlight_core.market.trace_summary import TraceSummary, summarised
from spotlight_core.market.traces import ClockEvent, ClockTrace, read_trace

MODEL = MarketModel(nodes=40, hours=500.0, mean_life_minutes=120.0, mean_away_minutes=40.0)


def told(model: MarketModel, seed: int = 0) -> TraceSummary:
    summary = summarised(generated_trace(model, seed))
    assert isinstance(summary, TraceSummary)
    return summary


models = st.builds(
    MarketModel,
    nodes=st.integers(1, 12),
    hours=st.floats(0.5, 30),
    mean_life_minutes=st.floats(0.05, 300),
    mean_away_minutes=st.floats(0.05, 300),
    storms_per_day=st.floats(0, 50),
    storm_fraction=st.floats(0, 1),
)


@settings(max_examples=60, deadline=None)
@given(model=models, seed=st.integers(0, 2**40))
def test_a_trace_is_read_back_as_it_was_made(
    model: MarketModel, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    try:
        trace = generated_trace(model, seed)
    except BadInputError:
        return  # no machine was ever there
    path = tmp_path_factory.mktemp("traces") / "trace.csv"
    path.write_text(bamboo_csv(trace, model, seed), encoding="utf-8")
    assert read_trace(path) == trace


def test_equal_seeds_give_equal_traces_and_other_seeds_others() -> None:
    assert generated_trace(MODEL, 5) == generated_trace(MODEL, 5)
    assert generated_trace(MODEL, 5) != generated_trace(MODEL, 6)


def test_the_first_rows_of_a_seed_are_pinned() -> None:
    model = MarketModel(
        nodes=2,
        hours=24.0,
        mean_life_minutes=60.0,
        mean_away_minutes=60.0,
        storms_per_day=2.0,
        storm_fraction=0.5,
    )
    lines = bamboo_csv(generated_trace(model, 1), model, 1).splitlines()
    assert lines[0].startswith("# Synthetic spot market, seed 1: nodes=2, hours=24, mean_life_minutes=60,")
    assert lines[1:4] == ["3017262,add,node-1-0", "3731239,remove,node-1-0", "4171042,add,node-0-0"]


def test_rates_are_those_of_the_parameters() -> None:
    """Some 8,000 lives: means are within three standard errors, which is 4 %."""
    summary = told(MODEL)
    assert summary.preemptions_per_node_hour == pytest.approx(0.5, rel=0.04)
    assert summary.mean_nodes == pytest.approx(40 * 0.75, rel=0.02)
    assert MODEL.present_share == pytest.approx(0.75)


def test_storms_add_to_the_rate_and_are_seen() -> None:
    stormy = MarketModel(
        nodes=40,
        hours=2000.0,
        mean_life_minutes=600.0,
        mean_away_minutes=20.0,
        storms_per_day=3.0,
        storm_fraction=0.8,
    )
    summary = told(stormy)
    assert stormy.preemptions_per_node_hour == pytest.approx(0.2)
    assert summary.preemptions_per_node_hour == pytest.approx(0.2, rel=0.1)
    assert summary.storms == pytest.approx(250, rel=0.2)
    calm = told(MarketModel(nodes=40, hours=2000.0, mean_life_minutes=600.0, mean_away_minutes=20.0))
    assert calm.storms == 0


def test_impossible_markets_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"storm_fraction = 1\.5"):
        MarketModel(nodes=1, hours=1, mean_life_minutes=1, mean_away_minutes=1, storm_fraction=1.5)
    with pytest.raises(BadInputError, match="hours = 0"):
        MarketModel(nodes=1, hours=0, mean_life_minutes=1, mean_away_minutes=1)
    with pytest.raises(BadInputError, match=r"no machine is there within 0\.01 hours"):
        generated_trace(MarketModel(nodes=1, hours=0.01, mean_life_minutes=1, mean_away_minutes=1e9), 0)


@pytest.mark.parametrize("change", [{"storms_per_day": 1e9}, {"mean_life_minutes": 0.01, "hours": 8784.0}])
def test_markets_that_would_take_for_ever_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(BadInputError, match="events: ask for at most"):
        replace(MODEL, **change)


def test_a_summary_by_hand() -> None:
    rows = [(0.0, "add", "a"), (0.0, "add", "b"), (0.0, "add", "c"), (1800.0, "remove", "a")]
    rows += [(1830.0, "remove", "b"), (1860.0, "remove", "c"), (3600.0, "add", "d")]
    summary = summarised(ClockTrace(events=tuple(ClockEvent(*row) for row in rows), repairs=("x",)))
    assert isinstance(summary, TraceSummary)
    assert (summary.hours, summary.nodes, summary.preemptions, summary.storms) == (1.0, 4, 3, 1)
    assert (summary.least_nodes, summary.most_nodes) == (0, 3)
    assert summary.mean_nodes == pytest.approx((3 * 1800 + 2 * 30 + 30) / 3600)
    assert summary.preemptions_per_node_hour == pytest.approx(3 * 3600 / 5490)
    assert summary.nodes_over_time[0] == pytest.approx(3.0)
    assert summary.nodes_over_time[-1] == pytest.approx(0.0)
    assert summary.repairs == ("x",)


def test_a_trace_of_one_instant_has_no_rates(tmp_path: Path) -> None:
    summary = summarised(ClockTrace(events=(ClockEvent(0.0, "add", "a"),)))
    assert isinstance(summary, TraceSummary)
    assert (summary.mean_nodes, summary.preemptions_per_hour, summary.nodes_over_time) == (1.0, 0.0, ())
