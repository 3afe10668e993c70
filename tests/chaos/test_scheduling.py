"""Any preemption schedule: every request ends exactly once, and nothing hangs."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight_core.events import Committed, Lost, Notice, Settle, Start
from spotlight_core.market.progress import ProgressPoint
from spotlight_core.simulator.executor import SimExecutor
from tests.parity.conftest import COSTS, small_recipe, virtual_run

points = st.builds(
    ProgressPoint,
    iteration=st.integers(0, 3),
    phase=st.sampled_from(["rollout", "explore"]),
    node=st.sampled_from(["spot-0", "spot-1"]),
    event=st.sampled_from(["notice", "kill"]),
    nth_request=st.integers(1, 3),
    denoise_step=st.integers(1, 4),
    seconds_left=st.sampled_from([0.001, 5.0]),
)
returns = st.builds(
    ProgressPoint,
    iteration=st.integers(1, 3),
    phase=st.just("rollout"),
    node=st.sampled_from(["spot-0", "spot-1"]),
    event=st.just("return"),
)


@settings(max_examples=60, deadline=None)
@given(trace=st.lists(st.one_of(points, returns), max_size=8), commit_every_steps=st.sampled_from([0, 2]))
def test_every_request_is_settled_exactly_once(trace: list[ProgressPoint], commit_every_steps: int) -> None:
    executor = SimExecutor(COSTS, commit_every_steps=commit_every_steps)
    executor.replay(trace)
    run = virtual_run(small_recipe(), executor)

    assert len(run.reports) == 4
    started = {word.request.id for word in run.words if isinstance(word, Start)}
    settled = Counter(word.request for word in run.words if isinstance(word, Settle))
    assert set(settled.values()) == {1}
    assert settled.keys() == started
    assert all(word.outcome == "done" for word in run.words if isinstance(word, Settle))


@settings(max_examples=60, deadline=None)
@given(trace=st.lists(st.one_of(points, returns), max_size=8))
def test_a_start_goes_on_from_the_last_commit_and_never_to_a_node_that_is_leaving(
    trace: list[ProgressPoint],
) -> None:
    executor = SimExecutor(COSTS, commit_every_steps=2)
    executor.replay(trace)
    leaving: set[tuple[str, int]] = set()
    committed: dict[str, tuple[int, str]] = {}
    for word in virtual_run(small_recipe(), executor).words:
        match word:
            case Notice() | Lost():
                leaving.add((word.node, word.incarnation))
            case Committed():
                committed[word.request] = (word.next_denoise_step, word.ref)
            case Start():
                assert (word.group.node, word.group.incarnation) not in leaving
                step, ref = committed.get(word.request.id, (0, None))
                assert (word.from_denoise_step, word.state_ref) == (step, ref)
            case _:
                pass
