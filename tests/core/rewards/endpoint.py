"""A local endpoint in the shape of OpenAI's, which answers what a test tells it to."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "judge-7b"
Answer = tuple[int, dict[str, str], bytes]


def ok(content: str) -> Answer:
    return 200, {}, json.dumps({"choices": [{"message": {"content": content}}]}).encode()


def graded(body: dict[str, Any], call: int) -> Answer:
    return ok('{"grade": 7}')


@dataclass
class Endpoint:
    """What was asked, and what is answered: ``answer(body, number of the call)``."""

    answer: Callable[[dict[str, Any], int], Answer] = graded
    models: Answer = (200, {}, json.dumps({"data": [{"id": MODEL}, {"id": "other"}]}).encode())
    calls: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    busy: int = 0
    most_busy: int = 0
    url: str = ""

    def serve(self, handler: BaseHTTPRequestHandler, lock: threading.Lock) -> None:
        length = int(handler.headers.get("Content-Length", 0))
        body = json.loads(handler.rfile.read(length)) if length else {}
        with lock:
            self.paths.append(f"{handler.command} {handler.path}")
            self.headers.append(dict(handler.headers))
            if handler.command == "POST":
                self.calls.append(body)
            number = len(self.calls)
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
        status, headers, payload = self.models if handler.command == "GET" else self.answer(body, number)
        with lock:
            self.busy -= 1
        with contextlib.suppress(ConnectionError):  # whoever asked may have hung up
            handler.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(payload))}).items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(payload)
            handler.wfile.flush()


@contextlib.contextmanager
def serving() -> Iterator[Endpoint]:
    """An endpoint on a free port of 127.0.0.1."""
    state, lock = Endpoint(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.serve(self, lock)

        def do_POST(self) -> None:
            state.serve(self, lock)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
