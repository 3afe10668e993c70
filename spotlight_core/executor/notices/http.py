"""An address that answers 204 or 404 in peace and 200 for a notice: a hook for anything else."""

from urllib.parse import quote

from spotlight_core.config.fleet import HttpNoticesConfig
from spotlight_core.executor.notices.base import Endpoint, EndpointWatcher, ranks_from, seconds_from


class HttpWatcher(EndpointWatcher):
    """A 200 that holds anything but a notice is none: it may come from a proxy."""

    source = "http"

    def __init__(self, config: HttpNoticesConfig, node: str, grace_seconds: float) -> None:
        url = config.url.replace("{node}", quote(node, safe=""))
        super().__init__(Endpoint(url, "the notices' address", proxied=True))
        self._grace_seconds = grace_seconds

    def _poll(self) -> float | None:
        answer = self._endpoint.ask("GET", "", known=(200, 204, 404))
        if answer is None or answer.status != 200:
            return None
        seconds = seconds_from(answer.body, self._grace_seconds)
        self.ranks = ranks_from(answer.body)
        if seconds is None:
            self._endpoint.nonsense(answer)
        return seconds
