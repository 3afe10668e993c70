"""Bytes appear whole or not at all, in a folder and in a bucket, and every fault has one clear line."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spotlight_core.config.fleet import StoreConfig
from spotlight_core.errors import BadInputError, SpotlightError
from spotlight_core.storage import LocalStorage, ObjectStorage, check_url, open_storage, store_url
from spotlight_core.tensor_store import StoreUsage, TensorStore
from tests.core.commits import payload
from tests.core.fake_s3 import BUCKET, FakeS3, serving

URL = f"s3://{BUCKET}/runs/mine"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
REQUEST = "3/rollout/a prompt/with slashes/0"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        yield server


# A folder.


def test_a_folder_gives_back_lists_and_deletes(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "not" / "yet"))
    storage.write("a-1", b"one")
    storage.write("a-2", b"three")
    storage.write("b-1", b"")
    storage.write("a-1", b"uno!")
    assert storage.list() == {"a-1": 4, "a-2": 5, "b-1": 0}
    assert storage.list("a-") == {"a-1": 4, "a-2": 5}
    storage.delete("a-2")
    storage.delete("a-2")
    assert storage.read("a-1") == b"uno!"
    with pytest.raises(SpotlightError, match=f"cannot read a-2 from .*{tmp_path.name}.*No such file"):
        storage.read("a-2")


def test_what_is_written_is_synced_before_it_is_named_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new" / "store"
    synced: list[tuple[str, list[str]]] = []
    fsync = os.fsync

    def watched(handle: int) -> None:
        fsync(handle)
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        named = [path.name for path in folder.iterdir() if path.suffix != ".tmp"]
        synced.append(("file" if place.is_file() else str(place.relative_to(tmp_path)), named))

    monkeypatch.setattr(os, "fsync", watched)
    LocalStorage(folder).write("a-1", b"one")
    LocalStorage(folder).write("a-2", b"two")
    assert [place for place, _ in synced] == ["new", ".", "file", "new/store", "file", "new/store"]
    assert [sorted(named) for _, named in synced[2:]] == [[], ["a-1"], ["a-1"], ["a-1", "a-2"]]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; where none may be mounted, files of at most 64 KiB stand in for it."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here; the limit on file sizes is tested all the same")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_one_clear_error_and_leaves_no_partial_file(small_disk: Path) -> None:
    store = TensorStore.open(str(small_disk), 0)
    kept = store.put("first", 1, payload(0, values=8192))
    with pytest.raises(SpotlightError, match=f"{small_disk}.*No space left on device.*free space there"):
        store.put("second", 1, payload(1, values=65536))
    assert [path.name for path in small_disk.iterdir()] == [kept[0]]
    assert store.get(*kept) == payload(0, values=8192)
    store.put("third", 1, payload(2, values=8192))  # what fits is taken again


_LIMITED = """
import resource, signal, sys
from pathlib import Path
from spotlight_core.errors import SpotlightError
from spotlight_core.storage import LocalStorage

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
storage = LocalStorage(Path(sys.argv[1]))
storage.write("fits", bytes(1 << 16))
try:
    storage.write("too-large", bytes((1 << 16) + 1))
except SpotlightError as error:
    print(error)
"""


def test_a_file_that_cannot_be_written_whole_is_not_there(tmp_path: Path) -> None:
    written = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert written.stdout == (
        f"cannot write 65537 bytes to the Tensor Store's folder {tmp_path} (File too large): "
        "free space there, or set fleet.store.url to another place\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpotlightError, match=r"cannot make the Tensor Store's folder .*file/store"):
        open_storage(str(tmp_path / "file" / "store"))


# Addresses.


def test_each_run_has_its_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_url(StoreConfig(), Path("runs/mine"), "mine-1") == str(tmp_path / "runs/mine/tensor_store")
    assert store_url(StoreConfig(url="shared"), tmp_path, "mine-1") == str(tmp_path / "shared/mine-1")
    assert store_url(StoreConfig(url="file:///mnt/x/"), tmp_path, "mine-1") == "/mnt/x/mine-1"
    assert (
        store_url(StoreConfig(url="s3://bucket/prefix/"), tmp_path, "mine-1") == "s3://bucket/prefix/mine-1"
    )
    assert store_url(StoreConfig(url="gs://bucket"), tmp_path, "mine-1") == "gs://bucket/mine-1"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "fleet.store.url is empty"),
        ("ftp://host/folder", "begins with ftp://, which the Tensor Store cannot use: name a folder, s3://"),
        ("file:/folder", "neither a folder nor an address: write file:///folder"),
        ("s3:bucket", "neither a folder nor an address"),
        ("s3:///prefix", "names no bucket: write s3://bucket/prefix"),
        (f"s3://AKIA:{SECRET}@bucket/prefix", "holds a user or a key: leave it out"),
        ("/proc/spotlight", r"cannot be written \(/proc: .*\): name a folder that can"),
        (__file__, r"cannot be written .*Not a directory"),
        (f"{__file__}/store", r"cannot be written .*Not a directory"),
    ],
)
def test_an_address_that_cannot_be_used_is_found_before_the_run(url: str, problem: str) -> None:
    with pytest.raises(BadInputError, match=problem) as caught:
        check_url(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["/proc/spotlight", "s3://bucket/prefix", "gs://bucket/prefix"])
def test_a_place_that_is_not_to_be_tried_is_not_touched(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    check_url(url, try_it=False)

    with pytest.raises(BadInputError, match="begins with ftp://"):
        check_url("ftp://host/folder", try_it=False)


def test_the_check_of_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    check_url(str(tmp_path / "not" / "yet"))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(BadInputError, match=r"gs:// .* not installed: pip install 'spotlight-rl\[gcs\]'"):
        check_url("gs://bucket/prefix")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(BadInputError, match=r"s3:// .* not installed: pip install 'spotlight-rl\[s3\]'"):
        open_storage("s3://bucket/prefix")


# A bucket.


def test_a_store_in_a_bucket_puts_gets_discards_and_opens_again(s3: FakeS3) -> None:
    store = TensorStore.open(URL, 0)
    older = store.put(REQUEST, 4, payload(0))
    newer = store.put(REQUEST, 5, payload(1))
    other = store.put("another", 1, payload(2))
    assert s3.objects == {
        f"runs/mine/{newer[0]}": payload(1),
        f"runs/mine/{other[0]}": payload(2),
    }
    again = TensorStore.open(URL, 0)
    assert again.usage() == StoreUsage(commits=2, memory_bytes=0, durable_bytes=2 * len(payload()))
    assert again.get(*newer) == payload(1)
    with pytest.raises(SpotlightError, match=f"cannot read {older[0]} from .*{URL} .FileNotFoundError"):
        again.get(*older)
    again.discard(REQUEST)
    again.clear()
    assert s3.objects == {}
    assert all(signed.startswith("AWS4-HMAC-SHA256 ") for signed in s3.signed)


def test_a_bucket_lists_its_own_names_only(s3: FakeS3) -> None:
    s3.objects.update(
        {"runs/mine/a-1": b"1", "runs/mine/b-1": b"22", "runs/mine/deeper/a-2": b"3", "runs/a": b"4"}
    )
    assert ObjectStorage(URL).list() == {"a-1": 1, "b-1": 2}
    assert ObjectStorage(URL).list("a") == {"a-1": 1}


def test_a_large_commit_is_sent_whole_and_read_in_parts(s3: FakeS3) -> None:
    storage = ObjectStorage(URL)
    storage._files.default_block_size = 1 << 20  # of 50 MiB
    large, store = payload(values=1 << 20), TensorStore(storage, 0)
    ref, digest = store.put(REQUEST, 4, large)
    assert [asked for asked in s3.asked if asked.startswith("P")] == [f"PUT runs/mine/{ref}"]
    assert store.get(ref, digest) == large
    assert s3.asked.count(f"GET runs/mine/{ref}") == -(-len(large) // (1 << 20))


def test_many_threads_keep_every_last_commit_in_a_bucket(s3: FakeS3) -> None:
    store = TensorStore.open(URL, 0)

    def denoise(number: int) -> tuple[str, str]:
        for step in range(3):
            commit = store.put(f"3/rollout/{number}/0", step, payload(10 * number + step))
        return commit

    with ThreadPoolExecutor(4) as threads:
        commits = list(threads.map(denoise, range(8)))
    assert s3.objects == {
        f"runs/mine/{ref}": payload(10 * number + 2) for number, (ref, _) in enumerate(commits)
    }
    assert [store.get(*commit) for commit in commits] == [payload(10 * number + 2) for number in range(8)]


def test_a_damaged_object_is_found_by_its_digest(s3: FakeS3) -> None:
    ref, digest = TensorStore.open(URL, 0).put(REQUEST, 4, payload())
    data = bytearray(s3.objects[f"runs/mine/{ref}"])
    data[-1] ^= 1
    s3.objects[f"runs/mine/{ref}"] = bytes(data)
    with pytest.raises(SpotlightError, match=f"{ref} in {URL} holds .* instead of {digest[:12]}"):
        TensorStore.open(URL, 0).get(ref, digest)


@pytest.mark.parametrize("failure", ["SlowDown", "InternalError"])
def test_an_answer_that_passes_is_asked_for_again(s3: FakeS3, failure: str) -> None:
    store = TensorStore.open(URL, 0)
    s3.asked.clear()
    s3.errors = [failure]
    ref, digest = store.put(REQUEST, 4, payload())
    assert s3.asked == [f"PUT runs/mine/{ref}"] * 2
    s3.errors = [failure]
    assert store.get(ref, digest) == payload()


@pytest.mark.parametrize("failure", ["AccessDenied", "InvalidAccessKeyId", "NoSuchBucket"])
def test_a_refusal_is_one_clear_error_without_a_credential(s3: FakeS3, failure: str) -> None:
    s3.always = failure
    with pytest.raises(BadInputError, match="credentials may read, write, list and delete there") as caught:
        check_url(URL)
    assert caught.value.problem.startswith("fleet.store.url: cannot ")
    assert f"the Tensor Store's bucket {URL} (" in caught.value.problem
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "AKIA" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_refused_commit_keeps_the_one_before(s3: FakeS3) -> None:
    store = TensorStore.open(URL, 0)
    kept = store.put(REQUEST, 4, payload(0))
    s3.always = "AccessDenied"
    with pytest.raises(SpotlightError, match=r"cannot write \d+ bytes to .*PermissionError: Access Denied"):
        store.put(REQUEST, 5, payload(1))
    s3.always = None
    assert store.get(*kept) == payload(0)
    assert list(s3.objects) == [f"runs/mine/{kept[0]}"]


def test_an_old_commit_that_cannot_be_removed_leaves_with_a_later_one(s3: FakeS3) -> None:
    store = TensorStore.open(URL, 0)
    store.put(REQUEST, 4, payload(0))
    delete = store._storage.delete

    def refused(name: str) -> None:
        raise SpotlightError(f"cannot remove {name}", "ask again")

    store._storage.delete = refused  # type: ignore[method-assign]
    store.put(REQUEST, 5, payload(1))
    assert len(s3.objects) == 2
    store._storage.delete = delete  # type: ignore[method-assign]
    last = store.put(REQUEST, 6, payload(2))
    assert list(s3.objects) == [f"runs/mine/{last[0]}"]


def test_the_check_of_a_bucket_tries_every_right_and_leaves_nothing_behind(s3: FakeS3) -> None:
    check_url(URL)
    assert s3.objects == {}
    assert {"PUT", "GET", "DELETE"} <= {asked.split()[0] for asked in s3.asked}


def test_an_endpoint_that_is_not_there_is_an_error(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(BadInputError, match="EndpointConnectionError"):
        check_url(URL)


def test_a_password_in_an_endpoints_address_is_not_repeated(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://minio:{SECRET[:12]}@127.0.0.1:9")
    with pytest.raises(BadInputError, match="credentials may read") as caught:
        check_url(URL)
    assert SECRET[:12] not in str(caught.value)


def test_a_folder_is_its_own_storage(tmp_path: Path) -> None:
    assert isinstance(open_storage(f"file://{tmp_path}"), LocalStorage)
