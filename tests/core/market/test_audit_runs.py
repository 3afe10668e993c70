"""Whole simulated runs under any preemptions pass the audit, with the nodes' logs as the journal has them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight_core import events as ev
from spotlight_core.events import NodeKey, Word
from spotlight_core.market.audit import audit
from spotlight_core.market.audit_promises import Evidence
from spotlight_core.market.node_records import NodeRecord
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
    seconds_left=st.just(5.0),
)
returns = st.builds(
    ProgressPoint,
    iteration=st.integers(1, 3),
    phase=st.just("rollout"),
    node=st.sampled_from(["spot-0", "spot-1"]),
    event=st.just("return"),
)


def logged(words: list[Word]) -> tuple[NodeRecord, ...]:
    """What the nodes would have logged."""
    stops: dict[NodeKey, float] = {}
    for word in words:
        if isinstance(word, ev.Lost):
            stops.setdefault((word.node, word.incarnation), word.stopped_at)
    return tuple(
        NodeRecord(
            node=word.node,
            incarnation=word.incarnation,
            pool=word.pool,
            gpus=word.gpus,
            started_at=word.started_at,
            stopped_at=stops.get((word.node, word.incarnation)),
        )
        for word in words
        if isinstance(word, ev.NodeJoined)
    )


@settings(max_examples=30, deadline=None)
@given(trace=st.lists(st.one_of(points, returns), max_size=8), commit_every_steps=st.sampled_from([0, 2]))
def test_any_preemptions_keep_every_promise(trace: list[ProgressPoint], commit_every_steps: int) -> None:
    executor = SimExecutor(COSTS, commit_every_steps=commit_every_steps)
    executor.replay(trace)
    words = virtual_run(small_recipe(), executor).words
    evidence = Evidence(
        finished=False, commit_every_steps=commit_every_steps, lives=logged(words), strikes={}
    )
    report = audit(words, evidence)
    assert [breach for verdict in report.verdicts for breach in verdict.breaches] == []
    assert report.verdicts[0].counted.endswith("requests")  # none is open
