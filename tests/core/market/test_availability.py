"""What a progress-keyed trace holds back, and when it gives it back."""

from spotlight_core.market.availability import ProgressMarket
from spotlight_core.market.progress import ProgressPoint

KILL = ProgressPoint(iteration=2, phase="rollout", node="spot-0", event="kill", nth_request=1, denoise_step=3)
BACK = ProgressPoint(iteration=4, phase="rollout", node="spot-0", event="return")
EXPLORED = ProgressPoint(
    iteration=3, phase="explore", node="spot-1", event="notice", nth_request=1, denoise_step=3
)
AHEAD = ProgressPoint(iteration=5, phase="explore", node="spot-1", event="return")


def test_a_node_is_away_from_its_strike_to_the_phase_that_returns_it() -> None:
    market = ProgressMarket([AHEAD, BACK, EXPLORED, KILL])
    assert not market.away("spot-0")
    market.struck("spot-0")
    assert market.away("spot-0")
    assert not market.away("spot-1")
    assert market.returns("rollout", 3) == []
    assert market.returns("train", 4) == ["spot-1"]  # batch 5 is explored while iteration 4 trains
    assert market.returns("evaluate", 4) == []
    assert market.away("spot-0")
    assert market.returns("rollout", 4) == ["spot-0"]
    assert not market.away("spot-0")


def test_a_phase_has_its_place_in_the_trace_and_a_new_life_what_is_after_it() -> None:
    market = ProgressMarket([BACK, KILL, EXPLORED])
    assert market.since("rollout", 4) == (4, "rollout")
    assert market.since("train", 4) == (5, "explore")
    assert market.since("publish", 4) is None
    assert market.points_of("spot-0", None) == [KILL, BACK]
    assert market.points_of("spot-0", market.since("rollout", 4)) == [BACK]
    assert market.points_of("spot-1", market.since("train", 2)) == [EXPLORED]
