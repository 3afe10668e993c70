"""A real Ray cluster under a replayed trace: notice, kill, return; the results are those of a bare loop."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from spotlight_core.errors import FleetError
from spotlight_core.events import (
    Acquire,
    Committed,
    Failed,
    LoadFailed,
    Lost,
    NodeJoined,
    Notice,
    Offered,
    Start,
)
from spotlight_core.executor.burial import bury_open_nodes
from spotlight_core.executor.node_log import NodeLog
from spotlight_core.executor.processes import ray_folder, run_processes
from spotlight_core.market.progress import ProgressPoint, ProgressTrace
from spotlight_core.market.traces import ClockEvent, ClockTrace
from spotlight_core.types import Fidelity
from tests.core.executor.rig import Rig, expected_digests, live_rig, make_requests, wait_until

RUN = f"test-live-fleet-{os.getpid()}"
TRACE = ProgressTrace(
    points=(
        ProgressPoint(
            iteration=0,
            phase="rollout",
            node="spot-0",
            event="notice",
            nth_request=1,
            denoise_step=4,
            seconds_left=20.0,
        ),
        ProgressPoint(
            iteration=0, phase="rollout", node="spot-1", event="kill", nth_request=1, denoise_step=4
        ),
        ProgressPoint(iteration=1, phase="rollout", node="spot-0", event="return"),
    )
)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with live_rig(tmp_path, RUN, TRACE, spot_nodes=2) as rig:
        yield rig


@pytest.mark.slow
def test_preempted_requests_end_with_the_same_bits_and_nothing_is_left(rig: Rig) -> None:
    first, second = make_requests(rig.policy, 0, 8), make_requests(rig.policy, 1, 4)
    rig.begin_phase("rollout", 0)
    digests = rig.run(first)
    rig.wait(Lost, 2)
    rig.begin_phase("rollout", 1)
    digests |= rig.run(second)
    rig.wait(NodeJoined, 4)

    assert digests == expected_digests(rig, first + second)
    (released,) = [commit for commit in rig.of_kind(Committed) if commit.released]
    assert released.next_denoise_step == 4, "a notice costs no step"
    resumed = {start.request.id: start for start in rig.of_kind(Start) if start.from_denoise_step > 0}
    assert (resumed[released.request].from_denoise_step, resumed[released.request].state_ref) == (
        4,
        released.ref,
    )
    losses = {(lost.node, lost.cause) for lost in rig.of_kind(Lost)}
    assert losses == {("spot-0", "released"), ("spot-1", "killed")}
    log = NodeLog(folder=rig.folder / "nodes")
    assert (log.struck("spot-1", 1), log.struck("spot-0", 1)) == (True, False)
    # Killed before step 4: its commit began after that of step 2 was acknowledged, and may have been too.
    (struck,) = [request for request in resumed if request != released.request]
    assert resumed[struck].from_denoise_step in (2, 4)
    offers = [offer.node for offer in rig.of_kind(Offered)]
    assert offers == ["reserved-0", "spot-0", "spot-1", "spot-0"], "what the trace took it alone returns"
    assert ("spot-0", 2) in rig.executor.nodes()

    rig.fleet.close()
    rig.wait(Lost, 4)
    assert run_processes(RUN) == []
    assert not ray_folder(RUN).exists()
    lives = list(log.lives())
    stops = {(life.node, life.incarnation): life.stopped_at for life in lives}
    assert stops == {(lost.node, lost.incarnation): lost.stopped_at for lost in rig.of_kind(Lost)}
    starts = {(life.node, life.incarnation): life.started_at for life in lives}
    assert starts == {(node.node, node.incarnation): node.started_at for node in rig.of_kind(NodeJoined)}
    assert bury_open_nodes(rig.folder, time.time()) == []


@pytest.mark.slow
def test_faults_of_a_request_and_of_a_stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = f"{RUN}-faults"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # Ray believes it; torch finds no driver and stays here
    with live_rig(tmp_path, run_id, spot_nodes=0, max_attempts=2, max_node_failures=50) as rig:
        rig.begin_phase("rollout", 0)
        good = make_requests(rig.policy, 0, 1)
        bad = replace(good[0], id="0/rollout/bad/0", fidelity=Fidelity(denoise_steps=6, reused_steps=(0,)))
        with pytest.raises(FleetError, match="step 0 has nothing to reuse"):
            rig.run([bad])
        assert len(rig.of_kind(Failed)) == 1, "the request's own fault is not tried again"
        assert rig.run(good) == expected_digests(rig, good)

        node = run_processes(run_id, "reserved-0-1")
        assert {process.environ()["CUDA_VISIBLE_DEVICES"] for process in node} == {"5"}
        assert_stranger_refused(rig.cluster.address)
        listening = {
            (connection.laddr.ip.removeprefix("::ffff:"))
            for process in run_processes(run_id)
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening == {"127.0.0.1"}

        lost = replace(rig.policy, number=9)
        missing = replace(good[0], id="0/rollout/missing/0", policy=lost)
        with pytest.raises(FleetError, match="old-9"):
            rig.run([missing])
        assert "old-9" in rig.of_kind(LoadFailed)[0].error
    assert run_processes(run_id) == []


def assert_stranger_refused(address: str) -> None:
    """A client on this machine that does not know the run's token."""
    code = f"import ray; ray.init(address={address!r}, _node_ip_address='127.0.0.1')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    stranger = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert stranger.returncode != 0
    assert "InvalidAuthToken" in stranger.stderr


@pytest.mark.slow
def test_a_clock_trace_brings_and_takes_nodes(tmp_path: Path) -> None:
    run_id = f"{RUN}-clock"
    # The first node is there from the start and goes; a second one takes the slot.
    trace = ClockTrace(
        events=(ClockEvent(0.0, "add", "a"), ClockEvent(1.0, "remove", "a"), ClockEvent(1.5, "add", "b"))
    )
    with live_rig(tmp_path, run_id, trace, spot_nodes=1) as rig:
        assert wait_until(lambda: ("spot-0", 2) in rig.executor.nodes(), 90)
        notice, lost = rig.of_kind(Notice)[0], rig.of_kind(Lost)[0]
        assert (notice.node, notice.incarnation, notice.seconds_left) == ("spot-0", 1, 30.0)
        assert lost.cause == "released", "an idle node is let go at its notice"

        rig.cluster.kill_node("spot-0", 2)  # nobody calls an idle node
        assert rig.wait(Lost, 2, seconds=3)[1].cause == "killed"
        acquired = rig.wait(Acquire, 4)  # the machine is still there
        assert [command.node for command in acquired] == ["reserved-0", "spot-0", "spot-0", "spot-0"]
    assert run_processes(run_id) == []
