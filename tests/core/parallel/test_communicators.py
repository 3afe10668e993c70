"""One suite for both kinds of communicator, over real processes."""

from collections.abc import Iterator
from itertools import count

import pytest

from tests.core.parallel.ranks import Node, abort_soon, prepare, rounds, running_node, until_broken

KINDS = ("shm", "gloo")
SETS = ((0, 1), (3, 1), (2, 0, 1), (0, 1, 2, 3))
_generations = count(1)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node(ranks=4, slots=4) as node:
        yield node


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", SETS, ids=str)
def test_random_collectives_give_what_each_rank_can_work_out(
    node: Node, kind: str, ranks: tuple[int, ...]
) -> None:
    generation = next(_generations)
    assert node.ask(ranks, rounds, kind, ranks, generation, generation, 60) == [""] * len(ranks)
    # The same generation again, as the next request finds it.
    assert node.ask(ranks, rounds, kind, ranks, generation, 7, 5) == [""] * len(ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_alone_is_a_group(node: Node, kind: str) -> None:
    assert node.ask([2], rounds, kind, (2,), next(_generations), 3, 20) == [""]


@pytest.mark.parametrize("kind", KINDS)
def test_two_groups_of_one_generation_do_not_meet(node: Node, kind: str) -> None:
    generation = next(_generations)
    for ranks in ((0, 3), (1, 2)):
        for rank in ranks:
            node.ranks[rank].begin(rounds, kind, ranks, generation, rank in (0, 3), 40)
    assert [node.ranks[rank].answer() for rank in range(4)] == [""] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_from_another_thread_ends_every_ranks_call_and_the_next_generation_works(
    node: Node, kind: str
) -> None:
    generation, everyone = next(_generations), (0, 1, 2, 3)
    for rank in everyone[:3]:
        node.ranks[rank].begin(until_broken, kind, everyone, generation, 0)
    node.ranks[3].ask(abort_soon, kind, everyone, generation, 0.2)  # it never takes part itself
    assert [node.ranks[rank].answer()["lost"] for rank in everyone[:3]] == [()] * 3
    (own,) = node.ask([3], until_broken, kind, everyone, generation, 0)
    assert (own["rounds"], own["lost"]) == (0, ())
    assert node.ask(everyone, rounds, kind, everyone, next(_generations), 1, 10) == [""] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_owner_ends_one_group_of_a_generation_and_the_other_goes_on(node: Node, kind: str) -> None:
    generation = next(_generations)
    for rank in (0, 1):
        node.ranks[rank].begin(until_broken, kind, (0, 1), generation, 0)
    for rank in (2, 3):
        node.ranks[rank].begin(rounds, kind, (2, 3), generation, 0, 100)
    node.rendezvous.end_generation(generation, ranks=(0, 1))
    assert [node.ranks[rank].answer()["lost"] for rank in (0, 1)] == [(), ()]
    assert [node.ranks[rank].answer() for rank in (2, 3)] == ["", ""]
    assert node.ask([0], until_broken, kind, (0, 1), generation, 0)[0]["rounds"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_of_an_older_generation_is_refused(node: Node, kind: str) -> None:
    older, newer = next(_generations), next(_generations)
    assert node.ask([0, 1], rounds, kind, (0, 1), older, 0, 5) == ["", ""]
    assert node.ask([1, 2], rounds, kind, (1, 2), newer, 0, 5) == ["", ""]
    (late,) = node.ask([0], until_broken, kind, (0, 1), older, 0)
    assert late["lost"] == ()
    assert late["rounds"] == 0
    assert "older" in late["message"]


def test_groups_that_were_prepared_in_any_order_are_there(node: Node) -> None:
    sets = ((1, 0), (1, 2, 3), (0, 1, 2, 3))
    for rank in range(4):
        node.ranks[rank].ask(prepare, "gloo", sets if rank % 2 else sets[::-1])
    for ranks in sets:
        assert node.ask(ranks, rounds, "gloo", ranks, next(_generations), 0, 3) == [""] * len(ranks)
