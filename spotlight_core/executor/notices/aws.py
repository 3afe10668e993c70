"""EC2's instance metadata, version 2: two minutes before a spot interruption, best effort."""

import re
import time

from spotlight_core.config.fleet import AwsNoticesConfig
from spotlight_core.executor.notices.base import Answer, Endpoint, EndpointWatcher, moment_of

REBALANCE_SECONDS = 120.0
_TOKEN_SECONDS = 21600  # the longest that the service gives
_RENEW_SECONDS = 20000.0
_SENDABLE = re.compile(r"[!-~]{1,1024}")
_TOKEN = "X-aws-ec2-metadata-token"
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_ACTIONS = ("terminate", "stop", "hibernate")


class AwsWatcher(EndpointWatcher):
    """404 means peace; an action names its time, a rebalance recommendation that it is likely soon."""

    source = "aws"

    def __init__(self, config: AwsNoticesConfig, grace_seconds: float) -> None:
        super().__init__(Endpoint(config.endpoint, "EC2's metadata service"))
        self._rebalance = config.rebalance
        self._grace_seconds = grace_seconds
        self._token = ""
        self._token_since = 0.0

    def _poll(self) -> float | None:
        answer = self._asked(_ACTION)
        if answer is None:
            return None
        seconds = self._until_action(answer) if answer.status == 200 else None
        if seconds is not None or not self._rebalance:
            return seconds
        answer = self._asked(_REBALANCE)
        return self._until_rebalance(answer) if answer is not None and answer.status == 200 else None

    def _until_action(self, answer: Answer) -> float | None:
        record = answer.record() or {}
        if record.get("action") not in _ACTIONS:
            self._endpoint.nonsense(answer)
            return None
        moment = moment_of(record.get("time"))
        return self._grace_seconds if moment is None else answer.seconds_until(moment)

    def _until_rebalance(self, answer: Answer) -> float | None:
        if "noticeTime" not in (answer.record() or {}):
            self._endpoint.nonsense(answer)
            return None
        return REBALANCE_SECONDS

    def _asked(self, path: str) -> Answer | None:
        """The answer under a valid token: one that the service no longer knows is renewed once."""
        for _ in range(2):
            if not self._has_token():
                return None
            answer = self._endpoint.ask("GET", path, known=(200, 404, 401), headers={_TOKEN: self._token})
            if answer is None or answer.status != 401:
                return answer
            self._token = ""
        self._endpoint.trouble("refuses the token that it just gave")
        return None

    def _has_token(self) -> bool:
        if self._token and time.monotonic() - self._token_since < _RENEW_SECONDS:
            return True
        self._token_since = time.monotonic()
        lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        answer = self._endpoint.ask("PUT", "/latest/api/token", headers=lifetime)
        if answer is None:
            self._token = ""
        elif _SENDABLE.fullmatch(answer.text):
            self._token = answer.text
        else:
            self._endpoint.nonsense(answer)
            self._token = ""
        return bool(self._token)
