"""What stands before the routes: the key that clients must show, and the count of what was answered."""

from __future__ import annotations

import hmac
from collections import Counter

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors import ApiError

KEY_VARIABLE = "QUORUM_API_KEY"
"""Environment variable that holds the key; other programs' process lists do not show it."""


class KeyGate:
    """ASGI middleware that lets only those pass who show the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        """Args:
        key: Empty: everyone passes.
        """
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._key or self._is_shown(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(401, "this server asks for its key: Authorization: Bearer KEY", "invalid_api_key")
        await JSONResponse(refusal.document, refusal.status, refusal.headers)(scope, receive, send)

    def _is_shown(self, scope: Scope) -> bool:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(shown) != 1:
            return False
        scheme, _, key = shown[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


class Tally:
    """ASGI middleware that counts responses by status."""

    def __init__(self, app: ASGIApp, responses: Counter[int]) -> None:
        self._app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responses[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counting)
