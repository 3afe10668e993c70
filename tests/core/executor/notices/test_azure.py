"""Azure's watcher against a local service of Scheduled Events."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from spotlight_core.config.fleet import AzureNoticesConfig
from spotlight_core.executor.notices import azure
from spotlight_core.executor.notices.azure import AzureWatcher
from tests.core.executor.notices.endpoint import HTML, Asked, Reply, Server, serving

EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
PREEMPT = {
    "EventId": "f020ba2e-3bc0-4c40-a10b-86575a9eabd5",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": ["spot_3"],
    "EventStatus": "Scheduled",
    "NotBefore": "Tue, 01 Dec 2026 03:00:30 GMT",
    "Description": "",
    "EventSource": "Platform",
    "DurationInSeconds": -1,
}


class FakeMetadata:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.started: list[str] = []
        self.refusals = 0

    def __call__(self, asked: Asked) -> Reply:
        kind = {"Content-Type": "application/json; charset=utf-8", "Server": "Microsoft-IIS/10.0"}
        if asked.headers.get("Metadata") != "true":
            return Reply(status=400, body=b'{"error": "Bad request. Required metadata header not specified"}')
        if asked.path == NAME:
            return Reply(body=b"Spot_3", headers=kind | {"Content-Type": "text/plain; charset=utf-8"})
        if asked.path != EVENTS:
            return Reply(status=404, headers=kind)
        if asked.method == "POST":
            return self._start(json.loads(asked.body)["StartRequests"])
        return Reply(
            body=json.dumps({"DocumentIncarnation": 2, "Events": self.events}).encode(), headers=kind
        )

    def _start(self, requests: list[dict[str, str]]) -> Reply:
        if self.refusals:
            self.refusals -= 1
            return Reply(status=500)
        self.started += [request["EventId"] for request in requests]
        self.events = [event | {"EventStatus": "Started", "NotBefore": ""} for event in self.events]
        return Reply()


@pytest.fixture
def metadata() -> FakeMetadata:
    return FakeMetadata()


@pytest.fixture
def server(metadata: FakeMetadata) -> Iterator[Server]:
    with serving(metadata) as state:
        yield state


@pytest.fixture
def watcher(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureWatcher]:
    monkeypatch.setattr(azure, "_PAUSE_SECONDS", 0.0)
    watching = AzureWatcher(AzureNoticesConfig(type="azure", endpoint=server.url), grace_seconds=25.0)
    yield watching
    watching.close()


def test_peace_asks_for_the_machines_name_once(watcher: AzureWatcher, server: Server) -> None:
    assert [watcher.poll(), watcher.poll()] == [None, None]
    assert server.paths == [f"GET {NAME}", f"GET {EVENTS}", f"GET {EVENTS}"]


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 30.0),
        ({"Resources": ["other", "SPOT_3"]}, 30.0),
        ({"NotBefore": "2026-12-01T03:00:20Z"}, 20.0),
        ({"NotBefore": "Tue, 01 Dec 2026 02:59:30 GMT"}, 0.0),
        ({"NotBefore": "", "EventStatus": "Started"}, 0.0),
        ({"NotBefore": "soon"}, 25.0),
        ({"EventType": "Terminate"}, 30.0),
        ({"EventType": "Reboot"}, None),
        ({"EventType": "Freeze"}, None),
        ({"Resources": ["spot_33"]}, None),
        ({"Resources": None}, None),
    ],
)
def test_an_event_that_ends_this_machine_is_a_notice(
    watcher: AzureWatcher, metadata: FakeMetadata, changes: dict[str, Any], seconds: float | None
) -> None:
    metadata.events = [PREEMPT | changes]
    assert [watcher.poll(), watcher.poll()] == [seconds, seconds]


def test_the_soonest_of_several_events_counts(watcher: AzureWatcher, metadata: FakeMetadata) -> None:
    metadata.events = [PREEMPT, PREEMPT | {"NotBefore": "Tue, 01 Dec 2026 03:00:10 GMT"}]
    assert watcher.poll() == 10.0


def test_an_acknowledgement_starts_the_event_once(
    watcher: AzureWatcher, metadata: FakeMetadata, server: Server
) -> None:
    metadata.events = [PREEMPT]
    watcher.poll()
    watcher.acknowledge()
    assert metadata.started == [PREEMPT["EventId"]]
    assert watcher.poll() == 0.0
    watcher.acknowledge()
    assert [asked.body for asked in server.asked if asked.method == "POST"] == [
        json.dumps({"StartRequests": [{"EventId": PREEMPT["EventId"]}]}, separators=(",", ":")).encode()
    ]


def test_an_acknowledgement_that_failed_is_sent_again(watcher: AzureWatcher, metadata: FakeMetadata) -> None:
    metadata.events, metadata.refusals = [PREEMPT], 2
    watcher.poll()
    watcher.acknowledge()
    assert metadata.started == [PREEMPT["EventId"]]


def test_an_acknowledgement_that_never_arrives_is_let_go(
    watcher: AzureWatcher, metadata: FakeMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    metadata.events, metadata.refusals = [PREEMPT], 99
    watcher.poll()
    watcher.acknowledge()
    assert metadata.refusals == 99 - azure.ATTEMPTS
    assert "could not be acknowledged; the machine goes at the deadline" in caplog.text
    metadata.refusals = 0
    watcher.acknowledge()
    assert metadata.started == [PREEMPT["EventId"]]


def test_nothing_is_acknowledged_in_peace_nor_on_behalf_of_others(
    watcher: AzureWatcher, metadata: FakeMetadata
) -> None:
    watcher.poll()
    watcher.acknowledge()
    metadata.events = [PREEMPT | {"Resources": ["spot_3", "spot_4"]}]
    watcher.poll()
    watcher.acknowledge()
    assert metadata.started == []


@pytest.mark.parametrize(
    "broken",
    [
        Reply(status=404),
        Reply(status=410),
        Reply(status=429),
        Reply(status=500),
        Reply(body=HTML),
        Reply(body=b'{"Events": {}}'),
        Reply(body=b"[]"),
    ],
)
def test_a_service_out_of_order_is_no_notice_and_said_once(
    watcher: AzureWatcher,
    metadata: FakeMetadata,
    server: Server,
    broken: Reply,
    caplog: pytest.LogCaptureFixture,
) -> None:
    watcher.poll()
    metadata.events = [PREEMPT]
    server.broken = broken
    assert [watcher.poll() for _ in range(3)] == [None] * 3
    server.broken = None
    assert watcher.poll() == 30.0
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


def test_events_that_are_nonsense_are_passed_over(watcher: AzureWatcher, metadata: FakeMetadata) -> None:
    metadata.events = ["", 3, None, {}, {"EventType": "Preempt"}, PREEMPT]  # type: ignore[list-item]
    assert watcher.poll() == 30.0


@pytest.mark.usefixtures("impatient")
def test_a_service_that_takes_minutes_for_its_first_answer_is_asked_again(
    watcher: AzureWatcher, metadata: FakeMetadata, server: Server
) -> None:
    metadata.events = [PREEMPT]
    server.held = threading.Event()
    assert watcher.poll() is None
    server.held.set()
    assert watcher.poll() == 30.0
