"""Commits come back bit for bit, never damaged, and outlive the process that kept them."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from spotlight_core.arrays import arrays_digest, from_bytes, payload_digest
from spotlight_core.errors import SpotlightError
from spotlight_core.storage import LocalStorage
from spotlight_core.tensor_store import StoreUsage, TensorStore
from tests.core.commits import payload, state

REQUEST = "3/rollout/a prompt/with slashes/0"
MEMORY_BYTES = 1 << 20


def opened(folder: Path, memory_bytes: int = MEMORY_BYTES, kept_commits: int = 1) -> TensorStore:
    return TensorStore.open(str(folder), memory_bytes, kept_commits)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("memory_bytes", [0, MEMORY_BYTES])
def test_a_commit_is_read_back_bit_for_bit(tmp_path: Path, memory_bytes: int) -> None:
    store, before = opened(tmp_path, memory_bytes), state()
    ref, digest = store.put(REQUEST, 4, payload())
    after = from_bytes(store.get(ref, digest))
    assert digest == arrays_digest(before)
    assert sorted(after) == sorted(before)
    for name, array in before.items():
        assert after[name].dtype == np.float32
        assert after[name].tobytes() == array.tobytes()


def test_an_acknowledged_commit_is_a_file_with_its_bytes(tmp_path: Path) -> None:
    ref, _ = opened(tmp_path).put(REQUEST, 4, payload())
    assert files(tmp_path) == [ref]
    assert (tmp_path / ref).read_bytes() == payload()


def test_a_store_opened_again_serves_every_acknowledged_commit(tmp_path: Path) -> None:
    store = opened(tmp_path)
    commits = {number: store.put(f"3/rollout/{number}/0", number, payload(number)) for number in range(5)}
    again = opened(tmp_path)
    assert {number: again.get(*commit) for number, commit in commits.items()} == {
        number: payload(number) for number in range(5)
    }
    assert again.usage() == StoreUsage(commits=5, memory_bytes=0, durable_bytes=5 * len(payload()))


def test_the_older_commit_leaves_after_the_newer_is_durable(tmp_path: Path) -> None:
    store = opened(tmp_path)
    older, _ = store.put(REQUEST, 4, payload(0))
    held: list[list[str]] = []
    write = store._storage.write

    def watched(name: str, data: bytes) -> None:
        write(name, data)
        held.append(files(tmp_path))

    store._storage.write = watched  # type: ignore[method-assign]
    newer, digest = store.put(REQUEST, 5, payload(1))
    assert held == [sorted([older, newer])]
    assert files(tmp_path) == [newer]
    assert store.get(newer, digest) == payload(1)


def test_the_same_commit_again_replaces_it(tmp_path: Path) -> None:
    store = opened(tmp_path)
    ref, first = store.put(REQUEST, 4, payload(0))
    again, second = store.put(REQUEST, 4, payload(1))
    assert again == ref
    assert files(tmp_path) == [ref]
    assert store.get(ref, second) == payload(1)
    with pytest.raises(SpotlightError, match=f"holds {second[:12]} instead of {first[:12]}"):
        store.get(ref, first)


def test_a_late_commit_of_a_lower_step_removes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    last = store.put(REQUEST, 8, payload(1))
    late = store.put(REQUEST, 6, payload(0))
    assert store.get(*last) == payload(1)
    assert files(tmp_path) == sorted([last[0], late[0]])


@pytest.mark.parametrize("kept", [1, 2, 3, 7])
def test_a_request_keeps_as_many_commits_as_asked_for(tmp_path: Path, kept: int) -> None:
    store = opened(tmp_path, kept_commits=kept)
    commits = [store.put(REQUEST, step, payload(step)) for step in (2, 4, 6, 8, 10)]
    assert files(tmp_path) == sorted(ref for ref, _ in commits[-kept:])


def test_damaged_bytes_are_refused_before_they_are_written(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(SpotlightError, match=f"commit of {REQUEST} at denoise step 4 arrived damaged"):
        store.put(REQUEST, 4, payload()[:-1])
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_commit_damaged_on_disk_is_refused(tmp_path: Path, damage: str) -> None:
    ref, digest = opened(tmp_path).put(REQUEST, 4, payload())
    path = tmp_path / ref
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:20])
    else:
        path.unlink()
    with pytest.raises(SpotlightError, match=path.name):
        opened(tmp_path).get(ref, digest)


def test_another_digest_is_refused_though_memory_holds_the_commit(tmp_path: Path) -> None:
    store = opened(tmp_path)
    ref, _ = store.put(REQUEST, 4, payload())
    with pytest.raises(SpotlightError, match="instead of 000000000000"):
        store.get(ref, "0" * 64)


@pytest.mark.parametrize("ref", ["../secret", "/etc/passwd", "", "3-0.safetensors"])
def test_a_ref_that_names_no_commit_reads_nothing(tmp_path: Path, ref: str) -> None:
    with pytest.raises(SpotlightError, match="does not name a commit"):
        opened(tmp_path).get(ref, "0" * 64)


def test_discard_forgets_one_request(tmp_path: Path) -> None:
    store = opened(tmp_path, kept_commits=2)
    gone = [store.put(REQUEST, step, payload()) for step in (4, 5)]
    stays = store.put("another", 4, payload(1))
    store.discard(REQUEST)
    store.discard(REQUEST)
    assert files(tmp_path) == [stays[0]]
    assert store.get(*stays) == payload(1)
    assert store.usage() == StoreUsage(commits=1, memory_bytes=len(payload()), durable_bytes=len(payload()))
    for commit in gone:
        with pytest.raises(SpotlightError):
            store.get(*commit)


def test_earlier_iterations_are_forgotten_and_the_rest_stays(tmp_path: Path) -> None:
    ids = ["2/rollout/a/0", "9/explore/a/0", "10/rollout/a/0", "11/rollout/a/0", "no iteration"]
    store = opened(tmp_path)
    refs = {name: store.put(name, 1, payload())[0] for name in ids}
    opened(tmp_path).forget_before(10)
    assert files(tmp_path) == sorted(refs[name] for name in ids[2:])


def test_clear_leaves_nothing_but_what_is_not_ours(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(REQUEST, 4, payload())
    opened(tmp_path).put("another", 4, payload())  # unknown to the first
    (tmp_path / "notes.txt").write_text("mine")
    store.clear()
    assert files(tmp_path) == ["notes.txt"]
    assert store.usage() == StoreUsage(commits=0, memory_bytes=0, durable_bytes=0)


def test_memory_is_bounded_and_the_oldest_leaves_it_first(tmp_path: Path) -> None:
    size = len(payload())
    store = opened(tmp_path, memory_bytes=2 * size)
    commits = [store.put(f"request {number}", 1, payload(number)) for number in range(3)]
    assert store.usage() == StoreUsage(commits=3, memory_bytes=2 * size, durable_bytes=3 * size)
    for ref, _ in commits:
        (tmp_path / ref).unlink()
    with pytest.raises(SpotlightError, match=commits[0][0]):
        store.get(*commits[0])
    assert [store.get(*commit) for commit in commits[1:]] == [payload(1), payload(2)]


def test_a_payload_larger_than_the_memory_is_served_from_disk_and_drives_nothing_out(tmp_path: Path) -> None:
    small, large = payload(0, values=64), payload(1, values=4096)
    store = opened(tmp_path, memory_bytes=len(small))
    first = store.put("small", 1, small)
    second = store.put("large", 1, large)
    assert store.usage().memory_bytes == len(small)
    (tmp_path / first[0]).unlink()
    assert store.get(*first) == small
    assert store.get(*second) == large


def test_a_write_that_fails_keeps_what_was_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    before = store.put(REQUEST, 4, payload(0))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for step in (4, 5):
            with pytest.raises(SpotlightError, match=r"No space left on device.*free space there"):
                store.put(REQUEST, step, payload(1))
    assert files(tmp_path) == [before[0]]
    assert store.get(*before) == payload(0)
    assert store.usage() == StoreUsage(commits=1, memory_bytes=0, durable_bytes=len(payload()))


def test_many_threads_keep_every_last_commit(tmp_path: Path) -> None:
    store = opened(tmp_path, memory_bytes=4 * len(payload()))

    def denoise(number: int) -> tuple[str, str]:
        for step in range(1, 8):
            commit = store.put(f"3/rollout/{number}/0", step, payload(100 * number + step))
        return commit

    with ThreadPoolExecutor(8) as threads:
        commits = list(threads.map(denoise, range(16)))
    assert [store.get(*commit) for commit in commits] == [payload(100 * number + 7) for number in range(16)]
    assert files(tmp_path) == sorted(ref for ref, _ in commits)
    assert store.usage().memory_bytes == 4 * len(payload())


def test_a_slow_write_holds_up_no_reader(tmp_path: Path) -> None:
    store = opened(tmp_path)
    known = store.put("known", 1, payload())
    entered, go_on = threading.Event(), threading.Event()
    write = store._storage.write

    def slow(name: str, data: bytes) -> None:
        entered.set()
        assert go_on.wait(60)
        write(name, data)

    store._storage.write = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(store.put, "slow", 1, payload(1))
        assert entered.wait(60)
        assert store.get(*known) == payload()
        assert store.usage().commits == 1
        go_on.set()
        assert store.get(*writing.result()) == payload(1)


_WRITER = """
import sys
from spotlight_core.tensor_store import TensorStore
from tests.core.commits import payload

store, payloads = TensorStore.open(sys.argv[1], 0), [payload(seed, values=1 << 21) for seed in range(2)]
step = int(sys.argv[2])
while True:
    step += 1
    print(step, *store.put("3/rollout/a/0", step, payloads[step % 2]), flush=True)
"""


def _killed_in_a_write(folder: Path, from_step: int) -> str:
    """The last line of a writer's acknowledgements; it is killed while a temporary file is there."""
    command = [sys.executable, "-c", _WRITER, str(folder), str(from_step)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(2)]
    while not _temporary(folder):
        assert writer.poll() is None
        time.sleep(0.0005)
    writer.send_signal(signal.SIGKILL)
    lines += writer.stdout.readlines()
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    return [line for line in lines if line.endswith("\n")][-1]


def _temporary(folder: Path) -> list[Path]:
    return list(folder.glob(".*.tmp"))


def test_a_writer_killed_in_a_write_leaves_no_corrupt_commit(tmp_path: Path) -> None:
    last = _killed_in_a_write(tmp_path, 0)
    for _ in range(20):
        if _temporary(tmp_path):
            break
        last = _killed_in_a_write(tmp_path, int(last.split()[0]))
    assert len(_temporary(tmp_path)) == 1
    step, ref, digest = last.split()
    store = opened(tmp_path)
    assert _temporary(tmp_path) == []
    # Acknowledged and not yet removed, or replaced by a newer one whose acknowledgement was cut off.
    found = {name: payload_digest((tmp_path / name).read_bytes()) for name in files(tmp_path)}
    steps = sorted(int(name.removesuffix(".safetensors").rsplit("-", 1)[1]) for name in found)
    assert set(steps) <= {int(step) - 1, int(step), int(step) + 1}
    assert steps[-1] >= int(step)
    if ref in found:
        assert payload_digest(store.get(ref, digest)) == digest


def test_only_temporary_files_of_dead_processes_are_swept(tmp_path: Path) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    ours, earlier, gone = (
        f".x.safetensors.{pid}.{number}.tmp"
        for number, pid in enumerate([os.getpid(), os.getpid(), int(dead.stdout)])
    )
    for name in (ours, earlier, gone, ".notes.tmp"):
        (tmp_path / name).write_bytes(b"half")
    os.utime(tmp_path / earlier, (1e9, 1e9))  # before this process: of another one with its number
    storage = LocalStorage(tmp_path)
    assert storage.list() == {}
    storage.sweep()
    assert files(tmp_path) == sorted([ours, ".notes.tmp"])
