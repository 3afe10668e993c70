"""Kubernetes: SIGTERM, the pod's own deletion, and taints that announce the end of its node."""

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote

from spotlight_core.config.fleet import KubernetesNoticesConfig
from spotlight_core.errors import BadInputError
from spotlight_core.executor.notices.base import Answer, Endpoint, EndpointWatcher, moment_of

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ENDING_TAINTS = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "node.kubernetes.io/out-of-service",
        "node.cloudprovider.kubernetes.io/shutdown",
    }
)


class KubernetesWatcher(EndpointWatcher):
    """Reads its node, and its pod where POD_NAME and POD_NAMESPACE name it.

    The service account needs ``get`` on nodes, and on pods of its namespace.
    """

    source = "kubernetes"

    def __init__(
        self,
        config: KubernetesNoticesConfig,
        grace_seconds: float,
        account: Path = ACCOUNT,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """
        Raises:
            BadInputError: NODE_NAME is not set, or the service account's files are not there.
        """
        node = environment.get("NODE_NAME", "")
        if not node:
            raise BadInputError(
                "the environment variable NODE_NAME is empty",
                "set it in the pod from the field spec.nodeName (fleet.notices.type = kubernetes)",
            )
        self._grace_seconds = grace_seconds
        self._token = account / "token"
        if not self._token.is_file():
            raise BadInputError(
                f"there is no service account's token at {self._token}",
                "let the pod mount it (automountServiceAccountToken), or choose another fleet.notices.type",
            )
        self._node = f"/api/v1/nodes/{quote(node, safe='')}"
        pod, namespace = environment.get("POD_NAME", ""), environment.get("POD_NAMESPACE", "")
        named = bool(pod and namespace)
        self._pod = (
            f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}" if named else ""
        )
        super().__init__(Endpoint(config.endpoint, "the API server", verify=_trust(config.endpoint, account)))
        self._terminated_at: float | None = None

    def _poll(self) -> float | None:
        """What the signal says, without waiting for the API server; else the shorter of node and pod."""
        signalled = self._since_signal()
        if signalled is not None:
            return signalled
        told = [self._of_node()]
        if self._pod:
            told.append(self._of_pod())
        return min((seconds for seconds in told if seconds is not None), default=None)

    def terminated(self) -> None:
        """The process got SIGTERM.  Safe to call from a signal handler."""
        if self._terminated_at is None:
            self._terminated_at = monotonic()

    def _since_signal(self) -> float | None:
        if self._terminated_at is None:
            return None
        return max(0.0, self._grace_seconds - (monotonic() - self._terminated_at))

    def _of_node(self) -> float | None:
        found = self._read(self._node)
        if found is None:
            return None
        answer, node = found
        taints = _part(node, "spec").get("taints") or []
        if not isinstance(taints, list):
            self._endpoint.nonsense(answer)
            return None
        keys = {taint.get("key") for taint in taints if isinstance(taint, dict)}
        ends = not ENDING_TAINTS.isdisjoint(keys) or bool(_part(node, "metadata").get("deletionTimestamp"))
        return self._grace_seconds if ends else None

    def _of_pod(self) -> float | None:
        """A deletion's timestamp is when its grace will be over, not when it was asked for."""
        found = self._read(self._pod)
        if found is None:
            return None
        answer, pod = found
        metadata = _part(pod, "metadata")
        if not metadata.get("deletionTimestamp"):
            return None
        moment = moment_of(metadata["deletionTimestamp"])
        if moment is not None:
            return answer.seconds_until(moment)
        grace = metadata.get("deletionGracePeriodSeconds")
        return float(grace) if isinstance(grace, int) else self._grace_seconds

    def _read(self, path: str) -> tuple[Answer, dict[str, Any]] | None:
        """An object of the API; the token is read each time, since the kubelet renews it."""
        try:
            token = self._token.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            self._endpoint.trouble(f"cannot be asked: the token cannot be read ({type(error).__name__})")
            return None
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        answer = self._endpoint.ask("GET", path, known=(200, 403), headers=headers)
        if answer is None:
            return None
        if answer.status == 403:
            self._endpoint.trouble(f"refuses GET {path}: give the pod's service account get on it")
            return None
        record = answer.record()
        if record is None or "metadata" not in record:
            self._endpoint.nonsense(answer)
            return None
        return answer, record


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    part = record.get(name)
    return part if isinstance(part, dict) else {}


def _trust(endpoint: str, account: Path) -> ssl.SSLContext | bool:
    """The cluster's own authority, which no public list holds."""
    if not endpoint.startswith("https://"):
        return True
    authority = account / "ca.crt"
    try:
        return ssl.create_default_context(cafile=str(authority))
    except (OSError, ssl.SSLError) as error:
        raise BadInputError(
            f"the cluster's certificate {authority} cannot be used ({error})",
            "mount the service account into the pod",
        ) from None
