"""Compute Engine's metadata: 30 seconds before a preemption, 60 before a maintenance that ends a machine."""

import math
from urllib.parse import quote

from spotlight_core.config.fleet import GcpNoticesConfig
from spotlight_core.executor.notices.base import Answer, Endpoint, EndpointWatcher

PREEMPTED_SECONDS = 30.0
MAINTENANCE_SECONDS = 60.0
_INSTANCE = "/computeMetadata/v1/instance"
_FLAVOR = {"Metadata-Flavor": "Google"}
_TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"
_MAINTENANCE = ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", _TERMINATE)


class GcpWatcher(EndpointWatcher):
    """Waits at the service for about ``poll_seconds``, so that a change of ``preempted`` is heard at once."""

    source = "gcp"

    def __init__(self, config: GcpNoticesConfig) -> None:
        super().__init__(Endpoint(config.endpoint, "Compute Engine's metadata service"))
        self._wait_seconds = max(1, math.ceil(config.poll_seconds))
        self._etag = ""

    def _poll(self) -> float | None:
        preempted = self._preempted()
        if preempted is None:
            return None
        if preempted.text == "TRUE":
            return PREEMPTED_SECONDS
        maintenance = self._valid("/maintenance-event", 0.0, _MAINTENANCE)
        if maintenance is None:
            return None
        return MAINTENANCE_SECONDS if maintenance.text == _TERMINATE else None

    def _preempted(self) -> Answer | None:
        """The first question does not wait: without an etag, a change of before would never be heard."""
        path, patience = "/preempted", 0.0
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={self._wait_seconds}&last_etag={quote(self._etag)}"
            patience = float(self._wait_seconds)
        answer = self._valid(path, patience, ("TRUE", "FALSE"))
        self._etag = answer.headers.get("ETag", "") if answer is not None else ""
        return answer

    def _valid(self, path: str, patience_seconds: float, values: tuple[str, ...]) -> Answer | None:
        """An answer of the real service, which signs with its flavor: a captive network's would not."""
        answer = self._endpoint.ask(
            "GET", _INSTANCE + path, headers=_FLAVOR, patience_seconds=patience_seconds
        )
        if answer is None:
            return None
        if answer.headers.get("Metadata-Flavor") != "Google" or answer.text not in values:
            self._endpoint.nonsense(answer)
            return None
        return answer
