"""An object store on loopback that speaks as much of S3 as the storage of artifacts uses: put (and put if absent), get, head, list, delete.

Objects lie in memory. Keys are not checked, the signature of a request is not read.
"""

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "artifacts"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_EC2_METADATA_DISABLED": "true"}
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(frozen=True)
class _Object:
    content: bytes
    modified: datetime = field(default_factory=lambda: datetime.now(UTC))


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Listener"

    def do_PUT(self) -> None:
        content = self._body()
        with self.server.lock:
            if self.headers.get("If-None-Match") == "*" and self._key in self.server.objects and self.server.is_guarded:
                self._fail(412, "PreconditionFailed", "<Condition>If-None-Match</Condition>")
                return
            self.server.objects[self._key] = _Object(content)
        self._answer(200)

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0])
        else:
            self._give(is_head=False)

    def do_HEAD(self) -> None:
        self._give(is_head=True)

    def do_DELETE(self) -> None:
        with self.server.lock:
            self.server.objects.pop(self._key, None)
        self._answer(204)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _body(self) -> bytes:
        """Also of an upload in signed chunks: a line with the size in hex, then the bytes."""
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():  # checksums, up to an empty line
            pass
        return b"".join(parts)

    def _give(self, *, is_head: bool) -> None:
        found = self.server.objects.get(self._key)
        if found is None:
            self._fail(404, "NoSuchKey", is_head=is_head)
            return
        headers = {"Last-Modified": format_datetime(found.modified, usegmt=True), "ETag": '"0"'}
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        part = found.content if asked is None else found.content[int(asked[1]) : int(asked[2]) + 1]
        self._answer(200 if asked is None else 206, part, headers, is_head=is_head)

    def _list(self, prefix: str) -> None:
        with self.server.lock:
            found = {key: held for key, held in sorted(self.server.objects.items()) if key.startswith(prefix)}
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{held.modified.isoformat()}</LastModified>"
            f"<ETag>0</ETag><Size>{len(held.content)}</Size></Contents>"
            for key, held in found.items()
        )
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode())

    def _fail(self, status: int, code: str, more: str = "", *, is_head: bool = False) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message>{more}</Error>".encode(), is_head=is_head)

    def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, is_head: bool = False) -> None:
        self.send_response(status)
        for name, value in ({} if headers is None else headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not is_head:
            self.wfile.write(body)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *, is_guarded: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.is_guarded = is_guarded
        self.lock = threading.Lock()
        self.objects: dict[str, _Object] = {}


class S3Server:
    """Context manager. `is_guarded`: an object that is there is not created again."""

    def __init__(self, *, is_guarded: bool = True) -> None:
        self._listener = _Listener(is_guarded=is_guarded)
        self._thread = threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.05}, name="s3")
        self.environment = dict(ENVIRONMENT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    @property
    def keys(self) -> list[str]:
        return sorted(self._listener.objects)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()
