"""A node behind a network link that drops: found by its lease, ends itself, and its late words are refused.

The node lives in a network namespace of its own, with a pair of virtual cables to the rest of the fleet.
"""

import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from spotlight_core.events import Finished, Lost, Start, Started
from spotlight_core.executor.cluster import RayCluster
from spotlight_core.executor.processes import run_processes
from tests.core.executor.rig import Rig, expected_digests, live_rig, make_requests, wait_until

RUN = f"test-link-{os.getpid()}"
SPACE, NEAR, FAR = f"spl{os.getpid()}", f"spn{os.getpid()}"[:15], f"spf{os.getpid()}"[:15]
HEAD_ADDRESS, NODE_ADDRESS = "10.203.17.1", "10.203.17.2"
STEPS = 60
LEASE_SECONDS = 4.0
NODE = "spot-0-1"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def link() -> Iterator[None]:
    """A namespace that only this machine reaches."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    try:
        ip("netns", "add", SPACE)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here ({error})")
    try:
        ip("link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", SPACE)
        ip("addr", "add", f"{HEAD_ADDRESS}/30", "dev", NEAR)
        ip("link", "set", NEAR, "up")
        ip("-n", SPACE, "addr", "add", f"{NODE_ADDRESS}/30", "dev", FAR)
        ip("-n", SPACE, "link", "set", FAR, "up")
        ip("-n", SPACE, "link", "set", "lo", "up")
        yield
    finally:
        subprocess.run(["ip", "netns", "del", SPACE], check=False)
        subprocess.run(["ip", "link", "del", NEAR], check=False, capture_output=True)


class LinkedCluster(RayCluster):
    """spot-0 runs behind the link, and nobody can end it from here once the link is down."""

    reachable = True

    def add_node(self, name: str, incarnation: int, gpus: Sequence[str] = ()) -> int:
        if (name, incarnation) != ("spot-0", 1):
            return super().add_node(name, incarnation, gpus)
        found: list[int] = []

        def inside() -> None:
            # Processes begin in the namespace of the thread that starts them.
            libc = ctypes.CDLL(None, use_errno=True)
            with Path(f"/run/netns/{SPACE}").open("rb") as space:
                assert libc.setns(space.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
            found.append(super(LinkedCluster, self).add_node(name, incarnation, gpus))

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        return found[0]

    def kill_node(self, name: str, incarnation: int) -> None:
        if self.reachable or (name, incarnation) != ("spot-0", 1):
            super().kill_node(name, incarnation)

    def _host_of(self, name: str) -> str:
        return NODE_ADDRESS if name == "spot-0" else HEAD_ADDRESS


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_node_behind_a_dropped_link_is_found_by_its_lease_and_ends_itself(
    link: None, tmp_path: Path
) -> None:
    cluster = LinkedCluster(RUN)
    settings = {"spot_nodes": 1, "node_lease_seconds": LEASE_SECONDS}
    with live_rig(tmp_path, RUN, steps=STEPS, cluster=cluster, **settings) as rig:
        rig.begin_phase("rollout", 0)
        requests = make_requests(rig.policy, 0, 8, STEPS)

        def drop() -> None:
            assert wait_until(lambda: running_there(rig) != "", 60)
            cluster.reachable = False
            ip("link", "set", NEAR, "down")

        try:
            assert rig.run(requests, drop) == expected_digests(rig, requests)
            [lost] = [word for word in rig.of_kind(Lost) if word.node == "spot-0"]
            assert lost.cause == "silent"
            # Nothing of this machine's doing: the node heard nothing for as long as its lease.
            assert wait_until(lambda: run_processes(RUN, NODE) == [], 4 * LEASE_SECONDS)
            assert sorted(word.request for word in rig.of_kind(Finished)) == sorted(r.id for r in requests)
        finally:
            cluster.reachable = True


def running_there(rig: Rig) -> str:
    """A lease that spot-0 has begun."""
    there = {start.lease for start in rig.of_kind(Start) if start.group.node == "spot-0"}
    return next((word.lease for word in rig.of_kind(Started) if word.lease in there), "")
