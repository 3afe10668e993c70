"""Compute Engine's watcher against a local metadata server that answers when it changes."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qs, urlsplit

import pytest

from spotlight_core.config.fleet import GcpNoticesConfig
from spotlight_core.executor.notices.gcp import GcpWatcher
from tests.core.executor.notices.endpoint import HTML, Asked, Reply, Server, serving

PREEMPTED = "GET /computeMetadata/v1/instance/preempted"
MAINTENANCE = "GET /computeMetadata/v1/instance/maintenance-event"
WAITING = "?wait_for_change=true&timeout_sec=1&last_etag="


class FakeMetadata:
    """Waits for a change as the real one does: until the etag is another one or the time is over."""

    def __init__(self) -> None:
        self.preempted = "FALSE"
        self.maintenance = "NONE"
        self.etag = "fbd3a4b1c2"
        self.timeout_seconds: float | None = None  # instead of what was asked for
        self.waiting = threading.Event()
        self.changed = threading.Event()

    def change(self, preempted: str) -> None:
        self.preempted, self.etag = preempted, "9d8e7f6a5b"
        self.changed.set()

    def __call__(self, asked: Asked) -> Reply:
        if asked.headers.get("Metadata-Flavor") != "Google":
            return Reply(status=403, body=b"Missing required header: Metadata-Flavor")
        parts = urlsplit(asked.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if query.get("wait_for_change") == "true" and query.get("last_etag") in (None, self.etag):
            self.waiting.set()
            seconds = float(query.get("timeout_sec", 60))
            self.changed.wait(seconds if self.timeout_seconds is None else self.timeout_seconds)
        signed = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM", "ETag": self.etag}
        body = self.preempted if parts.path.endswith("/preempted") else self.maintenance
        return Reply(body=body.encode(), headers=signed | {"Content-Type": "application/text"})


@pytest.fixture
def metadata() -> FakeMetadata:
    fake = FakeMetadata()
    fake.timeout_seconds = 0.0
    return fake


@pytest.fixture
def server(metadata: FakeMetadata) -> Iterator[Server]:
    with serving(metadata) as state:
        yield state


@pytest.fixture
def watcher(server: Server) -> Iterator[GcpWatcher]:
    watching = GcpWatcher(GcpNoticesConfig(type="gcp", endpoint=server.url))
    yield watching
    watching.close()


def test_peace_asks_at_once_first_and_waits_from_then_on(watcher: GcpWatcher, server: Server) -> None:
    assert [watcher.poll(), watcher.poll()] == [None, None]
    assert server.paths == [PREEMPTED, MAINTENANCE, f"{PREEMPTED}{WAITING}fbd3a4b1c2", MAINTENANCE]


def test_a_machine_preempted_before_the_first_question_is_told(
    watcher: GcpWatcher, metadata: FakeMetadata, server: Server
) -> None:
    metadata.preempted = "TRUE"
    assert [watcher.poll(), watcher.poll()] == [30.0, 30.0]
    assert server.paths == [PREEMPTED, f"{PREEMPTED}{WAITING}fbd3a4b1c2"]


def test_a_change_is_heard_while_the_question_waits(server: Server, metadata: FakeMetadata) -> None:
    metadata.timeout_seconds = None
    watcher = GcpWatcher(GcpNoticesConfig(type="gcp", endpoint=server.url, poll_seconds=60))
    assert watcher.poll() is None
    with ThreadPoolExecutor(1) as threads:
        polled = threads.submit(watcher.poll)
        assert metadata.waiting.wait(60)
        metadata.change("TRUE")
        assert polled.result(30) == 30.0  # half of the wait that was asked for
    watcher.close()


@pytest.mark.usefixtures("impatient")
def test_a_wait_is_no_silence(watcher: GcpWatcher, metadata: FakeMetadata) -> None:
    metadata.timeout_seconds = 0.6  # three times what other answers get
    watcher.poll()
    metadata.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    assert watcher.poll() == 60.0


@pytest.mark.parametrize(
    ("event", "seconds"),
    [("TERMINATE_ON_HOST_MAINTENANCE", 60.0), ("MIGRATE_ON_HOST_MAINTENANCE", None), ("NONE", None)],
)
def test_only_a_maintenance_that_ends_the_machine_is_a_notice(
    watcher: GcpWatcher, metadata: FakeMetadata, event: str, seconds: float | None
) -> None:
    metadata.maintenance = event
    assert watcher.poll() == seconds


@pytest.mark.parametrize(
    "broken",
    [
        Reply(status=503, headers={"Metadata-Flavor": "Google"}),
        Reply(body=b"TRUE"),  # not signed: whoever answers is not Google's
        Reply(body=b"TRUE", headers={"Metadata-Flavor": "Bing"}),
        Reply(body=b"true?", headers={"Metadata-Flavor": "Google"}),
        Reply(body=HTML, headers={"Metadata-Flavor": "Google"}),
    ],
)
def test_a_service_out_of_order_is_no_notice_and_said_once(
    watcher: GcpWatcher,
    metadata: FakeMetadata,
    server: Server,
    broken: Reply,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watcher.poll()
    server.broken = broken
    assert [watcher.poll() for _ in range(3)] == [None] * 3
    server.broken = None
    metadata.preempted = "TRUE"
    server.asked.clear()
    assert watcher.poll() == 30.0
    assert server.paths == [PREEMPTED]  # what changed meanwhile is not waited for
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1


@pytest.mark.usefixtures("impatient")
def test_a_service_that_hangs_is_no_notice(
    watcher: GcpWatcher, metadata: FakeMetadata, server: Server
) -> None:
    metadata.preempted = "TRUE"
    server.held = threading.Event()
    assert watcher.poll() is None
    server.held.set()
    assert watcher.poll() == 30.0


def test_a_service_that_is_away_and_comes_back_is_heard(metadata: FakeMetadata) -> None:
    with serving(metadata) as first:
        watcher = GcpWatcher(GcpNoticesConfig(type="gcp", endpoint=first.url))
        assert watcher.poll() is None
    assert watcher.poll() is None
    metadata.preempted = "TRUE"
    with serving(metadata, port=int(first.url.rsplit(":", 1)[1])):
        assert watcher.poll() == 30.0
    watcher.close()
