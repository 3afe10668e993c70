"""The simulated executor's own arithmetic and its dealings with leases."""

import dataclasses

import pytest

from spotlight_core.errors import FleetError
from spotlight_core.events import Alarm, Asleep, Finished, Settle, Start
from spotlight_core.scheduling.records import SchedulingRules
from spotlight_core.scheduling.requests import RequestScheduler
from spotlight_core.simulator.executor import SimExecutor
from spotlight_core.simulator.phases import run_in_virtual_time
from spotlight_core.types import Fidelity, GenerationRequest, PolicyVersion, Prompt
from tests.parity.conftest import COSTS

POLICY = PolicyVersion(label="old", number=1, digest="d")


def request(name: str, reused: tuple[int, ...] = ()) -> GenerationRequest:
    return GenerationRequest(
        id=f"0/rollout/{name}/0",
        kind="rollout",
        prompts=(Prompt(occurrence=name, text='A sign "12"'),),
        seeds=(0, 1),
        policy=POLICY,
        fidelity=Fidelity(denoise_steps=5, reused_steps=reused),
    )


def run(*requests: GenerationRequest, cancel: bool = False) -> tuple[list[object], SimExecutor]:
    """One reserved node serves the requests; with ``cancel`` the first is given up in mid-request."""
    executor = SimExecutor(COSTS)
    executor.join("reserved-0", "reserved")
    words: list[object] = []

    async def client() -> None:
        executor.change_phase("rollout", 0)
        submission = executor.submit(requests)
        if cancel:
            executor.call_at(0.53, lambda: executor.cancel([requests[0].id], "no longer wanted"))
        for occasion in submission.occasions.values():
            await occasion

    scheduler = RequestScheduler(SchedulingRules(lease_seconds=60, max_attempts=3, nodes_seconds=60))
    run_in_virtual_time(client(), scheduler, executor, words.append)
    return words, executor


def test_a_request_takes_boot_load_launch_and_its_computed_steps() -> None:
    _, executor = run(request("a"))
    assert executor.calendar.now == pytest.approx(0.5 + 0.02 + 0.001 + 5 * 0.004)
    _, executor = run(request("a", reused=(2, 4)))
    assert executor.calendar.now == pytest.approx(0.5 + 0.02 + 0.001 + 3 * 0.004)


def test_a_cancelled_request_frees_its_group_for_the_next() -> None:
    words, _ = run(request("a"), request("b"), cancel=True)
    assert [(w.request.split("/")[2], w.outcome) for w in words if isinstance(w, Settle)] == [
        ("a", "cancelled"),
        ("b", "done"),
    ]
    assert [w.request for w in words if isinstance(w, Finished)] == [request("b").id]
    assert len([w for w in words if isinstance(w, Start)]) == 2


def test_a_run_that_can_never_go_on_says_so_and_an_alarm_stops_it() -> None:
    executor = SimExecutor(COSTS)  # no node at all

    async def client() -> None:
        await executor.submit([request("a")]).occasions[request("a").id]

    scheduler = RequestScheduler(SchedulingRules(lease_seconds=60, max_attempts=3, nodes_seconds=60))
    with pytest.raises(FleetError, match="no node for 60 s, and 1 requests wait"):
        run_in_virtual_time(client(), scheduler, executor, lambda word: None)
    with pytest.raises(FleetError, match="two results differ"):
        executor.execute(Alarm(detail="two results differ"))


def test_a_node_that_slept_takes_its_weights_back_first() -> None:
    costs = dataclasses.replace(COSTS, sleep_seconds=0.3, wake_seconds=0.2)
    executor = SimExecutor(costs)
    executor.join("reserved-0", "reserved")
    words: list[object] = []

    async def client() -> None:
        executor.change_phase("train", 0)
        executor.call_at(1.0, lambda: executor.change_phase("rollout", 1))
        for name in ("a", "b"):
            await executor.submit([request(name)]).occasions[request(name).id]

    rules = SchedulingRules(lease_seconds=60, max_attempts=3, nodes_seconds=60, sleep=True)
    run_in_virtual_time(client(), RequestScheduler(rules), executor, words.append)
    assert [word.at for word in words if isinstance(word, Asleep)] == [pytest.approx(0.5 + 0.3)]
    assert executor.calendar.now == pytest.approx(1.0 + 0.2 + 0.02 + 2 * (0.001 + 5 * 0.004))
