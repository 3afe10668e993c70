"""A local server that a fake provider answers through, and what it was asked."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext
from typing import Any

DATE = "Tue, 01 Dec 2026 03:00:00 GMT"
HTML = b"<html><body>Welcome to the hotel's network</body></html>"


@dataclass(frozen=True, kw_only=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, kw_only=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Answering = Callable[[Asked], Reply]


@dataclass
class Server:
    """``broken``: what every request gets instead.  ``held``: requests wait until it is set."""

    answer: Answering
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    broken: Reply | None = None
    held: threading.Event | None = None

    @property
    def paths(self) -> list[str]:
        return [str(asked) for asked in self.asked]


@contextlib.contextmanager
def serving(answer: Answering, port: int = 0, tls: SSLContext | None = None) -> Iterator[Server]:
    """A server on 127.0.0.1, at a free port unless one is given."""
    state = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def date_time_string(self, timestamp: float | None = None) -> str:
            return DATE

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked = Asked(method=self.command, path=self.path, headers=dict(self.headers), body=body)
            state.asked.append(asked)
            if state.held is not None:
                state.held.wait(60)
            reply = state.broken or state.answer(asked)
            with contextlib.suppress(ConnectionError):  # whoever asked may have hung up
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)

        do_GET = do_PUT = do_POST = _serve

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that distrusts the certificate, or gave up, is what some tests are about."""

    server = Quiet(("127.0.0.1", port), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    state.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        if state.held is not None:
            state.held.set()
        server.shutdown()
        server.server_close()
        thread.join()
