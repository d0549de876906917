"""The guard, asked as a server asks it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.guard import CONTENT_POLICY, Guard

HERE = "127.0.0.1:7860"


async def _application(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})
    else:
        await send({"type": "websocket.accept"})


def ask(headers: list[tuple[str, str]], kind: str = "http", host: str = "127.0.0.1") -> list[Message]:
    """What comes back for a request with these headers."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("a request is judged before any of it is read")

    scope = {"type": kind, "headers": [(name.encode(), value.encode()) for name, value in headers]}
    asyncio.run(Guard(_application, host)(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    "headers",
    [
        [("host", HERE)],
        [("host", "localhost:7860")],
        [("host", "LocalHost")],
        [("host", "[::1]:7860")],
        [("host", "127.0.0.1")],
        [("host", "desk.local:7860")],
        [("host", HERE), ("origin", "http://127.0.0.1:7860")],
        [("host", HERE), ("origin", "http://localhost:7860")],
        [("host", "localhost"), ("origin", "http://localhost")],
    ],
)
def test_requests_of_our_own_pages_pass(headers: list[tuple[str, str]]) -> None:
    start, body = ask(headers, host="desk.local")
    assert (start["status"], body["body"]) == (200, b"inside")
    assert (b"content-security-policy", CONTENT_POLICY.encode()) in start["headers"]


REFUSED = [
    [],
    [("host", "")],
    [("host", "evil.example")],
    [("host", "evil.example:7860")],
    [("host", "127.0.0.1.evil.example:7860")],
    [("host", "localhost@evil.example")],
    [("host", "evil.example@127.0.0.1")],
    [("host", "127.0.0.1:port")],
    [("host", "192.168.1.5:7860")],
    [("host", HERE), ("host", "evil.example")],
    [("host", HERE), ("origin", "https://evil.example")],
    [("host", HERE), ("origin", "http://127.0.0.1.evil.example:7860")],
    [("host", HERE), ("origin", "http://127.0.0.1:9999")],
    [("host", HERE), ("origin", "null")],
    [("host", HERE), ("origin", "")],
    [("host", HERE), ("origin", "file://")],
    [("host", HERE), ("origin", f"http://{HERE}"), ("origin", "https://evil.example")],
]


@pytest.mark.parametrize("headers", REFUSED)
def test_foreign_requests_get_403_and_no_further(headers: list[tuple[str, str]]) -> None:
    start, body = ask(headers)
    assert start["status"] == 403
    assert b"inside" not in body["body"]


@pytest.mark.parametrize("headers", REFUSED)
def test_foreign_websockets_are_closed_before_they_open(headers: list[tuple[str, str]]) -> None:
    assert ask(headers, kind="websocket") == [{"type": "websocket.close", "code": 1008}]


def test_our_own_websockets_open() -> None:
    assert ask([("host", HERE), ("origin", f"http://{HERE}")], kind="websocket") == [{"type": "websocket.accept"}]


def test_the_policy_names_no_other_place() -> None:
    sources = {source for rule in CONTENT_POLICY.split("; ") for source in rule.split()[1:]}
    assert sources <= {"'self'", "'none'", "'unsafe-inline'", "'unsafe-eval'", "data:", "blob:"}
