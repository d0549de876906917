"""A server on this machine that speaks as much of the hub's protocol as a download needs, and fails on request."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Answer = Callable[["Request", bytes], None]
"""Answers a request for a file with these contents, in place of the ordinary answer."""


class Request(BaseHTTPRequestHandler):
    """One request; the answers below are made with it."""

    hub: Hub

    def do_GET(self) -> None:
        self.hub.requests.append((self.path, {name.title(): value for name, value in self.headers.items()}))
        parts = urlsplit(self.path)
        listing = re.fullmatch(r"/api/models/([^/]+/[^/]+)", parts.path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", unquote(parts.path))
        if self.hub.refusals:
            self.hub.refusals.pop(0)(self, b"")
        elif listing and listing[1] in self.hub.repositories:
            self._list(listing[1])
        elif file and file[3] in self.hub.repositories.get(file[1], {}):
            content = self.hub.repositories[file[1]][file[3]]
            (self.hub.answers.pop(0) if self.hub.answers else whole)(self, content)
        elif file and file[1] in self.hub.repositories:
            status(404, {"X-Error-Code": "EntryNotFound"})(self, b"")
        else:
            status(401, {"X-Error-Code": "RepoNotFound"})(self, b"")

    def _list(self, repository: str) -> None:
        siblings = [
            {
                "rfilename": path,
                "size": len(content),
                "blobId": "0" * 40,
                "lfs": {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 130},
            }
            for path, content in self.hub.repositories[repository].items()
        ]
        body = json.dumps({"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings}).encode()
        self.send(200, {"Content-Type": "application/json", "Content-Length": str(len(body))}, body)

    def send(self, code: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    @property
    def start(self) -> int:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(match[1]) if match else 0

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@dataclass
class Hub:
    """What is on the server, what it was asked, and how it answers next."""

    url: str
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    """For the next requests for files; ordinary ones after that."""
    refusals: list[Answer] = field(default_factory=list)
    """For the next requests of any kind."""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def starts(self) -> list[int]:
        """Where each request for a file's bytes began."""
        ranges = [headers.get("Range", "bytes=0-") for path, headers in self.requests if "/resolve/" in path]
        return [int(text.removeprefix("bytes=").removesuffix("-")) for text in ranges]


@contextmanager
def hub_server() -> Iterator[Hub]:
    class Bound(Request):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    server.daemon_threads = True
    Bound.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Bound.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def whole(request: Request, content: bytes) -> None:
    """The ordinary answer, from the asked byte on."""
    _begin(request, content)
    request.wfile.write(content[request.start :])


def _begin(request: Request, content: bytes) -> None:
    rest = len(content) - request.start
    headers = {"Content-Length": str(rest), "ETag": '"etag"', "X-Repo-Commit": COMMIT}
    if request.start:
        headers["Content-Range"] = f"bytes {request.start}-{len(content) - 1}/{len(content)}"
    request.send(206 if request.start else 200, headers)


def cut_after(size_bytes: int) -> Answer:
    """The connection breaks after so many bytes of the body."""

    def answer(request: Request, content: bytes) -> None:
        _begin(request, content)
        request.wfile.write(content[request.start :][:size_bytes])
        request.wfile.flush()
        request.close_connection = True
        request.connection.close()

    return answer


def shorter_by(size_bytes: int) -> Answer:
    """A proper answer with too few bytes."""

    def answer(request: Request, content: bytes) -> None:
        body = content[request.start : len(content) - size_bytes]
        request.send(206 if request.start else 200, {"Content-Length": str(len(body))}, body)

    return answer


def longer_by(size_bytes: int) -> Answer:
    return lambda request, content: whole(request, content + bytes(size_bytes))


def changed(request: Request, content: bytes) -> None:
    """Bytes of the right length that are not the promised ones."""
    whole(request, content[:-1] + bytes([content[-1] ^ 1]))


def status(code: int, headers: dict[str, str] | None = None) -> Answer:
    return lambda request, _: request.send(code, {"Content-Length": "0"} | (headers or {}))


def from_the_beginning(request: Request, content: bytes) -> None:
    """The whole file, whatever part was asked for."""
    request.send(200, {"Content-Length": str(len(content))}, content)


def redirect(url: str) -> Answer:
    return lambda request, _: request.send(302, {"Location": f"{url}{request.path}", "Content-Length": "0"})


def slowly(request: Request, content: bytes) -> None:
    """A little at a time, for as long as anyone listens."""
    _begin(request, content)
    try:
        for at in range(request.start, len(content), 50_000):
            request.wfile.write(content[at : at + 50_000])
            request.wfile.flush()
            time.sleep(0.05)
    except OSError:
        request.close_connection = True


def silence(request: Request, content: bytes) -> None:
    """The head of an answer and then nothing."""
    _begin(request, content)
    request.wfile.flush()
    time.sleep(3)
    request.close_connection = True
