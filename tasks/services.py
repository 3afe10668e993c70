"""The embedded Prefect API: one server process on 127.0.0.1 for as long as the run lasts.

A user who has ``PREFECT_API_URL`` set keeps their own server, and nothing is started.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.executor.cluster import check_port
from spotlight_core.executor.processes import spawn
from tasks.run_folder import RunFolder, file_lock

START_SECONDS = 90.0
STOP_SECONDS = 3.0
FLUSH_SECONDS = 3.0

# Prefect reads these once, when it is first imported, so they are set before that.
CLIENT_SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "WARNING",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_CLI_PROMPT": "false",
}
# What this server is not for: no schedules, no workers, no automations, one client.
_SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
}


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_answers(url: str) -> None:
    """Fail early on a user's own Prefect API that does not answer.

    Raises:
        BadInputError: nothing healthy at ``url``.
    """
    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=5).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BadInputError(
            f"PREFECT_API_URL = {url} does not answer ({type(error).__name__})",
            "start that server, or unset PREFECT_API_URL to use the embedded one",
        ) from error


def prefect_environment(runs: Path, port: int) -> dict[str, str]:
    """What makes a process talk to, or be, the embedded server of ``runs`` on ``port``."""
    home = runs / ".prefect"
    return CLIENT_SETTINGS | {
        "PREFECT_HOME": str(home),
        "PREFECT_PROFILES_PATH": str(home / "profiles.toml"),
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home / 'prefect.db'}",
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
    }


class PrefectServer:
    """Chosen in the constructor (so that Prefect can be imported), started in ``start``."""

    def __init__(self, folder: RunFolder, port: int, environment: Mapping[str, str] = os.environ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = folder
        own = environment.get("PREFECT_API_URL")
        self.embedded = not own
        if own:
            self.url, self._settings = own, CLIENT_SETTINGS
        else:
            check_port(port, "services.prefect_port")
            self._settings = prefect_environment(folder.runs, port or free_port())
            self.url = self._settings["PREFECT_API_URL"]
        os.environ.update(self._settings)

    def start(self) -> None:
        """Start the embedded server, if it is ours, and wait until the API answers.

        Raises:
            SpotlightError: it exited, or did not answer in time.
        """
        if not self.embedded:
            self._wait()
            return
        (self._folder.runs / ".prefect").mkdir(parents=True, exist_ok=True)
        # Runs share the database, and two servers that migrate a new one at once break it.
        with file_lock(self._folder.runs / ".prefect" / "start.lock"):
            self._spawn()
            self._wait()

    def _spawn(self) -> None:
        # The server's factory under uvicorn: `prefect server start` imports the whole CLI first.
        # PREFECT_API_URL is in its own environment too, else its page asks port 4200.
        port = self.url.removesuffix("/api").rpartition(":")[2]
        argv = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
        argv += ["--host", "127.0.0.1", "--port", port, "--log-level", "warning"]
        argv += ["--timeout-keep-alive", "5", "--timeout-graceful-shutdown", "2"]
        environment = {**self._settings, **_SERVER_SETTINGS}
        self._process = spawn(argv, self._folder.run_id, self._folder.logs / "prefect.log", environment)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise SpotlightError(
                    f"the Prefect API exited with code {self._process.returncode}",
                    f"see {self._folder.logs / 'prefect.log'}",
                )
            with contextlib.suppress(httpx.HTTPError):  # not listening yet
                if httpx.get(f"{self.url}/health", timeout=2).status_code == httpx.codes.OK:
                    return
            time.sleep(0.1)
        raise SpotlightError(
            f"the Prefect API at {self.url} did not answer within {START_SECONDS:g} s",
            "check that it is running, or unset PREFECT_API_URL to use the embedded one",
        )

    def alive(self) -> bool:
        """False once an embedded server that was started has ended without ``stop``."""
        return self._process is None or self._process.poll() is None

    def stop(self) -> None:
        """End the embedded server; safe to call twice."""
        _send_what_is_queued()
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _send_what_is_queued() -> None:
    """Let Prefect's client send its last states and logs while somebody listens.

    Left to the interpreter's exit, it would retry against a server that is gone, for minutes.
    """
    if "prefect.events.worker" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all(timeout=FLUSH_SECONDS)
    APILogWorker.drain_all(timeout=FLUSH_SECONDS)
