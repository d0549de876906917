"""What goes wrong with a request, as OpenAI's clients expect to be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import (
    DecodeError,
    EnvironmentProblem,
    MemoryShortage,
    PoolClosed,
    PoolFull,
    PromptError,
    QuorumError,
    SettingError,
)

RETRY_S = 1
"""When a client that found no room may ask again."""
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class Unavailable(QuorumError):
    """Nothing can be answered now; the message says why and what has to come first."""


class ApiError(Exception):
    """A refusal with its HTTP status; the message names what was found and what to do."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        """A name for programs."""
        self.param = param
        """The field that is to blame, as a path."""

    @property
    def document(self) -> dict[str, Any]:
        """The body that tells of it."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> Mapping[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_S)} if self.status in (429, 503) else {}


def api_error(error: QuorumError) -> ApiError:
    """What an error of the engine is to a client."""
    message = str(error)
    if isinstance(error, PromptError):
        return ApiError(400, message, "prompt_refused", "messages")
    if isinstance(error, SettingError):
        return ApiError(400, message, "invalid_value")
    if isinstance(error, PoolFull):
        return ApiError(429, message, "queue_full")
    if isinstance(error, (Unavailable, PoolClosed, MemoryShortage, EnvironmentProblem)):
        return ApiError(503, message, "not_ready")
    return ApiError(500, message, "decode_failed" if isinstance(error, DecodeError) else "failed")
