"""Preemption watchers, one file a provider: who tells a node that its machine will be taken away."""

import re
from urllib.parse import urlsplit

from spotlight_core.config.fleet import (
    AwsNoticesConfig,
    AzureNoticesConfig,
    FileNoticesConfig,
    GcpNoticesConfig,
    HttpNoticesConfig,
    KubernetesNoticesConfig,
    NoNoticesConfig,
    NoticesConfig,
)
from spotlight_core.errors import BadInputError
from spotlight_core.executor.notices.aws import AwsWatcher
from spotlight_core.executor.notices.azure import AzureWatcher
from spotlight_core.executor.notices.base import NoticeWatcher, watch
from spotlight_core.executor.notices.file import FileWatcher
from spotlight_core.executor.notices.gcp import GcpWatcher
from spotlight_core.executor.notices.http import HttpWatcher
from spotlight_core.executor.notices.kubernetes import KubernetesWatcher

__all__ = ["NoticeWatcher", "build_watcher", "check_notices", "watch"]


def build_watcher(config: NoticesConfig, node: str, grace_seconds: float) -> NoticeWatcher | None:
    """The watcher of one node; None when nobody tells.

    ``grace_seconds``: the notice taken for given by a provider that does not say.  To be closed.

    Raises:
        BadInputError: this machine is not what the recipe says, such as no pod of Kubernetes.
    """
    match config:
        case NoNoticesConfig():
            return None
        case AwsNoticesConfig():
            return AwsWatcher(config, grace_seconds)
        case GcpNoticesConfig():
            return GcpWatcher(config)
        case AzureNoticesConfig():
            return AzureWatcher(config, grace_seconds)
        case KubernetesNoticesConfig():
            return KubernetesWatcher(config, grace_seconds)
        case FileNoticesConfig():
            return FileWatcher(config, node, grace_seconds)
        case HttpNoticesConfig():
            return HttpWatcher(config, node, grace_seconds)


def check_notices(config: NoticesConfig) -> None:
    """What can be found wrong with the recipe's notices before a node is rented.

    Raises:
        BadInputError: an address that is none, a path that no node could find.
    """
    match config:
        case NoNoticesConfig():
            return
        case FileNoticesConfig():
            _check_path(config.path)
        case HttpNoticesConfig():
            _check_url("fleet.notices.url", config.url.replace("{node}", "node"))
        case KubernetesNoticesConfig():
            _check_url("fleet.notices.endpoint", config.endpoint)
            _check_private(config.endpoint)
        case _:
            _check_url("fleet.notices.endpoint", config.endpoint)


def _check_path(path: str) -> None:
    if not path.startswith("/"):
        raise BadInputError(
            f"fleet.notices.path = {path!r} is not absolute",
            "begin it with /: the nodes' working folders are not yours",
        )
    _check_places("fleet.notices.path", path.replace("{node}", "node"))


def _check_url(name: str, url: str) -> None:
    remedy = "write an address such as http://127.0.0.1:8080/notice"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise BadInputError(f"{name} is no address ({error})", remedy) from None
    if not usable or re.search(r"\s", url):
        raise BadInputError(f"{name} = {url!r} is no http or https address", remedy)
    _check_places(name, url)


def _check_places(name: str, text: str) -> None:
    unknown = re.search(r"\{[^}]*\}?", text)
    if unknown:
        raise BadInputError(f"{name} holds {unknown[0]!r}", "only {node} is filled in")


def _check_private(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        raise BadInputError(
            f"fleet.notices.endpoint = {endpoint!r} would send the service account's token in the clear",
            "begin it with https://",
        )
