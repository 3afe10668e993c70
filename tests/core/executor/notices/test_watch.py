"""The loop that asks a watcher, and the choice of one."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spotlight_core.config.fleet import (
    AwsNoticesConfig,
    FileNoticesConfig,
    FleetConfig,
    HttpNoticesConfig,
    KubernetesNoticesConfig,
    NoticesConfig,
)
from spotlight_core.errors import BadInputError
from spotlight_core.executor.notices import build_watcher, check_notices, watch
from spotlight_core.executor.notices.base import Watcher
from tests.core.executor.notices.endpoint import Reply, serving

Polled = float | None | Exception


class Scripted(Watcher):
    """Gives what it is told to, then stops the loop.  Seconds count from when it was made."""

    source = "script"

    def __init__(self, polled: list[Polled], stop: threading.Event) -> None:
        self._polled: Iterator[Polled] = iter(polled)
        self._began, self._stop = time.monotonic(), stop

    def poll(self) -> float | None:
        polled = next(self._polled, "over")
        if isinstance(polled, Exception):
            raise polled
        if polled == "over":
            self._stop.set()
            return None
        assert polled is None or isinstance(polled, float)
        return None if polled is None else self._began + polled - time.monotonic()


class Listener:
    """Remembers what it was told; ``on_notice`` gets seconds left and source."""

    def __init__(self, on_notice: Callable[[float, str], None] = lambda seconds_left, source: None) -> None:
        self.calls: list[object] = []
        self._on_notice = on_notice

    def noticed(self, seconds_left: float, source: str, ranks: tuple[int, ...]) -> None:
        seconds = int(round(seconds_left, -2))
        self.calls.append((seconds, *ranks) if ranks else seconds)
        self._on_notice(seconds_left, source)

    def returned(self, ranks: tuple[int, ...]) -> None:
        self.calls.append(("back", *ranks))


class Deaf:
    """Expects no word."""

    def noticed(self, seconds_left: float, source: str, ranks: tuple[int, ...]) -> None:
        raise AssertionError("nobody told")

    def returned(self, ranks: tuple[int, ...]) -> None:
        raise AssertionError("nobody told")


def told(polled: list[Polled], on_notice: Callable[[int], None] = lambda number: None) -> list[object]:
    """The seconds left that were told, rounded; ``on_notice`` gets the number of the call."""
    listener = Listener(lambda seconds_left, source: on_notice(len(listener.calls)))
    stop = threading.Event()
    watch(Scripted(polled, stop), 0.0, listener, stop)
    return listener.calls


def test_peace_tells_nothing() -> None:
    assert told([None, None, None]) == []


def test_a_notice_is_told_once_however_often_it_is_heard() -> None:
    assert told([None, 1000.0, 1000.0, None, 1000.0, 2000.0]) == [1000]


def test_a_shorter_deadline_is_told_again() -> None:
    assert told([3000.0, 1000.0, 2000.0, 1000.0]) == [3000, 1000]


def test_a_watcher_that_fails_is_asked_again_and_its_fault_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault = OSError("no route")
    assert told([fault, fault, 1000.0, fault, 1000.0]) == [1000]
    assert [record.getMessage() for record in caplog.records] == [
        "the script watcher failed, and goes on",
        "the script watcher failed, and goes on",  # anew, after it was well
    ]


def test_a_notice_that_could_not_be_passed_on_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    def deaf(number: int) -> None:
        if number < 3:
            raise ConnectionError("the coordinator is away")

    assert told([1000.0] * 5, deaf) == [1000] * 3
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


def told_of_ranks(*polled: tuple[int, ...] | str) -> list[object]:
    """What is told of polls that each name the GPUs to go, are ``peace``, or ``silence``."""

    class Ranks(Scripted):
        def poll(self) -> float | None:
            self.sure = True
            said = next(answers, None)
            if isinstance(said, tuple):
                self.ranks = said
                return self._began + 1000.0 - time.monotonic()
            self.sure = said == "peace"
            if said is None:
                self._stop.set()
            return None

    answers, listener, stop = iter(polled), Listener(), threading.Event()
    watch(Ranks([], stop), 0.0, listener, stop)
    return listener.calls


def test_gpus_that_go_and_come_back_are_told_of_one_by_one() -> None:
    assert told_of_ranks((1,), (1,), (1, 2), (2,), "peace", "peace", (2,)) == [
        *((1000, 1), (1000, 2), ("back", 1), ("back", 2), (1000, 2)),
    ]


def test_silence_gives_no_gpu_back() -> None:
    assert told_of_ranks((1,), "silence", "silence", (1,), "peace") == [(1000, 1), ("back", 1)]


def test_a_notice_of_the_whole_node_gives_no_gpu_back() -> None:
    assert told_of_ranks((1,), (), "silence") == [(1000, 1), 1000]


def test_a_loop_that_waits_is_stopped_at_once() -> None:
    stop, polled = threading.Event(), threading.Event()

    class Peace(Watcher):
        source = "peace"

        def poll(self) -> float | None:
            polled.set()
            return None

    thread = threading.Thread(target=watch, args=(Peace(), 3600.0, Deaf(), stop), daemon=True)
    thread.start()
    assert polled.wait(60)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


def test_a_real_watcher_tells_a_recommendation_and_then_the_shorter_deadline() -> None:
    answers = {
        "/latest/api/token": Reply(body=b"token"),
        "/latest/meta-data/events/recommendations/rebalance": Reply(
            body=b'{"noticeTime":"2026-12-01T03:00:00Z"}'
        ),
    }
    heard: list[tuple[float, str]] = []
    stop = threading.Event()

    def listen(seconds_left: float, source: str) -> None:
        heard.append((seconds_left, source))
        action = b'{"action":"terminate","time":"2026-12-01T03:00:45Z"}'
        answers["/latest/meta-data/spot/instance-action"] = Reply(body=action)
        if len(heard) == 2:
            stop.set()

    with serving(lambda asked: answers.get(asked.path, Reply(status=404))) as server:
        watcher = build_watcher(config("aws", endpoint=server.url), "spot-1", 30.0)
        assert watcher is not None
        watch(watcher, 0.001, Listener(listen), stop)
        watcher.close()
    assert heard == [(120.0, "aws"), (45.0, "aws")]


def test_a_watcher_closed_while_it_asks_ends_its_loop_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entered, closed = threading.Event(), threading.Event()
    stop = threading.Event()

    class Closed(Watcher):
        source = "closed"

        def poll(self) -> float | None:
            entered.set()
            assert closed.wait(60)
            raise RuntimeError("the client has been closed")

    thread = threading.Thread(target=watch, args=(Closed(), 0.0, Deaf(), stop), daemon=True)
    thread.start()
    assert entered.wait(60)
    stop.set()
    closed.set()
    thread.join(60)
    assert not thread.is_alive()
    assert caplog.records == []


CONFIGS: dict[str, dict[str, Any]] = {
    "aws": {},
    "gcp": {},
    "azure": {},
    "file": {"path": "/run/notice-{node}"},
    "http": {"url": "https://ops.example/notices/{node}"},
}


def config(kind: str, **changes: Any) -> NoticesConfig:
    return FleetConfig.model_validate({"notices": {"type": kind} | changes}).notices


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_each_type_has_its_watcher(kind: str) -> None:
    chosen = config(kind, **CONFIGS[kind])
    check_notices(chosen)
    watcher = build_watcher(chosen, "spot-1", 30.0)
    assert watcher is not None
    assert watcher.source == kind
    watcher.acknowledge()  # in peace it says nothing to anybody
    # Only a watcher that SIGTERM tells something may take the signal from whoever else ends the process.
    assert not hasattr(watcher, "terminated")
    watcher.close()


def test_no_notices_have_no_watcher() -> None:
    check_notices(config("none"))
    assert build_watcher(config("none"), "spot-1", 30.0) is None


def test_kubernetes_outside_of_a_pod_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NODE_NAME", raising=False)
    check_notices(config("kubernetes"))
    with pytest.raises(BadInputError, match="NODE_NAME"):
        build_watcher(config("kubernetes"), "spot-1", 30.0)


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        (
            AwsNoticesConfig(type="aws", endpoint=""),
            "fleet.notices.endpoint = '' is no http or https address",
        ),
        (AwsNoticesConfig(type="aws", endpoint="169.254.169.254"), "is no http or https address"),
        (
            AwsNoticesConfig(type="aws", endpoint="ftp://host"),
            "is no http or https address: write an address",
        ),
        (AwsNoticesConfig(type="aws", endpoint="http://"), "is no http or https address"),
        (AwsNoticesConfig(type="aws", endpoint="http://host:port"), "fleet.notices.endpoint is no address"),
        (AwsNoticesConfig(type="aws", endpoint="http://host:99999"), "fleet.notices.endpoint is no address"),
        (AwsNoticesConfig(type="aws", endpoint="http://a host"), "is no http or https address"),
        (
            HttpNoticesConfig(type="http", url="notices/{node}"),
            "fleet.notices.url = 'notices/node' is no http",
        ),
        (
            HttpNoticesConfig(type="http", url="http://host/{name}"),
            "holds '{name}': only {node} is filled in",
        ),
        (FileNoticesConfig(type="file", path="notice"), "fleet.notices.path = 'notice' is not absolute"),
        (FileNoticesConfig(type="file", path="/run/{rank}"), "holds '{rank}': only {node} is filled in"),
        (
            KubernetesNoticesConfig(type="kubernetes", endpoint="http://api"),
            "token in the clear: begin it with",
        ),
    ],
)
def test_what_no_node_could_use_is_found_before_one_is_rented(chosen: NoticesConfig, problem: str) -> None:
    with pytest.raises(BadInputError) as caught:
        check_notices(chosen)
    assert problem in str(caught.value)
