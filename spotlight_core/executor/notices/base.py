"""What a preemption watcher is, the loop that asks it, and how it asks an endpoint.

A watcher runs in a thread of its node and lives as long as the node does: whatever an endpoint answers,
or does not, it goes on asking.  Silence of an endpoint is no notice, and is logged once.
"""

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

TIMEOUT_SECONDS = 2.0
LONGEST_ANSWER_BYTES = 1 << 20
SHORTER_SECONDS = 1.0  # a deadline that moved less than this is the same one

log = logging.getLogger(__name__)


class NoticeWatcher(Protocol):
    """Whoever tells one node that it will be taken away."""

    source: str
    """The word for it in the journal."""
    ranks: tuple[int, ...]
    """Of the last notice: the GPUs that will be taken away alone, or none for the whole node."""
    sure: bool
    """Of the last poll without a notice: it was peace that was heard, and not silence."""

    def poll(self) -> float | None:
        """Seconds left when there is a notice, else None.  May take about as long as ``poll_seconds``.

        Raises nothing for an endpoint that is away, refuses, or talks nonsense.
        """
        ...

    def acknowledge(self) -> None:
        """The node's work is safe: the machine may go now."""
        ...

    def close(self) -> None: ...


class Watcher:
    """What most watchers have in common: nobody to tell, nothing to close."""

    source = ""
    ranks: tuple[int, ...] = ()
    sure: bool = True

    def acknowledge(self) -> None:
        pass

    def close(self) -> None:
        pass


class EndpointWatcher(Watcher, ABC):
    """One that asks an HTTP service; what is wrong with it is said once, at the end of a poll."""

    def __init__(self, endpoint: "Endpoint") -> None:
        self._endpoint = endpoint

    def poll(self) -> float | None:
        try:
            return self._poll()
        finally:
            self.sure = not self._endpoint.settle()

    def close(self) -> None:
        self._endpoint.close()

    @abstractmethod
    def _poll(self) -> float | None:
        """Seconds left when there is a notice; what is wrong with the service is noted in the endpoint."""


class NoticeListener(Protocol):
    """Who is told of notices."""

    def noticed(self, seconds_left: float, source: str, ranks: tuple[int, ...]) -> None:
        """The node, or these GPUs of it, will be taken away."""
        ...

    def returned(self, ranks: tuple[int, ...]) -> None:
        """The notice of these GPUs is not there any more: they may be used again."""
        ...


def watch(
    watcher: NoticeWatcher, seconds_between: float, listener: NoticeListener, stop: threading.Event
) -> None:
    """Ask until ``stop`` is set, and tell ``listener`` once of each notice.

    It is told again only of a deadline that is shorter by more than a second, or when it raised.
    A question that took a while, as a long poll does, counts towards ``seconds_between``.
    """
    told, fault = _Told(listener), ""
    while not stop.is_set():
        began = time.monotonic()
        try:
            told.hear(watcher, watcher.poll())
            fault = ""
        # A watcher that died would let the node be killed in the middle of its work.
        except Exception as error:
            if stop.is_set():
                return  # closed while it asked
            if fault != repr(error):
                log.exception("the %s watcher failed, and goes on", watcher.source)
            fault = repr(error)
        stop.wait(max(0.0, seconds_between - (time.monotonic() - began)))


class _Told:
    """What was passed on: the deadline of the whole node, and of GPUs that are taken away alone."""

    def __init__(self, listener: NoticeListener) -> None:
        self._listener = listener
        self._node = float("inf")
        self._ranks: dict[int, float] = {}

    def hear(self, watcher: NoticeWatcher, seconds_left: float | None) -> None:
        """Pass on what is new in an answer."""
        if seconds_left is None:
            if watcher.sure:
                self._return(sorted(self._ranks))
            return
        by = time.monotonic() + seconds_left
        if not watcher.ranks:
            if by < self._node - SHORTER_SECONDS:
                self._listener.noticed(seconds_left, watcher.source, ())
                self._node = by
            return
        self._return([rank for rank in self._ranks if rank not in watcher.ranks])
        new = [rank for rank in watcher.ranks if by < self._ranks.get(rank, float("inf")) - SHORTER_SECONDS]
        if new:
            self._listener.noticed(seconds_left, watcher.source, tuple(new))
            self._ranks.update(dict.fromkeys(new, by))

    def _return(self, ranks: Sequence[int]) -> None:
        if ranks:
            self._listener.returned(tuple(ranks))
            for rank in ranks:
                del self._ranks[rank]


class Answer:
    """A whole answer of an endpoint: status, headers, body, and when its server says it was given."""

    def __init__(self, status: int, headers: httpx.Headers, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace").strip()

    def record(self) -> dict[str, Any] | None:
        """The body's JSON object; None when it holds anything else."""
        try:
            record = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) else None

    def seconds_until(self, moment: datetime) -> float:
        """From the answer's own Date, since a node's clock may be wrong; never below 0."""
        return max(0.0, (moment - self._date()).total_seconds())

    def _date(self) -> datetime:
        return moment_of(self.headers.get("Date", "")) or datetime.now(UTC)


class Endpoint:
    """An HTTP service that a watcher asks."""

    def __init__(self, url: str, name: str, *, proxied: bool = False, verify: Any = True) -> None:
        """``name``: what it is called in the log.  ``proxied``: ask through the environment's proxy."""
        self._url = url
        self._name = name
        verify = (
            verify if url.startswith("https:") else False
        )  # loading the world's authorities takes a while
        # Metadata services are of the machine itself: a proxy would answer for another one.
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=proxied, verify=verify)
        self._trouble = ""  # as logged
        self._found = ""  # since then

    def ask(
        self,
        method: str,
        path: str,
        *,
        known: tuple[int, ...] = (200,),
        patience_seconds: float = 0.0,
        **request: Any,
    ) -> Answer | None:
        """The answer, if its status is one of ``known``; None when the service is away or refuses.

        ``patience_seconds``: how much longer than usual the service may think, as in a long poll.
        """
        try:
            answer = self._answer(method, path, TIMEOUT_SECONDS + patience_seconds, request)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            self.trouble(f"does not answer ({type(error).__name__}: {error})")
            return None
        if answer.status not in known:
            asked = " ".join(part for part in (method, urlsplit(path).path) if part)
            self.trouble(f"answers {asked} with status {answer.status}")
            return None
        return answer

    def nonsense(self, answer: Answer) -> None:
        """The service gave an answer that nothing can be made of."""
        self.trouble(f"talks nonsense: {answer.text[:80]!r}")

    def trouble(self, what: str) -> None:
        """Something is wrong with the service."""
        self._found = self._found or what

    def settle(self) -> bool:
        """Whether there is trouble; it is logged when it begins and when it is over."""
        if self._found and not self._trouble:
            log.warning("%s at %s %s; it is asked again", self._name, self._place(), self._found)
        elif self._trouble and not self._found:
            log.info("%s at %s answers again", self._name, self._place())
        self._trouble, self._found = self._found, ""
        return bool(self._trouble)

    def close(self) -> None:
        self._client.close()

    def _answer(self, method: str, path: str, seconds: float, request: dict[str, Any]) -> Answer:
        """Whole by the deadline: a service that sends a byte now and then must not hold the watcher."""
        deadline = time.monotonic() + seconds
        received = bytearray()
        timeout = httpx.Timeout(TIMEOUT_SECONDS, read=seconds)
        url = self._url.rstrip("/") + path if path else self._url
        with self._client.stream(method, url, timeout=timeout, **request) as response:
            for piece in response.iter_bytes():
                received += piece
                if time.monotonic() > deadline or len(received) > LONGEST_ANSWER_BYTES:
                    raise TimeoutError(f"an answer without end: {len(received)} bytes so far")
        return Answer(response.status_code, response.headers, bytes(received))

    def _place(self) -> str:
        """Without path and user, where a hook's address may hold a key."""
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def moment_of(text: Any) -> datetime | None:
    """An ISO 8601 or RFC 1123 time with its zone (UTC when it names none); None for anything else."""
    if not isinstance(text, str):
        return None
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = read(text)
        except (ValueError, TypeError, OverflowError):
            continue
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return None


def ranks_from(body: bytes) -> tuple[int, ...]:
    """Which GPUs of the node a file or hook means, ``{"ranks": [1]}``.

    None, which is all of the node, where it does not say or cannot be understood: work that leaves a GPU
    in vain loses little.
    """
    try:
        ranks = json.loads(body.decode("utf-8", "replace")).get("ranks", [])
        understood = all(type(rank) is int and rank >= 0 for rank in ranks)
    except (ValueError, AttributeError, TypeError, RecursionError):
        return ()
    return tuple(sorted(set(ranks))) if understood else ()


def seconds_from(body: bytes, grace_seconds: float) -> float | None:
    """Seconds left as a file or hook says: empty, or ``{"seconds_left": 30}``; None for anything else."""
    text = body.decode("utf-8", "replace").strip()
    if not text:
        return grace_seconds
    try:
        seconds = json.loads(text).get("seconds_left", grace_seconds)
    except (ValueError, AttributeError, RecursionError):
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        return None
    return float(seconds)
