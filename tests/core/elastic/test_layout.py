"""Groups of a node's ranks: no rank left out that could work, and as little change as there can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_core.elastic.layout import FixedDegree, Groups, arranged, changed_groups


@pytest.mark.parametrize(
    ("degree", "least", "ranks", "degrees"),
    [
        (1, 1, 3, (1, 1, 1)),
        (2, 1, 5, (2, 2, 1)),
        (4, 1, 3, (3,)),
        (4, 2, 5, (3, 2)),
        (4, 3, 6, (3, 3)),
        (4, 3, 5, (4,)),
        (4, 4, 3, ()),
        (2, 2, 1, ()),
        (2, 1, 0, ()),
    ],
)
def test_the_degrees_of_a_node(degree: int, least: int, ranks: int, degrees: tuple[int, ...]) -> None:
    assert FixedDegree(degree, least).degrees(ranks) == degrees


@pytest.mark.parametrize(
    ("ranks", "current", "groups"),
    [
        ((0, 1, 2, 3), (), ((0, 1), (2, 3))),
        ((0, 2, 3), ((0, 1), (2, 3)), ((2, 3), (0,))),  # one is gone: the other group stays
        ((0, 1, 2, 3), ((2, 3), (0,)), ((2, 3), (0, 1))),  # back: who held the latents leads
        ((0, 1), ((1,), (0,)), ((1, 0),)),
        ((0, 3), ((0, 1), (2, 3)), ((0, 3),)),  # two halves join
        ((1, 2, 3), ((0, 1), (2,), (3,)), ((3,), (1, 2))),
    ],
)
def test_who_works_with_whom(ranks: tuple[int, ...], current: Groups, groups: Groups) -> None:
    assert FixedDegree(2).groups(ranks, current) == groups


layouts = st.integers(1, 8).flatmap(
    lambda gpus: st.tuples(
        st.integers(1, gpus),
        st.integers(1, gpus),
        st.sets(st.integers(0, gpus - 1)),
        st.permutations(range(gpus)),
        st.lists(st.integers(1, 4), max_size=8),
    )
)


@given(layouts)
def test_no_rank_twice_none_idle_in_vain_and_survivors_first(
    drawn: tuple[int, int, set[int], list[int], list[int]],
) -> None:
    one, other, there, order, sizes = drawn
    policy = FixedDegree(max(one, other), min(one, other))
    current = _cut(order, sizes)
    groups = policy.groups(sorted(there), current)
    members = [rank for group in groups for rank in group]
    assert len(members) == len(set(members))
    assert set(members) <= there
    assert all(policy.min_degree <= len(group) <= policy.degree for group in groups)
    assert len(members) == _most_usable(len(there), policy)
    for group in groups:
        held = {rank for former in current for rank in former}
        assert group[0] in held or not held & set(group), "who leads held a request's latents, if any did"
    assert policy.groups(sorted(there), groups) == groups, "a layout that is right stays"


def test_a_group_that_is_whole_and_wanted_stays_as_it_is() -> None:
    assert arranged((2, 2), (0, 1, 2, 3), ((3, 1), (0,), (2,))) == ((3, 1), (0, 2))


def test_the_difference_of_two_layouts() -> None:
    assert changed_groups(((0, 1), (2,)), ((2,), (0,), (1,))) == (((0, 1),), ((0,), (1,)))
    assert changed_groups(((0, 1),), ((1, 0),)) == (((0, 1),), ((1, 0),)), "another leader is another group"


def test_a_degree_below_its_least_is_refused() -> None:
    with pytest.raises(ValueError, match="degree 1 with at least 2"):
        FixedDegree(1, 2)


def _cut(order: list[int], sizes: list[int]) -> Groups:
    groups = []
    for size in sizes:
        if order:
            groups.append(tuple(order[:size]))
            order = order[size:]
    return tuple(groups)


def _most_usable(ranks: int, policy: FixedDegree) -> int:
    """By trying every sum of allowed degrees."""
    reachable = {0}
    for _ in range(ranks):
        steps = range(policy.min_degree, policy.degree + 1)
        reachable |= {total + step for total in reachable for step in steps if total + step <= ranks}
    return max(reachable)
