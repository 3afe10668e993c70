"""Two ranks that denoise together on a live node: one goes, one comes, one dies, and no request is lost."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from spotlight_core.arrays import Arrays
from spotlight_core.config.elastic import ElasticConfig
from spotlight_core.diffusion.engine import DenoiseEngine, Generated
from spotlight_core.diffusion.models import build_model
from spotlight_core.events import Committed, Failed, RankLost, RankReady, Regrouped, Start
from spotlight_core.parallel.table import GENERATION
from spotlight_core.types import GenerationRequest
from tests.core.executor.rig import Rig, live_rig, make_requests, wait_until

pytestmark = pytest.mark.slow
STEPS, REQUESTS = 8, 12
NODE = "reserved-0"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with live_rig(
        tmp_path_factory.mktemp("elastic"),
        "elastic",
        steps=STEPS,
        elastic=ElasticConfig(sp_degree=2, standby=True),
        spot_nodes=0,
        gpus_per_node=2,
        commit_every_steps=4,
    ) as rig:
        rig.begin_phase("rollout", 0)
        yield rig


def run(rig: Rig, iteration: int, meanwhile: Callable[[], None] = lambda: None) -> None:
    """All requests end, and with what one rank alone makes of them."""
    requests = make_requests(rig.policy, iteration, REQUESTS, STEPS)
    check_results(rig, requests, rig.run_arrays(requests, meanwhile))


def check_results(rig: Rig, requests: list[GenerationRequest], found: dict[str, Arrays]) -> None:
    """Each request has one result: what one rank alone makes of it."""
    assert found.keys() == {request.id for request in requests}
    engine = DenoiseEngine(build_model(rig.config.model, "rollout"), rig.config.sampler, rig.config.rng_seed)
    for request in requests:
        check(engine, request, found[request.id])


def check(engine: DenoiseEngine, request: GenerationRequest, arrays: Arrays) -> None:
    alone = engine.generate(request)
    assert isinstance(alone, Generated)
    assert np.abs(arrays["x0"] - alone.arrays["x0"]).max() < 1e-4 * max(1.0, np.abs(alone.arrays["x0"]).max())


def degrees(rig: Rig, since: int = 0) -> set[int]:
    return {word.group.degree for word in rig.words[since:] if isinstance(word, Start)}


def both_work_together(rig: Rig) -> None:
    assert wait_until(lambda: sorted(rig.of_kind(Regrouped)[-1].groups[0]) == [0, 1], 120.0)


def rank_process(rig: Rig, rank: int) -> psutil.Process:
    actor = rig.executor._nodes.known[NODE, 1].places[rank].actor
    pids = {process.pid: process for process in rig.actors(f"{NODE}-1", "DenoiseActor")}
    state = next(a for a in _ray_actors() if a["ActorID"] == actor._actor_id.hex())
    return pids[int(state["Pid"])]


def _ray_actors() -> list[dict[str, object]]:
    return list(ray.state.actors().values())  # type: ignore[attr-defined]


def after_starts(rig: Rig, count: int, act: Callable[[], None]) -> Callable[[], None]:
    """Do something in the middle of a run: once so many requests have begun."""
    before = len(rig.of_kind(Start))

    def meanwhile() -> None:
        assert wait_until(lambda: len(rig.of_kind(Start)) >= before + count, 60.0)
        time.sleep(0.02)
        act()

    return meanwhile


def test_two_ranks_denoise_a_request_together(rig: Rig) -> None:
    run(rig, 0)
    assert degrees(rig) == {2}


def test_a_rank_under_notice_goes_and_the_other_goes_on(rig: Rig) -> None:
    since = len(rig.words)
    run(rig, 1, after_starts(rig, 3, lambda: rig.executor.give_rank_notice(NODE, 1, (1,), 20.0)))
    words = rig.words[since:]
    assert degrees(rig, since) == {1, 2}
    (lost,) = (word for word in words if isinstance(word, RankLost))
    assert (lost.rank, lost.cause) == (1, "revoked")
    assert not [word for word in words if isinstance(word, Failed) and word.error != "abandoned"]
    held = [word for word in words if isinstance(word, Committed) and word.held]
    again = [word for word in words if isinstance(word, Start) and (word.state_ref or "").startswith("held:")]
    assert len(held) == len(again) == 1
    assert again[0].from_denoise_step == held[0].next_denoise_step > 0


def test_a_rank_that_comes_takes_part_at_the_next_step(rig: Rig) -> None:
    since = len(rig.words)
    run(rig, 2, after_starts(rig, 3, lambda: rig.executor.return_rank(NODE, 1, 1)))
    assert degrees(rig, since) == {1, 2}
    assert [word.groups for word in rig.words[since:] if isinstance(word, Regrouped)][-1] == ((0, 1),)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("hang", [False, True])
def test_a_member_that_dies_or_hangs_costs_a_step_at_most(rig: Rig, rank: int, hang: bool) -> None:
    both_work_together(rig)
    since = len(rig.words)
    process = rank_process(rig, rank)
    stop = process.suspend if hang else process.kill
    run(rig, 3 + rank + 2 * hang, after_starts(rig, 3, stop))
    assert rig.wait(RankReady, len(rig.of_kind(RankLost)))
    lost = [word for word in rig.words[since:] if isinstance(word, RankLost)]
    assert [word.rank for word in lost] == [rank]
    assert 2 in degrees(rig, since)


def test_a_group_that_breaks_though_nobody_is_lost_is_formed_anew(rig: Rig) -> None:
    both_work_together(rig)
    since = len(rig.words)
    scheduler = rig.executor._nodes.known[NODE, 1].scheduler

    def end_its_groups(owner: Any) -> None:
        rendezvous = owner._rendezvous
        rendezvous.end_generation(rendezvous.table.words[rendezvous.table.slot(0) + GENERATION])

    run(rig, 8, after_starts(rig, 3, lambda: ray.get(scheduler.__ray_call__.remote(end_its_groups))))
    assert [word.cause for word in rig.words[since:] if isinstance(word, RankLost)] == ["died"]


def test_afterwards_both_work_together_again(rig: Rig) -> None:
    both_work_together(rig)
    since = len(rig.words)
    run(rig, 9)
    assert degrees(rig, since) == {2}
