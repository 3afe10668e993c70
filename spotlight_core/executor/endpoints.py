"""The coordinator's service over HTTP: on 127.0.0.1, at a free port, for whoever has the run's token.

    POST /submit /phase /cancel /alive /close     GET /settled /results/REF /status /metrics
    DELETE /results/REF

The standard library's server: a run has one client, whose few connections stay open.
"""

import hmac
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from spotlight_core.errors import BadInputError, FleetError, SpotlightError
from spotlight_core.executor.service import Service, Unknown, whole_number
from spotlight_core.executor.wire import (
    EPOCH_HEADER,
    POLL_SECONDS,
    Cancel,
    ChangePhase,
    Refusal,
    Submit,
    Told,
    to_json,
)

LOG = logging.getLogger(__name__)
HOST = "127.0.0.1"
MOST_BYTES = 256 * 2**20
IDLE_SECONDS = 120.0
JSON, TEXT, TENSORS = "application/json", "text/plain; version=0.0.4", "application/octet-stream"
RESULTS = "/results/"
# What a scraper or a person may ask without knowing the epoch, and without keeping the nodes alive.
FOR_ANYBODY = ("/status", "/metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: HTTPStatus = HTTPStatus.OK
    body: bytes = b"{}"
    content_type: str = JSON


class _Refused(Exception):
    """Raised on the way to an answer that is not a success.

    ``hang_up``: the request's body was not read, so that nothing after it could be.
    """

    def __init__(self, status: HTTPStatus, error: SpotlightError, *, hang_up: bool = False) -> None:
        super().__init__(status, error)
        self.status = status
        self.error = error
        self.hang_up = hang_up


class Endpoints:
    """From a method, a path, a query and a body to a reply; knows nothing of sockets."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._posts: dict[str, tuple[type[Any] | None, Callable[..., None]]] = {
            "/submit": (Submit, service.submit),
            "/phase": (ChangePhase, service.change_phase),
            "/cancel": (Cancel, service.cancel),
            "/close": (None, service.close),
        }

    def answer(self, method: str, path: str, query: str, body: bytes) -> Reply:
        """Raises _Refused for what is not known or cannot be done."""
        try:
            reply = self._answer(method, path, query, body)
        except msgspec.MsgspecError as error:
            bad = BadInputError(f"the body of {path} cannot be read ({error})", "see wire.py for its form")
            raise _Refused(HTTPStatus.BAD_REQUEST, bad) from error
        except Unknown as error:
            raise _Refused(HTTPStatus.NOT_FOUND, error) from error
        except BadInputError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, error) from error
        except SpotlightError as error:
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, error) from error
        if reply is None:
            known = FleetError(f"there is no {method} {path}", "see endpoints.py for what there is")
            raise _Refused(HTTPStatus.NOT_FOUND, known)
        return reply

    def _answer(self, method: str, path: str, query: str, body: bytes) -> Reply | None:
        if method == "POST":
            return self._post(path, body)
        if path.startswith(RESULTS):
            return self._result(method, unquote(path.removeprefix(RESULTS)))
        return self._get(path, query) if method == "GET" else None

    def _post(self, path: str, body: bytes) -> Reply | None:
        if path == "/alive":
            return Reply(body=to_json(self._service.status()))
        if path not in self._posts:
            return None
        form, act = self._posts[path]
        if form is None:
            act()
        else:
            act(msgspec.json.decode(body, type=form))
        return Reply()

    def _get(self, path: str, query: str) -> Reply | None:
        if path == "/settled":
            asked = {name: values[-1] for name, values in parse_qs(query).items()}
            after = whole_number(asked.get("after", "0"), "after")
            outcomes = self._service.settled(asked.get("submission", ""), after, POLL_SECONDS)
            return Reply(body=to_json(outcomes))
        if path == "/status":
            return Reply(body=to_json(self._service.status()))
        if path == "/metrics":
            return Reply(body=self._service.metrics().encode(), content_type=TEXT)
        return None

    def _result(self, method: str, ref: str) -> Reply:
        if method == "DELETE":
            self._service.discard(ref)
            return Reply()
        return Reply(body=self._service.result(ref), content_type=TENSORS)


class _Handler(BaseHTTPRequestHandler):
    """One connection.  Nothing is answered, nor a body read, before token and epoch are right."""

    protocol_version = "HTTP/1.1"  # connections stay open
    server_version, sys_version = "spotlight", ""
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True  # an answer is a head and a body: the second would wait for an ack
    endpoints: ClassVar[Endpoints]
    service: ClassVar[Service]
    token: ClassVar[str]

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def _serve(self, method: str) -> None:
        try:
            parts = urlsplit(self.path)
            self._check(parts.path)
            reply = self.endpoints.answer(method, parts.path, parts.query, self._body())
        except _Refused as refused:
            self.close_connection = self.close_connection or refused.hang_up
            reply = Reply(status=refused.status, body=to_json(Refusal(error=Told.of(refused.error))))
        except Exception as error:  # a fault of ours: the client must hear of it, whatever it is
            LOG.exception("%s %s failed", method, self.path)
            self.close_connection = True
            reply = Reply(
                status=HTTPStatus.INTERNAL_SERVER_ERROR, body=to_json(Refusal(error=Told.of(error)))
            )
        self._send(reply)

    def _check(self, path: str) -> None:
        """Who asks: 401 without the token, 409 with another epoch."""
        said = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(said, f"Bearer {self.token}".encode()):
            wrong = FleetError("the coordinator's token is missing or wrong", "read it from coordinator.json")
            raise _Refused(HTTPStatus.UNAUTHORIZED, wrong, hang_up=True)
        epoch = self.headers.get(EPOCH_HEADER)
        if epoch is None and path in FOR_ANYBODY:
            return
        if epoch != str(self.service.epoch):
            other = FleetError(
                f"this is the coordinator of epoch {self.service.epoch}, not {epoch}",
                "this driver was replaced: let the newer one go on",
            )
            raise _Refused(HTTPStatus.CONFLICT, other, hang_up=True)
        self.service.hear()

    def _body(self) -> bytes:
        if "Transfer-Encoding" in self.headers:
            refused = BadInputError("the body's length is not said", "send Content-Length")
            raise _Refused(HTTPStatus.LENGTH_REQUIRED, refused, hang_up=True)
        try:
            length = whole_number(self.headers.get("Content-Length", "0"), "Content-Length")
        except BadInputError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, error, hang_up=True) from error
        if length > MOST_BYTES:
            large = BadInputError(f"a body of {length} bytes is too large", f"send at most {MOST_BYTES}")
            raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, large, hang_up=True)
        return self.rfile.read(length)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, format: str, *args: Any) -> None:
        LOG.debug(format, *args)


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # one that waits for something to tell must not keep the process
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        LOG.info("a client hung up", exc_info=True)


class HttpServer:
    """Serves in threads of its own from ``start`` to ``close``; ``url`` says where."""

    def __init__(self, service: Service, token: str) -> None:
        attributes = {"endpoints": Endpoints(service), "service": service, "token": token}
        self._server = _Server((HOST, 0), type("Handler", (_Handler,), attributes))
        self.url = f"http://{HOST}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
