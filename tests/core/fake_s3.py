"""A local server in the shape of S3's REST interface, which fails when a test tells it to."""

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "latents"
_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
_ERRORS = {
    "AccessDenied": (403, "Access Denied"),
    "SlowDown": (503, "Please reduce your request rate."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "InvalidAccessKeyId": (403, "The AWS Access Key Id you provided does not exist in our records."),
}


@dataclass
class FakeS3:
    """Its one bucket, what was asked, and the errors that the next requests get."""

    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    signed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    always: str | None = None
    url: str = ""

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = _body(handler)
        self.asked.append(f"{handler.command} {key or '?list'}")
        self.signed.append(handler.headers.get("Authorization", ""))
        failure = self.always or (self.errors.pop(0) if self.errors else None)
        if failure is None and bucket != BUCKET:
            failure = "NoSuchBucket"
        if failure is not None:
            _send_error(handler, failure, key)
        elif not key:
            _send(handler, 200, self._listing(query), {"Content-Type": "application/xml"})
        else:
            self._object(handler, key, body)

    def _object(self, handler: BaseHTTPRequestHandler, key: str, body: bytes) -> None:
        if handler.command == "PUT":
            self.objects[key] = body
            _send(handler, 200, b"", {"ETag": _etag(body)})
        elif handler.command == "DELETE":
            self.objects.pop(key, None)
            _send(handler, 204, b"", {})
        elif key not in self.objects:
            _send_error(handler, "NoSuchKey", key)
        else:
            data = self.objects[key]
            modified = {"ETag": _etag(data), "Last-Modified": "Tue, 01 Dec 2026 03:00:00 GMT"}
            kind = modified | {"Content-Type": "binary/octet-stream"}
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
            if asked is None:
                _send(handler, 200, data, kind)
                return
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            kind["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            _send(handler, 206, data[first : last + 1], kind)

    def _listing(self, query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        contents, common = [], set()
        for key, data in sorted(self.objects.items()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                common.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            contents.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-12-01T03:00:00.000Z</LastModified>"
                f"<ETag>{escape(_etag(data))}</ETag><Size>{len(data)}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        folders = [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(common)
        ]
        return (
            f'{_XML}<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{BUCKET}</Name>'
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(contents) + len(common)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(contents + folders)}"
            "</ListBucketResult>"
        ).encode()


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _body(handler: BaseHTTPRequestHandler) -> bytes:
    """Bytes as sent, without the framing of S3's signed and check-summed chunks."""
    raw = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    if "aws-chunked" not in handler.headers.get("Content-Encoding", ""):
        return raw
    data = bytearray()
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size.split(b";")[0], 16)
        if not length:
            break
        data += raw[:length]
        raw = raw[length + 2 :]
    return bytes(data)


def _send_error(handler: BaseHTTPRequestHandler, code: str, key: str) -> None:
    status, message = _ERRORS[code]
    text = (
        f"{_XML}<Error><Code>{code}</Code><Message>{message}</Message><Resource>/{BUCKET}/{escape(key)}</Resource>"
        "<RequestId>4442587FB7D0A2F9</RequestId><HostId>host</HostId></Error>"
    )
    _send(handler, status, text.encode(), {"Content-Type": "application/xml"})


def _send(handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    handler.send_response(status)
    for name, value in (headers | {"x-amz-request-id": "4442587FB7D0A2F9"}).items():
        handler.send_header(name, value)
    if status != 204:
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


@contextlib.contextmanager
def serving() -> Iterator[FakeS3]:
    """A server on a free port of 127.0.0.1."""
    state = FakeS3()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            if name in ("do_GET", "do_PUT", "do_HEAD", "do_DELETE", "do_POST"):
                return lambda: state.serve(self)
            raise AttributeError(name)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
