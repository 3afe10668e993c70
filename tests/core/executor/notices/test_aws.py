"""EC2's watcher against a local metadata service, version 2."""

import json
import logging
import threading
from collections.abc import Iterator

import pytest

from spotlight_core.config.fleet import AwsNoticesConfig
from spotlight_core.executor.notices.aws import AwsWatcher
from tests.core.executor.notices.endpoint import HTML, Asked, Reply, Server, serving

TOKEN = "PUT /latest/api/token"
ACTION = "GET /latest/meta-data/spot/instance-action"
REBALANCE = "GET /latest/meta-data/events/recommendations/rebalance"
NOT_FOUND = (
    b'<?xml version="1.0" encoding="iso-8859-1"?>\n<!DOCTYPE html>\n'
    b"<html><head><title>404 - Not Found</title></head><body><h1>404 - Not Found</h1></body></html>\n"
)
IN_TWO_MINUTES = "2026-12-01T03:02:00Z"


class FakeMetadata:
    """Tokens are ``token-1``, ``token-2``, …; only the newest is known."""

    def __init__(self) -> None:
        self.tokens = 0
        self.action: bytes | None = None
        self.rebalance: bytes | None = None

    def __call__(self, asked: Asked) -> Reply:
        plain = {"Content-Type": "text/plain", "Server": "EC2ws"}
        if str(asked) == TOKEN:
            if asked.headers.get("X-aws-ec2-metadata-token-ttl-seconds") != "21600":
                return Reply(status=400, headers=plain)
            self.tokens += 1
            lifetime = {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": "21600"}
            return Reply(body=f"token-{self.tokens}".encode(), headers=plain | lifetime)
        if asked.headers.get("X-aws-ec2-metadata-token") != f"token-{self.tokens}":
            return Reply(status=401, headers=plain)
        body = {ACTION: self.action, REBALANCE: self.rebalance}[str(asked)]
        return (
            Reply(status=404, body=NOT_FOUND, headers=plain)
            if body is None
            else Reply(body=body, headers=plain)
        )


@pytest.fixture
def metadata() -> FakeMetadata:
    return FakeMetadata()


@pytest.fixture
def server(metadata: FakeMetadata) -> Iterator[Server]:
    with serving(metadata) as state:
        yield state


@pytest.fixture
def watcher(server: Server) -> Iterator[AwsWatcher]:
    watching = AwsWatcher(AwsNoticesConfig(type="aws", endpoint=server.url), grace_seconds=30.0)
    yield watching
    watching.close()


def action(at: str = IN_TWO_MINUTES, what: str = "terminate") -> bytes:
    return json.dumps({"action": what, "time": at}).encode()


def test_peace_asks_both_under_one_token(watcher: AwsWatcher, server: Server) -> None:
    assert [watcher.poll(), watcher.poll()] == [None, None]
    assert server.paths == [TOKEN, ACTION, REBALANCE, ACTION, REBALANCE]


@pytest.mark.parametrize("what", ["terminate", "stop", "hibernate"])
def test_an_action_says_how_long_by_the_services_own_clock(
    watcher: AwsWatcher, metadata: FakeMetadata, what: str
) -> None:
    metadata.action = action(what=what)
    assert [watcher.poll(), watcher.poll()] == [120.0, 120.0]


def test_a_time_that_has_passed_leaves_nothing(watcher: AwsWatcher, metadata: FakeMetadata) -> None:
    metadata.action = action("2026-12-01T02:59:00Z")
    assert watcher.poll() == 0.0


def test_an_action_without_a_readable_time_is_a_notice_all_the_same(
    watcher: AwsWatcher, metadata: FakeMetadata
) -> None:
    metadata.action = action("soon")
    assert watcher.poll() == 30.0


def test_a_rebalance_recommendation_is_a_notice_of_two_minutes(
    watcher: AwsWatcher, metadata: FakeMetadata
) -> None:
    metadata.rebalance = b'{"noticeTime":"2026-12-01T02:58:00Z"}'
    assert watcher.poll() == 120.0
    metadata.action = action("2026-12-01T03:00:40Z")
    assert watcher.poll() == 40.0


def test_a_rebalance_recommendation_may_be_left_aside(metadata: FakeMetadata, server: Server) -> None:
    metadata.rebalance = b'{"noticeTime":"2026-12-01T02:58:00Z"}'
    config = AwsNoticesConfig(type="aws", endpoint=server.url, rebalance=False)
    assert AwsWatcher(config, 30.0).poll() is None
    assert server.paths == [TOKEN, ACTION]


def test_a_token_that_expired_is_renewed_within_the_poll(
    watcher: AwsWatcher, metadata: FakeMetadata, server: Server
) -> None:
    watcher.poll()
    metadata.tokens = 7  # as if it had forgotten the one it gave
    metadata.action = action()
    server.asked.clear()
    assert watcher.poll() == 120.0
    assert server.paths == [ACTION, TOKEN, ACTION]


def test_a_token_is_renewed_before_it_expires(
    watcher: AwsWatcher, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher.poll()
    watcher._token_since -= 21000.0
    server.asked.clear()
    watcher.poll()
    assert server.paths == [TOKEN, ACTION, REBALANCE]


def test_a_service_that_refuses_its_own_token_is_no_notice(watcher: AwsWatcher, server: Server) -> None:
    server.answer = lambda asked: Reply(status=401) if asked.method == "GET" else Reply(body=b"token")
    assert watcher.poll() is None
    assert server.paths == [TOKEN, ACTION, TOKEN, ACTION]


@pytest.mark.parametrize(
    "broken",
    [
        Reply(status=403, body=b"Forbidden"),
        Reply(status=500),
        Reply(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        Reply(body=HTML),
        Reply(body=b""),
        Reply(body=b"\xff\xfe\x00"),
    ],
)
def test_a_service_out_of_order_is_no_notice_and_said_once(
    watcher: AwsWatcher,
    metadata: FakeMetadata,
    server: Server,
    broken: Reply,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="spotlight_core")
    server.broken = broken
    assert [watcher.poll() for _ in range(3)] == [None] * 3
    server.broken = None
    metadata.action = action()
    assert [watcher.poll() for _ in range(2)] == [120.0] * 2
    said = [record.getMessage() for record in caplog.records if record.name.startswith("spotlight_core")]
    assert len(said) == 2
    assert said[0].startswith(f"EC2's metadata service at {server.url} ")
    assert said[1] == f"EC2's metadata service at {server.url} answers again"


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"action": "dance"}', HTML, b"[" * 100_000])
def test_an_action_that_is_nonsense_is_no_notice(
    watcher: AwsWatcher, metadata: FakeMetadata, body: bytes
) -> None:
    metadata.action = metadata.rebalance = body
    assert watcher.poll() is None


@pytest.mark.usefixtures("impatient")
def test_a_service_that_hangs_is_no_notice(
    watcher: AwsWatcher, metadata: FakeMetadata, server: Server
) -> None:
    metadata.action = action()
    server.held = threading.Event()
    assert watcher.poll() is None
    server.held.set()
    assert watcher.poll() == 120.0


def test_a_service_that_is_away_and_comes_back_is_heard(metadata: FakeMetadata) -> None:
    with serving(metadata) as first:
        watcher = AwsWatcher(AwsNoticesConfig(type="aws", endpoint=first.url), 30.0)
        assert watcher.poll() is None
    assert watcher.poll() is None
    metadata.action = action()
    with serving(metadata, port=int(first.url.rsplit(":", 1)[1])):
        assert watcher.poll() == 120.0
    watcher.close()


def test_no_proxy_is_asked_for_the_machines_own_service(
    server: Server, metadata: FakeMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    metadata.action = action()
    assert AwsWatcher(AwsNoticesConfig(type="aws", endpoint=f"{server.url}/"), 30.0).poll() == 120.0
