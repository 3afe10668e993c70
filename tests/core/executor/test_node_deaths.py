"""kill -9 of each process of a fleet, one at a time, and a node that is stopped: the work goes on.

Real processes of a real Ray cluster; the results are always those of a bare loop.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from spotlight_core.events import (
    Committed,
    Event,
    Finished,
    Lost,
    NodeJoined,
    RankLost,
    RankReady,
    SPGroup,
    Start,
    Started,
)
from spotlight_core.executor.processes import run_processes
from tests.core.executor.rig import Rig, expected_digests, live_rig, make_requests, wait_until

RUN = f"test-node-deaths-{os.getpid()}"
STEPS = 40
NODE = "spot-0-1"

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("deaths")
    with live_rig(folder, RUN, steps=STEPS, spot_nodes=1, gpus_per_node=2, node_lease_seconds=4.0) as rig:
        rig.begin_phase("rollout", 0)
        yield rig


def run_and(rig: Rig, iteration: int, act: Callable[[], None], count: int = 8) -> None:
    """Run requests, ``act`` when a group of the spot node has committed one; check every result."""
    rig.words.clear()
    requests = make_requests(rig.policy, iteration, count, STEPS)

    def when_committed() -> None:
        assert wait_until(lambda: bool(committed_on_spot(rig)), 60)
        act()

    assert rig.run(requests, when_committed) == expected_digests(rig, requests)
    assert sorted(finished.request for finished in rig.of_kind(Finished)) == sorted(
        request.id for request in requests
    )


def committed_on_spot(rig: Rig) -> list[Committed]:
    leases = {start.lease for start in rig.of_kind(Start) if start.group.node == "spot-0"}
    return [commit for commit in rig.of_kind(Committed) if commit.lease in leases]


def kill(pid: int) -> Callable[[], None]:
    return lambda: os.kill(pid, signal.SIGKILL)


def check_steps_lost(rig: Rig) -> None:
    """What was resumed went on at its last acknowledged commit."""
    acknowledged: dict[str, int] = {}
    for word in rig.words:
        if isinstance(word, Committed):
            acknowledged[word.request] = word.next_denoise_step
        elif isinstance(word, Start):
            assert word.from_denoise_step == acknowledged.get(word.request.id, 0)


def seconds_to_begin(rig: Rig, group: SPGroup) -> float:
    """From a group's first Start in the words to its first sign of life, by the events' own times."""
    at, lease, given_at = 0.0, "", 0.0
    for word in rig.words:
        if isinstance(word, Event):
            at = word.at
        if isinstance(word, Start) and word.group == group and not lease:
            lease, given_at = word.lease, at
        elif isinstance(word, Started) and word.lease == lease:
            return at - given_at
    raise AssertionError(f"nothing began on {group}")


def test_two_ranks_are_two_processes_and_groups(rig: Rig) -> None:
    assert {node.gpus for node in rig.of_kind(NodeJoined)} == {2}
    assert len(rig.actors(NODE, "DenoiseActor")) == 2
    assert len(rig.actors(NODE, "NodeScheduler")) == 1
    requests = make_requests(rig.policy, 0, 8, STEPS)
    assert rig.run(requests) == expected_digests(rig, requests)
    groups = {(start.group.node, start.group.ranks) for start in rig.of_kind(Start)}
    assert groups == {(node, (rank,)) for node in ("reserved-0", "spot-0") for rank in (0, 1)}
    assert len(rig.of_kind(Started)) == len(requests)


def test_a_killed_denoise_actor_is_replaced_and_its_node_lives(rig: Rig) -> None:
    victim = rig.actors(NODE, "DenoiseActor")[0]
    run_and(rig, 1, kill(victim.pid))
    (lost,) = rig.of_kind(RankLost)
    assert (lost.node, lost.incarnation, lost.rank) == ("spot-0", 1, 0)
    check_steps_lost(rig)
    (ready,) = rig.wait(RankReady, 1)
    assert (ready.node, ready.rank) == (lost.node, lost.rank)
    assert rig.of_kind(Lost) == []
    run_and(rig, 2, lambda: None)
    group = SPGroup(node=lost.node, incarnation=lost.incarnation)
    assert seconds_to_begin(rig, group) < 5.0, "it waits behind no lease of the dead process"


def test_a_killed_store_comes_back_with_its_commits(rig: Rig) -> None:
    (keeper,) = rig.actors("head-0", "StoreKeeper")
    run_and(rig, 3, kill(keeper.pid))
    check_steps_lost(rig)
    assert rig.of_kind(Lost) == rig.of_kind(RankLost) == []
    assert wait_until(lambda: len(rig.actors("head-0", "StoreKeeper")) == 1, 30)
    run_and(rig, 4, lambda: None)
    assert len(rig.of_kind(Committed)) > 0


def test_a_killed_node_scheduler_takes_its_node_along(rig: Rig) -> None:
    (victim,) = rig.actors(NODE, "NodeScheduler")
    run_and(rig, 5, kill(victim.pid))
    (lost,) = rig.wait(Lost, 1)
    assert (lost.node, lost.incarnation, lost.cause) == ("spot-0", 1, "killed")
    check_steps_lost(rig)
    assert wait_until(lambda: run_processes(rig.run_id, NODE) == [], 10)
    (joined,) = rig.wait(NodeJoined, 1, 90)
    assert (joined.node, joined.incarnation) == ("spot-0", 2)


def test_a_killed_raylet_with_its_children_is_found_at_once(rig: Rig) -> None:
    def kill_all() -> None:
        processes = run_processes(rig.run_id, "spot-0-2")
        for process in processes:
            process.kill()

    run_and(rig, 6, kill_all)
    (lost,) = rig.wait(Lost, 1)
    assert (lost.node, lost.incarnation, lost.cause) == ("spot-0", 2, "killed")
    check_steps_lost(rig)
    rig.wait(NodeJoined, 1, 90)


def test_a_stopped_node_is_found_by_its_lease_and_ends(rig: Rig) -> None:
    def stop_all() -> None:
        for process in run_processes(rig.run_id, "spot-0-3"):
            process.suspend()

    run_and(rig, 7, stop_all)
    (lost,) = rig.wait(Lost, 1)
    assert (lost.node, lost.incarnation, lost.cause) == ("spot-0", 3, "silent")
    check_steps_lost(rig)
    assert wait_until(lambda: run_processes(rig.run_id, "spot-0-3") == [], 10)


def test_a_node_that_hears_nothing_stops_itself(rig: Rig) -> None:
    rig.wait(NodeJoined, 1, 90)
    node = rig.executor._nodes.known.pop(("spot-0", 4))
    assert node.key == ("spot-0", 4)
    began = time.monotonic()
    assert wait_until(lambda: run_processes(rig.run_id, "spot-0-4") == [], 20)
    assert time.monotonic() - began > 2.0, "not before its lease was over"
