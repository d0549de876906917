"""Keeps other web sites out: only requests meant for this server, from its own pages, get any further.

A page of another site can make a browser send requests to a local port, and by rebinding a name of its own to
127.0.0.1 even read the answers. Such requests carry a foreign Origin or a foreign Host and get 403 before any work.
What is let through is answered with a content policy under which the page itself cannot fetch from anywhere else, so
that an image in a model's answer does not tell anyone that it was shown.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

CONTENT_POLICY = "; ".join(
    (
        "default-src 'self'",
        # Gradio's page has scripts and styles inside, and compiles its templates.
        "script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self' data: blob:",
        "worker-src 'self' blob:",
        "frame-ancestors 'none'",
        "form-action 'self'",
    )
)

_REFUSAL = "This server answers only to programs and pages of this machine that call it by its own name."
API_PATH = "/v1"
"""Below it refusals are JSON, as all else there."""


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, host: str, other_names: Collection[str] = ()) -> None:
        """Args:
        app: What is guarded.
        host: The name or address the server was told to listen on; requests may be addressed to it.
        other_names: More names and addresses of this machine that requests may be addressed to.
        """
        self._app = app
        self._names = LOOPBACK_NAMES | {name.lower().strip("[]") for name in (host, *other_names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
        elif self._is_welcome(scope):
            await self._app(scope, receive, _with_policy(send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            kind, body = _refusal(scope.get("path", ""))
            headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _is_welcome(self, scope: Scope) -> bool:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if len(hosts) != 1:
            return False
        host = _place(f"http://{hosts[0]}")
        return host is not None and host[0] in self._names and all(self._is_own(origin, host[1]) for origin in origins)

    def _is_own(self, origin: str, port: int) -> bool:
        """Whether a page of that origin was served here: by one of our names, at the port that was called."""
        place = _place(origin)
        return place is not None and place[0] in self._names and place[1] == port


def _refusal(path: str) -> tuple[bytes, bytes]:
    """Content type and body."""
    if not path.startswith(API_PATH):
        return b"text/plain", f"{_REFUSAL}\n".encode()
    error = {"message": _REFUSAL, "type": "permission_error", "param": None, "code": "foreign_request"}
    return b"application/json", json.dumps({"error": error}).encode()


def _place(url: str) -> tuple[str, int] | None:
    """Host name and port of an http or https URL that consists of nothing else; None for anything unclear."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        return None
    if parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname, port or (443 if parts.scheme == "https" else 80)


def _with_policy(send: Send) -> Send:
    async def send_with_policy(message: Message) -> None:
        if message["type"] == "http.response.start":
            policy = (b"content-security-policy", CONTENT_POLICY.encode())
            message = {**message, "headers": [*message.get("headers", ()), policy]}
        await send(message)

    return send_with_policy
