"""The planner's layouts against all there are, and against the figures that it goes by."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_core.costs import CostModel, StepCost
from spotlight_core.costs.published import published
from spotlight_core.elastic.layout import Groups
from spotlight_core.elastic.planner import LayoutPlanner, RequestShape

QWEN = published("qwen_image_h20")
SMALL, LARGE = 32 * 32, 96 * 96


def planner(tokens: int, waiting: float, **more: float) -> LayoutPlanner:
    shape = RequestShape(tokens=tokens, rows=1, steps=20, min_degree=int(more.pop("min_degree", 1)))
    return LayoutPlanner(costs=QWEN, shapes=(shape,), waiting=waiting, **more)


def test_with_enough_requests_each_gpu_works_alone() -> None:
    assert planner(LARGE, float("inf")).groups((0, 1, 2, 3), ()) == ((0,), (1,), (2,), (3,))


def test_with_few_requests_gpus_share_one_where_that_is_quicker() -> None:
    assert planner(LARGE, 0.25).groups((0, 1, 2, 3), ()) == ((0, 1, 2, 3),)
    # At 512 x 512 more GPUs are slower, so the others stay free: four alone are as good as any.
    assert (0,) in planner(SMALL, 0.25).groups((0, 1, 2, 3), ((0,), (1,), (2,), (3,)))


def test_no_group_is_smaller_than_memory_allows() -> None:
    assert planner(LARGE, float("inf"), min_degree=2).groups(range(5), ()) == ((0, 1, 2), (3, 4))
    assert planner(LARGE, float("inf"), min_degree=2).groups((3,), ((2, 3),)) == ()


def test_a_small_gain_is_not_worth_a_change_that_does_not_last() -> None:
    costly = CostModel(
        denoise_step_fixed_seconds=0.0,
        denoise_step_per_row_seconds=1.0,
        launch_seconds=0.0,
        load_seconds=0.0,
        score_seconds_per_image=0.0,
        train_seconds=0.0,
        boot_seconds=0.0,
        regroup_seconds=10.0,
        sharded=(StepCost(tokens=1, degree=2, fixed_seconds=0.0, per_row_seconds=0.52),),
    )
    shape = RequestShape(tokens=1, rows=1, steps=10)
    pair: Groups = ((0, 1),)
    for stays, groups in ((30.0, pair), (3000.0, ((0,), (1,)))):
        policy = LayoutPlanner(costs=costly, shapes=(shape,), stay_seconds=stays)
        assert policy.groups((0, 1), pair) == groups


costs = st.tuples(st.floats(0.2, 1.2), st.floats(0.1, 1.2), st.floats(0.05, 1.2))


@given(costs, st.integers(1, 6), st.integers(1, 3), st.sampled_from([0.2, 0.5, 1.0, float("inf")]))
def test_no_layout_finishes_more(speeds: tuple[float, ...], ranks: int, least: int, waiting: float) -> None:
    model = CostModel(
        denoise_step_fixed_seconds=0.0,
        denoise_step_per_row_seconds=1.0,
        launch_seconds=0.0,
        load_seconds=0.0,
        score_seconds_per_image=0.0,
        train_seconds=0.0,
        boot_seconds=0.0,
        sharded=tuple(
            StepCost(tokens=1, degree=degree, fixed_seconds=0.0, per_row_seconds=seconds)
            for degree, seconds in zip((2, 3, 4), speeds, strict=True)
        ),
    )
    shape = RequestShape(tokens=1, rows=1, steps=3, min_degree=least)
    policy = LayoutPlanner(costs=model, shapes=(shape,), waiting=waiting)
    degrees = [len(group) for group in policy.groups(range(ranks), ())]
    found = policy.requests_per_second(degrees, ranks)
    every = [parts for parts in _multisets(ranks) if all(part >= least for part in parts)]
    used = max(map(sum, every))  # no GPU is left out that could work
    best = max(policy.requests_per_second(parts, ranks) for parts in every if sum(parts) == used)
    assert found == pytest.approx(best)


def test_two_sizes_are_weighed_by_their_shares() -> None:
    both = (
        RequestShape(tokens=SMALL, rows=1, steps=10, share=3.0),
        RequestShape(tokens=LARGE, rows=1, steps=20, share=1.0),
    )
    policy = LayoutPlanner(costs=QWEN, shapes=both)
    assert policy.request_seconds(2) == pytest.approx(0.75 * 10 * 0.161 + 0.25 * 20 * 0.880)


def test_more_ranks_than_layouts_are_planned_for_are_refused() -> None:
    with pytest.raises(ValueError, match="17 ranks on one node"):
        planner(SMALL, 1.0).groups(range(17), ())
    with pytest.raises(ValueError, match="needs the shapes"):
        LayoutPlanner(costs=QWEN, shapes=())


def _multisets(total: int, most: int = 99) -> list[tuple[int, ...]]:
    """Every way to group all of ``total`` or fewer ranks, leaving the others out."""
    found: list[tuple[int, ...]] = [()]
    for part in range(1, min(total, most) + 1):
        found += [(part, *rest) for rest in _multisets(total - part, part)]
    return found
