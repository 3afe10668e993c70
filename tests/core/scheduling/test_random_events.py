"""Whatever happens: no request is lost, none ends twice, no group is given too much, no clock is read.

What is asserted of every event and command is in ``random_world``; a scheduler told the same says the
same, and one told the same at other times says the same at other times.
"""

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.core.scheduling.random_actions import ACTIONS, Action, bring_to_an_end
from tests.core.scheduling.random_world import RandomWorld

ORDERS = ("fifo", "shortest_remaining", "earliest_deadline")


class RandomEvents(RuleBasedStateMachine):
    """Hypothesis looks for the shortest story that breaks something."""

    @initialize(order=st.sampled_from(ORDERS), prefetch=st.booleans())
    def begin(self, order: str, prefetch: bool) -> None:
        self.world = RandomWorld(order=order, prefetch=prefetch)

    @rule(action=st.sampled_from(ACTIONS), choices=st.integers(0, 2**16))
    def happen(self, action: Action, choices: int) -> None:
        action(self.world, Random(choices))

    def teardown(self) -> None:
        bring_to_an_end(self.world)


TestRandomEvents = RandomEvents.TestCase
TestRandomEvents.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


def play(order: str, prefetch: bool, rng_seed: int, events: int) -> RandomWorld:
    """A story of its own for each thousand events or so, each brought to its end."""
    rng, done = Random(rng_seed), 0
    seen: dict[str, int] = {}
    while done < events:
        world = RandomWorld(order=order, prefetch=prefetch)
        while world.events < min(1_000, events - done):
            rng.choice(ACTIONS)(world, rng)
        bring_to_an_end(world)
        done += world.events
        for what, times in world.seen.items():
            seen[what] = seen.get(what, 0) + times
    world.seen.update(seen)
    return world


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("prefetch", [True, False])
def test_ten_thousand_random_events(order: str, prefetch: bool) -> None:
    world = play(order, prefetch, rng_seed=1, events=10_000 // 6 + 1)
    # The stories are worth their name.
    for what in (
        "done",
        "aborted",
        "cancelled",
        "resumed",
        "asked again",
        "Yield",
        "Abandon",
        "Release",
        "Load",
    ):
        assert world.seen[what] > 0, what
    assert (world.seen["queued"] > 0) == prefetch


@pytest.mark.soak
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_hundred_thousand_random_events(order: str, prefetch: bool) -> None:
    assert play(order, prefetch, rng_seed=2, events=100_000 // 6 + 1).seen["done"] > 1_000
