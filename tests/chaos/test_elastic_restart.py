"""GPUs of a live node that a provider takes and gives back by a file: regrouped, or with a restart."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.config.fleet import FileNoticesConfig
from spotlight_core.events import Asleep, RankLost, RankReady, Regrouped, Settle
from tasks.report_throughput import changes
from tests.chaos.test_elastic import STEPS, after_starts, check_results, degrees
from tests.core.executor.rig import Rig, live_rig, make_requests, wait_until

pytestmark = pytest.mark.slow
REQUESTS = 30


@pytest.mark.parametrize("on_change", ["regroup", pytest.param("restart", marks=pytest.mark.soak)])
def test_a_gpu_that_goes_and_comes_back(tmp_path: Path, on_change: str) -> None:
    notice = tmp_path / "notice"
    notices = FileNoticesConfig(type="file", path=str(notice), poll_seconds=0.05)
    elastic = ElasticConfig(sp_degree=2, on_change=on_change, sleep=True)  # type: ignore[arg-type]
    with live_rig(
        tmp_path,
        on_change,
        steps=STEPS,
        elastic=elastic,
        spot_nodes=0,
        gpus_per_node=2,
        commit_every_steps=2,
        notices=notices,
    ) as rig:
        rig.begin_phase("rollout", 0)
        rig.wait(Regrouped, 1)

        def take() -> None:
            notice.write_text(json.dumps({"seconds_left": 20, "ranks": [1]}))
            assert wait_until(lambda: bool(rig.of_kind(RankLost)), 60)

        def give_back() -> None:
            notice.unlink()
            assert wait_until(lambda: rank_is_back(rig), 120)

        run(rig, 0, take)
        run(rig, 1, give_back)
        both = len(rig.words)
        run(rig, 2)
        assert degrees(rig, both) == {2}
        rig.begin_phase("train", 2)
        rig.wait(Asleep, 1)
        rig.begin_phase("rollout", 3)
        run(rig, 3)
    restarted = [word.rank for word in rig.of_kind(RankLost) if word.cause == "restarted"]
    assert restarted == ([0, 0] if on_change == "restart" else [])
    assert [word.rank for word in rig.of_kind(RankLost) if word.cause == "revoked"] == [1]
    assert {word.outcome for word in rig.of_kind(Settle)} == {"done"}
    found = changes(rig.words)
    stalled = sum(change.stalled_seconds for change in found)
    assert stalled > 3.0 if on_change == "restart" else stalled < 3.0


def rank_is_back(rig: Rig) -> bool:
    groups = rig.of_kind(Regrouped)[-1].groups
    return bool(rig.of_kind(RankReady)) and [sorted(ranks) for ranks in groups] == [[0, 1]]


def run(rig: Rig, iteration: int, act: Callable[[], None] = lambda: None) -> None:
    """All requests end, as one rank alone has them; ``act`` once three have begun."""
    requests = make_requests(rig.policy, iteration, REQUESTS, STEPS)
    check_results(rig, requests, rig.run_arrays(requests, after_starts(rig, 3, act)))
