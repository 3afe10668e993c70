"""States that ranks hold, and who of a broken group's survivors leads on."""

from typing import Any

import numpy as np
import pytest

from spotlight_core.arrays import arrays_digest
from spotlight_core.errors import SpotlightError
from spotlight_core.events import SPGroup, Start
from spotlight_core.executor.groups import HELD, MOST_HELD, HeldStates
from spotlight_core.executor.messages import HeldState
from spotlight_core.executor.node_log import NodeLife
from spotlight_core.executor.places import Node, Place
from tests.core.scheduling.world import request


def state(value: float) -> dict[str, np.ndarray]:
    return {"x_BSC": np.full((1, 2, 3), value, np.float32)}


def test_a_state_is_taken_once_and_only_as_what_it_is() -> None:
    held = HeldStates()
    digest = held.keep("1.1", state(1.0))
    assert digest == arrays_digest(state(1.0))
    assert np.array_equal(held.take(f"{HELD}1.1", digest)["x_BSC"], state(1.0)["x_BSC"])
    with pytest.raises(SpotlightError, match=r"held:1\.1 is not held here: go on from the last commit"):
        held.take(f"{HELD}1.1", digest)


def test_a_survivor_that_was_a_step_behind_does_not_go_on_as_if_it_were_not() -> None:
    held = HeldStates()
    held.keep("1.1", state(1.0))
    with pytest.raises(SpotlightError, match="is not held here"):
        held.take(f"{HELD}1.1", arrays_digest(state(2.0)))


def test_what_was_given_up_does_not_pile_up() -> None:
    held = HeldStates()
    digests = [held.keep(f"1.{number}", state(number)) for number in range(MOST_HELD + 1)]
    with pytest.raises(SpotlightError):
        held.take(f"{HELD}1.0", digests[0])
    assert held.take(f"{HELD}1.{MOST_HELD}", digests[-1])


def node_of(ranks: int) -> Node:
    life = NodeLife(node="n", incarnation=1, pool="spot", gpus=ranks, started_at=0.0, stopped_at=None)
    places: dict[int, Any] = {rank: Place(rank=rank, actor=object()) for rank in range(ranks)}
    node = Node(life=life, scheduler=None, places=places)
    node.regroup(0, [(rank,) for rank in range(ranks)])
    return node


def group(*ranks: int, generation: int) -> SPGroup:
    return SPGroup(node="n", incarnation=1, ranks=ranks, generation=generation)


def test_groups_that_stay_keep_their_generation_and_others_are_no_more() -> None:
    node = node_of(3)
    node.regroup(1, [(0, 1), (2,)])
    assert [place.rank for place in node.members(group(0, 1, generation=1))] == [0, 1]
    assert node.members(group(2, generation=0))
    for former in (group(0, generation=0), group(2, generation=1), group(0, 1, generation=2)):
        assert node.members(former) == []
    node.places[1].actor = None
    assert node.members(group(0, 1, generation=1)) == [], "a rank without a process takes part in nothing"


def test_the_first_survivor_in_the_groups_order_leads_on() -> None:
    node = node_of(3)
    start = Start(group=group(2, 0, 1, generation=1), lease="1.1", request=request("a"))
    words = {rank: HeldState(next_denoise_step=rank, digest=f"d{rank}", broken=True) for rank in (1, 0)}
    node.held["1.1"] = dict(words)
    assert node.held_by_survivors(start) == words[0]
    assert node.held_by_survivors(start) is None
