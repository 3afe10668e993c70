"""Azure's Scheduled Events: at least 30 seconds before an eviction, sooner once it is acknowledged."""

import logging
from typing import Any

import tenacity

from spotlight_core.config.fleet import AzureNoticesConfig
from spotlight_core.executor.notices.base import Answer, Endpoint, EndpointWatcher, moment_of

ATTEMPTS = 3
_PAUSE_SECONDS = 0.2
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_ENDING = ("Preempt", "Terminate")

log = logging.getLogger(__name__)


class AzureWatcher(EndpointWatcher):
    """Events are told to every machine of a set, so that only those that name this one count."""

    source = "azure"

    def __init__(self, config: AzureNoticesConfig, grace_seconds: float) -> None:
        super().__init__(Endpoint(config.endpoint, "Azure's metadata service"))
        self._grace_seconds = grace_seconds
        self._machine = ""
        self._ours: list[dict[str, Any]] = []
        self._acknowledged: set[str] = set()

    def _poll(self) -> float | None:
        if not self._has_name():
            return None
        answer = self._endpoint.ask("GET", _EVENTS, headers=_HEADERS)
        if answer is None:
            return None
        events = (answer.record() or {}).get("Events")
        if not isinstance(events, list):
            self._endpoint.nonsense(answer)
            return None
        self._ours = [event for event in events if self._is_ours(event)]
        return min((self._seconds_left(event, answer) for event in self._ours), default=None)

    def acknowledge(self) -> None:
        """Let the events begin that concern this machine only; others' work may not be safe yet."""
        names = [str(event.get("EventId", "")) for event in self._ours if len(event["Resources"]) == 1]
        waiting = [name for name in names if name and name not in self._acknowledged]
        if not waiting:
            return
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_fixed(_PAUSE_SECONDS),
            retry=tenacity.retry_if_result(lambda answer: answer is None),
            retry_error_callback=lambda state: None,
        )
        body = {"StartRequests": [{"EventId": name} for name in waiting]}
        answer = retrying(lambda: self._endpoint.ask("POST", _EVENTS, headers=_HEADERS, json=body))
        if answer is None:
            log.warning("the eviction could not be acknowledged; the machine goes at the deadline")
        else:
            self._acknowledged.update(waiting)

    def _has_name(self) -> bool:
        if not self._machine:
            answer = self._endpoint.ask("GET", _NAME, headers=_HEADERS)
            self._machine = answer.text.casefold() if answer is not None else ""
        return bool(self._machine)

    def _is_ours(self, event: Any) -> bool:
        if not isinstance(event, dict) or event.get("EventType") not in _ENDING:
            return False
        resources = event.get("Resources")
        return isinstance(resources, list) and self._machine in (str(name).casefold() for name in resources)

    def _seconds_left(self, event: dict[str, Any], answer: Answer) -> float:
        """An event that has started names no time any more."""
        moment = moment_of(event.get("NotBefore"))
        if moment is not None:
            return answer.seconds_until(moment)
        return 0.0 if event.get("EventStatus") == "Started" else self._grace_seconds
