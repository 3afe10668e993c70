"""Where the Tensor Store's bytes rest: a folder, or a bucket of S3 or Google Cloud Storage.

A name appears with all of its bytes or not at all, whatever kills the writer.  Errors name the place and
the remedy, and never a credential: what a cloud's library says is quoted without its cause.
"""

import contextlib
import errno
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import psutil

from spotlight_core.config.fleet import StoreConfig
from spotlight_core.durable import fsync_folder, write_bytes
from spotlight_core.errors import BadInputError, SpotlightError

T = TypeVar("T")

_EXTRAS = {"s3": "s3", "gs": "gcs"}  # scheme -> the extra that installs its library
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMPORARY = ".tmp"
_CLOCKS_SECONDS = 2.0  # by which a process's start and a file's time may disagree


class Storage(Protocol):
    """Named bytes.  Every method may be called from several threads and raises SpotlightError."""

    where: str
    """The place as messages name it."""

    def write(self, name: str, data: bytes) -> None:
        """Durable when it returns; replaces what had the name."""
        ...

    def read(self, name: str) -> bytes: ...

    def delete(self, name: str) -> None:
        """No such name is fine."""
        ...

    def list(self, prefix: str = "") -> dict[str, int]:
        """Bytes of each name that begins with ``prefix``."""
        ...

    def sweep(self) -> None:
        """Remove what dead writers left half-written."""
        ...


class LocalStorage:
    """Files of one folder, made if there is none.

    A file is written under another name, synced, renamed, and its folder synced: a power cut right after
    ``write`` returned loses nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = Path(folder)
        with self._said("make"):
            missing = [place for place in (self._folder, *self._folder.parents) if not place.exists()]
            self._folder.mkdir(parents=True, exist_ok=True)
            for place in missing:  # a commit in a folder that a power cut undoes would be lost too
                fsync_folder(place.parent)

    def write(self, name: str, data: bytes) -> None:
        with self._said(f"write {len(data)} bytes to"):
            write_bytes(self._folder / name, data)

    def read(self, name: str) -> bytes:
        with self._said(f"read {name} from"):
            return (self._folder / name).read_bytes()

    def delete(self, name: str) -> None:
        with self._said(f"remove {name} from"):
            (self._folder / name).unlink(missing_ok=True)

    def list(self, prefix: str = "") -> dict[str, int]:
        with self._said("list"):
            return {
                path.name: path.stat().st_size
                for path in sorted(self._folder.iterdir())
                if path.name.startswith(prefix) and not path.name.startswith(".")
            }

    def sweep(self) -> None:
        with self._said("sweep"):
            for path in self._folder.glob(f".*{_TEMPORARY}"):
                writer = path.name.split(".")[-3]
                if writer.isdecimal() and not _still_writes(int(writer), path):
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or type(error).__name__
            remedy = "check that the folder exists and can be written"
            if error.errno in _FULL:
                remedy = "free space there, or set fleet.store.url to another place"
            raise SpotlightError(
                f"cannot {what} the Tensor Store's folder {self.where} ({reason})", remedy
            ) from error


def _still_writes(writer: int, temporary: Path) -> bool:
    """Whether the process lives that began ``temporary``, and not a younger one with its number."""
    try:
        return psutil.Process(writer).create_time() <= temporary.stat().st_mtime + _CLOCKS_SECONDS
    except (psutil.NoSuchProcess, FileNotFoundError):
        return False


class ObjectStorage:
    """Objects of a bucket under a prefix, through fsspec: ``s3://bucket/prefix`` or ``gs://bucket/prefix``.

    An upload is whole or not there.  Credentials and endpoint are the library's own to find: the
    environment, its files, the machine's role.
    """

    def __init__(self, url: str) -> None:
        scheme = _scheme(url)
        self.where = url.rstrip("/")
        self._root = self.where.split("://", 1)[1]
        with self._said("open"):
            self._files = _filesystem(scheme)
        # A single upload below 4 GiB: parts of a killed multipart upload would stay, unseen and billed.
        self._upload: dict[str, Any] = {"chunksize": 2**31} if scheme == "s3" else {}

    def write(self, name: str, data: bytes) -> None:
        with self._said(f"write {len(data)} bytes to"):
            self._files.pipe_file(f"{self._root}/{name}", data, **self._upload)

    def read(self, name: str) -> bytes:
        with self._said(f"read {name} from"):
            return bytes(self._files.cat_file(f"{self._root}/{name}"))

    def delete(self, name: str) -> None:
        with self._said(f"remove {name} from"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")

    def list(self, prefix: str = "") -> dict[str, int]:
        with self._said("list"):
            found: Mapping[str, Any] = self._files.find(self._root, detail=True)
        sizes = {
            path.removeprefix(f"{self._root}/"): int(info["size"]) for path, info in sorted(found.items())
        }
        return {name: size for name, size in sizes.items() if name.startswith(prefix) and "/" not in name}

    def sweep(self) -> None:
        """Nothing: an upload that was cut off never became an object."""

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        try:
            yield
        except SpotlightError:
            raise
        except Exception as error:  # each cloud's library has its own family of errors, and they are not ours
            text = _without_secrets(str(error).split("\n", 1)[0])
            raise SpotlightError(
                f"cannot {what} the Tensor Store's bucket {self.where} ({type(error).__name__}: {text})",
                "check that the bucket exists and that this machine's credentials may read, write, list and "
                "delete there",
            ) from None  # a cause may quote headers


def open_storage(url: str) -> Storage:
    """The storage behind a folder's path or an address.

    Raises:
        BadInputError: a scheme that is not known, or whose library is not installed.
        SpotlightError: the folder cannot be made.
    """
    if _scheme(url) in _EXTRAS:
        return ObjectStorage(url)
    return LocalStorage(_local_path(url))


def store_url(config: StoreConfig, run_folder: Path, run_id: str) -> str:
    """Where the commits of one run go: its own folder, or its own part of the place that the recipe names."""
    if config.url is None:
        return str(Path(run_folder).absolute() / "tensor_store")
    if _scheme(config.url) in _EXTRAS:
        return f"{config.url.rstrip('/')}/{run_id}"
    return str(_local_path(config.url) / run_id)


def check_url(url: str, *, try_it: bool = True) -> None:
    """That commits can be kept there, tried with one small object; leaves nothing behind.

    Without ``try_it`` only the address itself is looked at, and nothing behind it.

    Raises:
        BadInputError: an unknown scheme, a missing library, a folder or bucket that cannot be used.
    """
    scheme = _scheme(url)
    if not try_it:
        return
    if scheme in _EXTRAS:
        _tried(lambda: _probe(ObjectStorage(url)))
        return
    # The folder itself is not made: whatever exists above it decides.
    place = _local_path(url)
    folder = next(parent for parent in (place, *place.parents) if os.path.lexists(parent))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"spotlight")
            file.flush()
    except OSError as error:
        raise BadInputError(
            f"fleet.store.url = {url!r} cannot be written ({folder}: {error.strerror or error})",
            "name a folder that can, with space left on its disk",
        ) from error


def _probe(storage: Storage) -> None:
    name, data = f"probe-{uuid.uuid4().hex}", b"spotlight"
    storage.list("probe-")
    storage.write(name, data)
    try:
        if storage.read(name) != data:
            raise SpotlightError(
                f"{storage.where} gives back other bytes than were written", "name another place"
            )
    finally:
        storage.delete(name)


def _tried(call: Callable[[], T]) -> T:
    try:
        return call()
    except BadInputError:
        raise
    except SpotlightError as error:
        raise BadInputError(f"fleet.store.url: {error.problem}", error.remedy) from None


def _filesystem(scheme: str) -> Any:
    import fsspec  # with s3's library 0.3 seconds, which a run on a local folder never pays

    # No cached listings: another process may have written since.
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        options["config_kwargs"] = {
            "connect_timeout": 5,
            "read_timeout": 30,
            "retries": {"max_attempts": 3, "mode": "standard"},  # 5xx, throttling and broken connections
        }
    try:
        files = fsspec.filesystem(scheme, **options)
    except ImportError:
        extra = _EXTRAS[scheme]
        raise BadInputError(
            f"{scheme}:// in fleet.store.url needs a library that is not installed",
            f"pip install 'spotlight-rl[{extra}]'",
        ) from None
    if scheme == "s3":
        files.retries = (
            2  # s3fs's own, around those above: its default of 5 makes minutes of a wrong endpoint
        )
    return files


def _scheme(url: str) -> str:
    """``s3``, ``gs``, or ``file``, which a plain path is too."""
    if not url.strip():
        raise BadInputError(
            "fleet.store.url is empty", "name a folder, s3://bucket/prefix or gs://bucket/prefix"
        )
    if "://" not in url:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", url):  # file:/x and s3:bucket would be folders here
            raise BadInputError(
                f"fleet.store.url = {url!r} is neither a folder nor an address",
                "write file:///folder, s3://bucket/prefix or gs://bucket/prefix; ./ before a folder's name",
            )
        return "file"
    parts = urlsplit(url)
    if parts.scheme not in ("file", *_EXTRAS):
        raise BadInputError(
            f"fleet.store.url begins with {parts.scheme}://, which the Tensor Store cannot use",
            "name a folder, s3://bucket/prefix or gs://bucket/prefix",
        )
    if "@" in parts.netloc:
        raise BadInputError(
            "fleet.store.url holds a user or a key",
            "leave it out: credentials come from the environment or the machine's role",
        )
    if parts.scheme in _EXTRAS and not parts.netloc:
        raise BadInputError(
            f"fleet.store.url = {url!r} names no bucket", f"write {parts.scheme}://bucket/prefix"
        )
    return parts.scheme


def _local_path(url: str) -> Path:
    """Absolute, since the process that keeps the store may run in another folder."""
    return Path(url.removeprefix("file://")).expanduser().absolute()


def _without_secrets(text: str) -> str:
    for name in _SECRETS:
        secret = os.environ.get(name, "")
        text = text.replace(secret, "***") if secret else text
    return re.sub(r"://[^/\s]*@", "://***@", text)  # an endpoint's address may hold a user and a password
