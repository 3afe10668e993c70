"""The two hooks for anything else: a file that appears, an address that answers."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotlight_core.config.fleet import FileNoticesConfig, HttpNoticesConfig
from spotlight_core.executor.notices.file import FileWatcher
from spotlight_core.executor.notices.http import HttpWatcher
from tests.core.executor.notices.endpoint import HTML, Reply, Server, serving

SAID = [
    (b"", 30.0),
    (b" \n", 30.0),
    (b"{}", 30.0),
    (b'{"seconds_left": 12}', 12.0),
    (b'{"seconds_left": 0.5, "why": "maintenance"}', 0.5),
]
NONSENSE = [
    *(b'{"seconds_left": -1}', b'{"seconds_left": NaN}', b'{"seconds_left": Infinity}'),
    *(
        b'{"seconds_left": "12"}',
        b'{"seconds_left": true}',
        b'{"seconds_left": 1',
        b"[12]",
        b"[" * 100_000,
        b"\xff",
        HTML,
    ),
]

RANKS = [
    (b'{"seconds_left": 12, "ranks": [3, 1]}', (1, 3)),
    (b'{"ranks": [0, 0]}', (0,)),
    (b'{"seconds_left": 12}', ()),
    (b"", ()),
    (b'{"ranks": []}', ()),
    (b'{"ranks": [1, "2"]}', ()),
    (b'{"ranks": [-1]}', ()),
    (b'{"ranks": [true]}', ()),
    (b'{"ranks": 1}', ()),
]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(lambda asked: Reply(status=404)) as state:
        yield state


@pytest.fixture
def hook(server: Server) -> Iterator[HttpWatcher]:
    watching = HttpWatcher(
        HttpNoticesConfig(type="http", url=f"{server.url}/key-4711/{{node}}/"), "spot-1", 30.0
    )
    yield watching
    watching.close()


def file_watcher(tmp_path: Path) -> FileWatcher:
    return FileWatcher(FileNoticesConfig(type="file", path=f"{tmp_path}/notice-{{node}}"), "spot-1", 30.0)


@pytest.mark.parametrize(("body", "seconds"), SAID)
def test_a_file_that_appears_is_a_notice(tmp_path: Path, body: bytes, seconds: float) -> None:
    watcher = file_watcher(tmp_path)
    assert watcher.poll() is None
    (tmp_path / "notice-spot-2").write_bytes(body)
    assert watcher.poll() is None
    (tmp_path / "notice-spot-1").write_bytes(body)
    assert [watcher.poll(), watcher.poll()] == [seconds, seconds]
    (tmp_path / "notice-spot-1").unlink()
    assert watcher.poll() is None


@pytest.mark.parametrize("body", NONSENSE)
def test_a_file_of_nonsense_is_a_notice_all_the_same_and_said_once(
    tmp_path: Path, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = file_watcher(tmp_path)
    (tmp_path / "notice-spot-1").write_bytes(body)
    assert [watcher.poll(), watcher.poll()] == [30.0, 30.0]
    (record,) = caplog.records
    assert record.getMessage() == (
        f'the notice {tmp_path}/notice-spot-1 is neither empty nor {{"seconds_left": 30}}: '
        "taken for 30 seconds"
    )


def test_a_file_that_cannot_be_read_is_no_notice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watcher = file_watcher(tmp_path)
    (tmp_path / "notice-spot-1").mkdir()
    assert [watcher.poll(), watcher.poll()] == [None, None]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("status", [204, 404])
def test_an_address_in_peace(hook: HttpWatcher, server: Server, status: int) -> None:
    server.broken = Reply(status=status)
    assert hook.poll() is None
    assert server.paths == ["GET /key-4711/spot-1/"]


@pytest.mark.parametrize(("body", "seconds"), SAID)
def test_an_address_that_answers_is_a_notice(
    hook: HttpWatcher, server: Server, body: bytes, seconds: float
) -> None:
    server.broken = Reply(body=body)
    assert [hook.poll(), hook.poll()] == [seconds, seconds]


@pytest.mark.parametrize(
    "broken",
    [
        *(Reply(body=body) for body in NONSENSE),
        *(Reply(status=status, body=b'{"seconds_left": 1}') for status in (302, 401, 429, 500, 503)),
        Reply(headers={"Content-Encoding": "gzip"}, body=b"not gzip"),
    ],
)
def test_an_address_out_of_order_is_no_notice_and_its_path_never_logged(
    hook: HttpWatcher, server: Server, broken: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="spotlight_core")
    server.broken = broken
    assert [hook.poll() for _ in range(3)] == [None] * 3
    server.broken = Reply(body=b'{"seconds_left": 7}')
    assert hook.poll() == 7.0
    said = [record.getMessage() for record in caplog.records if record.name.startswith("spotlight_core")]
    assert len(said) == 2
    assert said[0].startswith(f"the notices' address at {server.url} ")
    assert "key-4711" not in "".join(said)


@pytest.mark.usefixtures("impatient")
def test_an_address_that_hangs_is_no_notice(hook: HttpWatcher, server: Server) -> None:
    server.held = threading.Event()
    assert hook.poll() is None
    server.held.set()
    server.broken = Reply(body=b"")
    assert hook.poll() == 30.0


def test_an_answer_without_end_is_no_notice(hook: HttpWatcher, server: Server) -> None:
    server.broken = Reply(body=b" " * (1 << 21))
    assert hook.poll() is None


@pytest.mark.parametrize(("body", "ranks"), RANKS)
def test_a_hook_may_name_some_gpus_of_the_node(
    tmp_path: Path, server: Server, hook: HttpWatcher, body: bytes, ranks: tuple[int, ...]
) -> None:
    watcher = file_watcher(tmp_path)
    (tmp_path / "notice-spot-1").write_bytes(body)
    server.answer = lambda asked: Reply(body=body)
    assert watcher.poll() is not None
    assert hook.poll() is not None
    assert watcher.ranks == hook.ranks == ranks


def test_the_ranks_are_those_of_the_last_notice(tmp_path: Path) -> None:
    watcher = file_watcher(tmp_path)
    (tmp_path / "notice-spot-1").write_text('{"ranks": [1]}')
    watcher.poll()
    (tmp_path / "notice-spot-1").write_text("{}")
    watcher.poll()
    assert watcher.ranks == ()
