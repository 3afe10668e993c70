"""Kubernetes' watcher against a local API server."""

import datetime
import ipaddress
import json
import logging
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from spotlight_core.config.fleet import KubernetesNoticesConfig
from spotlight_core.errors import BadInputError
from spotlight_core.executor.notices import base
from spotlight_core.executor.notices.kubernetes import ENDING_TAINTS, KubernetesWatcher
from tests.core.executor.notices.endpoint import HTML, Asked, Reply, Server, serving

NODE = "GET /api/v1/nodes/gke-spot-1"
POD = "GET /api/v1/namespaces/training/pods/node-7"
POD_NAMES = {"POD_NAME": "node-7", "POD_NAMESPACE": "training"}


class FakeApiServer:
    def __init__(self) -> None:
        self.token = "first"
        self.taints: list[dict[str, Any]] | None = None
        self.node: dict[str, Any] = {"name": "gke-spot-1"}
        self.pod: dict[str, Any] = {"name": "node-7", "namespace": "training"}
        self.forbidden: set[str] = set()

    def __call__(self, asked: Asked) -> Reply:
        if asked.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if str(asked) in self.forbidden:
            return _status(403, "Forbidden", 'nodes "gke-spot-1" is forbidden: cannot get resource "nodes"')
        if str(asked) == NODE:
            spec = {"providerID": "gce://p/z/gke-spot-1"} | ({"taints": self.taints} if self.taints else {})
            return _json(200, {"kind": "Node", "apiVersion": "v1", "metadata": self.node, "spec": spec})
        if str(asked) == POD:
            return _json(200, {"kind": "Pod", "apiVersion": "v1", "metadata": self.pod, "spec": {}})
        return _status(404, "NotFound", "not found")


def _json(status: int, record: dict[str, Any]) -> Reply:
    return Reply(
        status=status, body=json.dumps(record).encode(), headers={"Content-Type": "application/json"}
    )


def _status(code: int, reason: str, message: str) -> Reply:
    record = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return _json(code, record | {"message": message, "reason": reason, "code": code})


@pytest.fixture
def api() -> FakeApiServer:
    return FakeApiServer()


@pytest.fixture
def server(api: FakeApiServer) -> Iterator[Server]:
    with serving(api) as state:
        yield state


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("first\n")
    return tmp_path


def build(url: str, account: Path, **environment: str) -> KubernetesWatcher:
    config = KubernetesNoticesConfig(type="kubernetes", endpoint=url)
    return KubernetesWatcher(config, 30.0, account, {"NODE_NAME": "gke-spot-1"} | environment)


@pytest.fixture
def watcher(server: Server, account: Path) -> Iterator[KubernetesWatcher]:
    watching = build(server.url, account, **POD_NAMES)
    yield watching
    watching.close()


def test_peace_reads_node_and_pod(watcher: KubernetesWatcher, api: FakeApiServer, server: Server) -> None:
    api.taints = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
    assert watcher.poll() is None
    assert server.paths == [NODE, POD]


def test_a_pod_that_is_not_named_is_not_read(server: Server, account: Path) -> None:
    assert build(server.url, account).poll() is None
    assert server.paths == [NODE]


@pytest.mark.parametrize("key", sorted(ENDING_TAINTS))
def test_a_taint_that_announces_the_nodes_end_is_a_notice(
    watcher: KubernetesWatcher, api: FakeApiServer, key: str
) -> None:
    api.taints = [{"key": key, "value": "1796094000", "effect": "NoSchedule"}]
    assert [watcher.poll(), watcher.poll()] == [30.0, 30.0]


def test_a_node_that_is_being_deleted_is_a_notice(watcher: KubernetesWatcher, api: FakeApiServer) -> None:
    api.node["deletionTimestamp"] = "2026-12-01T03:00:00Z"
    assert watcher.poll() == 30.0


@pytest.mark.parametrize(
    ("deletion", "seconds"),
    [
        ({"deletionTimestamp": "2026-12-01T03:00:12Z", "deletionGracePeriodSeconds": 15}, 12.0),
        ({"deletionTimestamp": "soon", "deletionGracePeriodSeconds": 15}, 15.0),
        ({"deletionTimestamp": "soon"}, 30.0),
    ],
)
def test_a_pod_that_is_being_deleted_says_until_when(
    watcher: KubernetesWatcher, api: FakeApiServer, deletion: dict[str, Any], seconds: float
) -> None:
    api.pod |= deletion
    api.taints = [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]
    assert watcher.poll() == seconds


def test_a_signal_is_a_notice_whatever_the_api_server_says(
    watcher: KubernetesWatcher, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("spotlight_core.executor.notices.kubernetes.monotonic", lambda: clock[0])
    watcher.terminated()
    clock[0] = 104.0
    watcher.terminated()  # told twice, counted from the first
    assert watcher.poll() == 26.0
    clock[0] = 200.0
    assert watcher.poll() == 0.0
    assert server.paths == []


def test_a_token_that_the_kubelet_renewed_is_used(
    watcher: KubernetesWatcher, api: FakeApiServer, account: Path
) -> None:
    assert watcher.poll() is None
    api.token = "second"
    api.node["deletionTimestamp"] = "2026-12-01T03:00:00Z"
    assert watcher.poll() is None
    (account / "token").write_text("second\n")
    assert watcher.poll() == 30.0


def test_a_missing_right_is_said_once_and_the_rest_still_heard(
    watcher: KubernetesWatcher, api: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api.forbidden = {NODE}
    assert [watcher.poll() for _ in range(3)] == [None] * 3
    api.pod["deletionTimestamp"] = "2026-12-01T03:00:12Z"
    assert watcher.poll() == 12.0
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert f"refuses {NODE}: give the pod's service account get on it" in said[0]
    assert api.token not in said[0]


@pytest.mark.parametrize(
    "broken",
    [
        Reply(status=500),
        Reply(status=404),
        Reply(body=HTML),
        Reply(body=b"{}"),
        Reply(body=b'{"metadata": {}, "spec": {"taints": "all"}}'),
        Reply(body=b'{"metadata": null, "spec": {"taints": [null, 3, "x"]}}'),
    ],
)
def test_a_server_out_of_order_is_no_notice(
    watcher: KubernetesWatcher, api: FakeApiServer, server: Server, broken: Reply
) -> None:
    server.broken = broken
    assert [watcher.poll() for _ in range(2)] == [None] * 2
    server.broken = None
    api.node["deletionTimestamp"] = "2026-12-01T03:00:00Z"
    assert watcher.poll() == 30.0


@pytest.mark.usefixtures("impatient")
def test_a_server_that_hangs_is_no_notice(
    watcher: KubernetesWatcher, api: FakeApiServer, server: Server
) -> None:
    api.node["deletionTimestamp"] = "2026-12-01T03:00:00Z"
    server.held = threading.Event()
    assert watcher.poll() is None
    server.held.set()
    assert watcher.poll() == 30.0


def test_a_machine_that_is_no_pod_is_told_so(tmp_path: Path) -> None:
    config = KubernetesNoticesConfig(type="kubernetes")
    with pytest.raises(BadInputError, match=r"NODE_NAME is empty: set it in the pod from .* spec\.nodeName"):
        KubernetesWatcher(config, 30.0, tmp_path, {})
    with pytest.raises(BadInputError, match="there is no service account's token at"):
        KubernetesWatcher(config, 30.0, tmp_path, {"NODE_NAME": "n"})
    (tmp_path / "token").write_text("first")
    with pytest.raises(BadInputError, match=r"certificate .*ca\.crt cannot be used"):
        KubernetesWatcher(config, 30.0, tmp_path, {"NODE_NAME": "n"})


def _certificate(folder: Path) -> ssl.SSLContext:
    """A certificate for 127.0.0.1 that signed itself, as ``ca.crt`` of the account."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
    made = made.not_valid_after(now + datetime.timedelta(days=1)).add_extension(names, critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    (folder / "ca.crt").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.crt", folder / "key.pem")
    return context


def test_only_the_clusters_own_authority_is_trusted(
    api: FakeApiServer, account: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    api.node["deletionTimestamp"] = "2026-12-01T03:00:00Z"
    with serving(api, tls=_certificate(account)) as server:
        assert build(server.url, account).poll() == 30.0
        other = tmp_path / "other"
        other.mkdir()
        (other / "token").write_text("first")
        _certificate(other)
        assert build(server.url, other).poll() is None
    assert "certificate" in caplog.text.casefold()


def test_the_token_is_never_sent_to_a_proxy(
    server: Server, api: FakeApiServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    api.node["deletionTimestamp"] = "2026-12-01T03:00:00Z"
    assert build(server.url, account).poll() == 30.0
    assert base.TIMEOUT_SECONDS == 2.0
