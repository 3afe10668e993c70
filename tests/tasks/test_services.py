import os
import socket
import sqlite3
import time

import httpx
import pytest

from spotlight_core.errors import BadInputError
from spotlight_core.executor.cluster import check_port
from spotlight_core.executor.processes import run_processes
from tasks.run_folder import RunFolder
from tasks.services import PrefectServer, check_answers, free_port


@pytest.fixture(autouse=True)
def _environment_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_the_embedded_server_lives_in_the_runs_folder_and_leaves_with_the_run(folder: RunFolder) -> None:
    server = PrefectServer(folder, 0)
    try:
        server.start()

        assert os.environ["PREFECT_API_URL"] == server.url
        host = httpx.URL(server.url).host
        assert host == "127.0.0.1"
        # Its page asks the API at the address that the server has in its own environment.
        settings = httpx.get(f"{server.url.removesuffix('/api')}/ui-settings").json()
        assert settings["api_url"] == server.url
        with sqlite3.connect(folder.runs / ".prefect" / "prefect.db") as database:
            assert database.execute("select count(*) from flow_run").fetchone() == (0,)
        assert len(run_processes(folder.run_id)) == 1
    finally:
        began = time.monotonic()
        server.stop()
    assert time.monotonic() - began < 5
    assert run_processes(folder.run_id) == []
    check_port(httpx.URL(server.url).port or 0, "services.prefect_port")  # free again
    server.stop()  # twice is fine


def test_a_users_own_server_is_used_and_nothing_started(folder: RunFolder) -> None:
    server = PrefectServer(folder, 0, {"PREFECT_API_URL": "http://127.0.0.1:9/api"})

    assert not server.embedded
    assert server.url == "http://127.0.0.1:9/api"
    assert run_processes(folder.run_id) == []


def test_a_users_server_that_does_not_answer_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}/api"

    with pytest.raises(
        BadInputError, match=f"PREFECT_API_URL = {url} does not answer .* or unset PREFECT_API_URL"
    ):
        check_answers(url)


def test_a_listening_port_is_refused_and_zero_never_is() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInputError, match=f"services.prefect_port = {port}: the port is in use"):
            check_port(port, "services.prefect_port")
    check_port(port, "services.prefect_port")
    check_port(0, "services.prefect_port")
