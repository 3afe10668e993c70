"""The coordinator as a process, and its client: real processes, HTTP and files; the nodes are pretended."""

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from spotlight_core.errors import BadInputError, FleetError
from spotlight_core.events import Lost, NodeJoined
from spotlight_core.executor.client import CoordinatorClient, find
from spotlight_core.executor.coordinator_process import LOCKED, SUPERSEDED
from spotlight_core.journal import read_words
from tests.core.executor.coordinator_rig import connect, request, run_folder, start, until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "run")


@pytest.fixture
def started(folder: Path) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes to be ended with the test, whatever becomes of it."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait(10)


@pytest.fixture
def client(folder: Path, started: list["subprocess.Popen[bytes]"]) -> Iterator[CoordinatorClient]:
    started.append(start(folder, 1))
    client = connect(folder, 1, started[0])
    yield client
    with suppress(ProcessLookupError):
        started[0].send_signal(signal.SIGCONT)
    client.close()


def lost(folder: Path) -> list[tuple[str, str]]:
    return [(w.node, w.cause) for w in read_words(folder / "journal.jsonl") if isinstance(w, Lost)]


BOTH = [("reserved-0", "shutdown"), ("spot-0", "shutdown")]


def test_from_the_first_request_to_an_orderly_end(
    folder: Path, client: CoordinatorClient, started: list["subprocess.Popen[bytes]"]
) -> None:
    client.wait_ready()
    where = folder / "coordinator.json"
    assert stat.S_IMODE(where.stat().st_mode) == 0o600
    assert json.loads(where.read_text())["pid"] == started[0].pid

    async def run() -> list[str]:
        client.change_phase("rollout", 3)
        submission = client.submit([request("3/a", seeds=(4, 5)), request("3/b")])
        done = []
        async for each, ref in submission.results():
            arrays = await asyncio.to_thread(client.take, ref)
            np.testing.assert_array_equal(arrays["seeds"], each.seeds)
            done.append(each.id)
        waiting = client.submit([request("3/c", kind="explore")])
        client.cancel(["3/c"], "late")
        done += [ref async for _, ref in waiting.results(allow_cancelled=True)]
        return done

    assert asyncio.run(run()) == ["3/a", "3/b"]
    until(lambda: "results_bytes 0" in metrics(where))
    client.close()
    client.close()

    assert started[0].poll() == 0
    words = list(read_words(folder / "journal.jsonl"))
    kinds = [type(word).__name__ for word in words if not isinstance(word, NodeJoined)]
    assert " ".join(kinds) == (
        "PhaseChanged Submitted Start Start Finished Settle Finished Settle "
        "Submitted Cancelled Settle Lost Lost"
    )
    assert lost(folder) == BOTH
    assert not where.exists()


def metrics(where: Path) -> str:
    import httpx

    told = json.loads(where.read_text())
    return httpx.get(f"{told['url']}/metrics", headers={"Authorization": f"Bearer {told['token']}"}).text


def test_what_cannot_be_taken_is_an_error_that_fails_nothing_else(client: CoordinatorClient) -> None:
    with pytest.raises(FleetError, match="there is no result nothing"):
        client.take("nothing")
    client.wait_ready()

    assert client.failure is None


def test_a_killed_coordinator_fails_who_waits(
    client: CoordinatorClient, started: list["subprocess.Popen[bytes]"]
) -> None:
    async def run() -> None:
        waiting = client.submit([request("a", kind="explore")])
        asyncio.get_running_loop().call_later(0.5, started[0].kill)
        with pytest.raises(FleetError, match="the coordinator has ended by itself: continue with --resume"):
            _ = [ref async for _, ref in waiting.results()]
        with pytest.raises(FleetError, match="ended by itself"):
            client.submit([request("b")])

    asyncio.run(run())
    assert not client.alive()


def test_an_alarm_reaches_the_phases_and_the_nodes_ends_the_journal(
    folder: Path, client: CoordinatorClient
) -> None:
    client.wait_ready()

    async def run() -> None:
        with pytest.raises(FleetError, match="two results of alarm differ"):
            _ = [ref async for _, ref in client.submit([request("alarm")]).results()]

    asyncio.run(run())
    assert client.alive()
    client.close()
    assert lost(folder) == BOTH


def test_a_dead_head_is_told(folder: Path, client: CoordinatorClient) -> None:
    client.wait_ready()
    (folder / "dead-head").touch()

    until(lambda: client.failure is not None)
    assert str(client.failure).startswith("the Ray head has ended by itself: continue with --resume")


@pytest.mark.parametrize("fault", ["bad-parts", "bad-start"])
def test_an_error_at_the_start_is_the_same_error_here(
    folder: Path, started: list["subprocess.Popen[bytes]"], fault: str
) -> None:
    (folder / fault).touch()
    process = start(folder, 1)
    started.append(process)

    def come_up() -> None:
        client = connect(folder, 1, process)
        try:
            client.wait_ready()
        finally:
            client.close()

    with pytest.raises(BadInputError) as caught:
        come_up()
    told = {
        "bad-parts": "fleet.trace = 'x' is no trace: name another",
        "bad-start": "services.ray_port = 1: the port is in use: free it",
    }
    assert str(caught.value) == told[fault]


def test_a_second_coordinator_is_refused_and_leaves_the_first_alone(
    folder: Path, client: CoordinatorClient, started: list["subprocess.Popen[bytes]"]
) -> None:
    before = (folder / "coordinator.json").read_bytes()
    second = start(folder, 2)
    started.append(second)

    with pytest.raises(FleetError, match=f"exit code {LOCKED} while it started"):
        find(folder / "coordinator.json", 2, second)
    assert (folder / "coordinator.json").read_bytes() == before
    log = (folder / "logs" / "coordinator.log").read_text()
    assert f"process {started[0].pid} is the coordinator of {folder}" in log
    client.wait_ready()


def test_without_a_client_it_releases_its_nodes_and_leaves(
    folder: Path, started: list["subprocess.Popen[bytes]"]
) -> None:
    process = start(folder, 1, "--linger-seconds", "0.5")
    started.append(process)

    assert process.wait(30) == 0
    assert lost(folder) == BOTH
    assert not (folder / "coordinator.json").exists()


def test_a_term_signal_is_an_orderly_end(
    folder: Path, client: CoordinatorClient, started: list["subprocess.Popen[bytes]"]
) -> None:
    client.wait_ready()
    started[0].terminate()

    assert started[0].wait(30) == 0
    assert lost(folder) == BOTH


@pytest.mark.parametrize("terminated", [False, True])
def test_one_that_was_paused_and_replaced_says_not_one_more_word(
    folder: Path, client: CoordinatorClient, started: list["subprocess.Popen[bytes]"], terminated: bool
) -> None:
    """Its lock is pretended to have gone to the newer one, as on a file system that keeps none."""
    client.wait_ready()
    started[0].send_signal(signal.SIGSTOP)
    client.change_phase("rollout", 0)
    (folder / "coordinator.lock").unlink()
    newer = start(folder, 2)
    started.append(newer)
    other = connect(folder, 2, newer)
    other.wait_ready()
    before = (folder / "journal.jsonl").read_bytes()
    if terminated:  # an orderly end, too, would take the newer one's file and nodes
        started[0].terminate()
    started[0].send_signal(signal.SIGCONT)

    assert started[0].wait(30) == SUPERSEDED
    assert (folder / "journal.jsonl").read_bytes() == before
    assert json.loads((folder / "coordinator.json").read_text())["epoch"] == 2
    other.close()
    assert newer.poll() == 0


IMPORTS = {
    "spotlight_core.executor.assembly": {"torch", "prefect", "mlflow"},
    "spotlight_core.executor.coordinator_process": {"torch", "ray", "prefect", "mlflow"},
    "tasks.plant": {"ray"},
}


@pytest.mark.parametrize("module", IMPORTS)
def test_no_process_loads_what_belongs_to_another(module: str) -> None:
    """No torch beside Ray in the coordinator, and no Ray in the driver."""
    program = f"import sys, {module}; print(*sys.modules, sep=chr(10))"
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PREFECT_API_URL": "http://127.0.0.1:1/api"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert module in loaded
    assert {name.split(".")[0] for name in loaded} & IMPORTS[module] == set()
