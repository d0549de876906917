"""The routes under `/v1`. Handlers translate: JSON to requests of the pool, its events to JSON."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.api.asking import Asking, ClientGone
from app.api.desk import Desk, Lent
from app.api.documents import (
    Head,
    chunk_document,
    first_chunk,
    head_of,
    last_chunk,
    on_one_line,
    usage_chunk,
    whole_document,
)
from app.api.errors import ApiError, Unavailable, api_error
from app.api.gate import KeyGate, Tally
from app.api.metrics import exposition
from app.api.schema import AnyRequest, ChatRequest, CompletionRequest, parse, read_json
from app.api.translate import Asked, Defaults, chat_requests, completion_requests
from engine.errors import QuorumError
from engine.types import PrefillProgress

DEFAULT_BODY_BYTES = 4 * 2**20
ALIAS = "quorum"
"""A name under which the loaded model answers, whatever it is."""
CLIENT_CLOSED_REQUEST = 499
WAITS = b": the request waits for the model\n\n"
"""A comment in a stream of events, which clients pass over; it keeps connections open on the way."""


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """How the interface was set up."""

    defaults: Defaults = field(default_factory=Defaults)
    most_body_bytes: int = DEFAULT_BODY_BYTES
    key: str = ""
    """What clients must show; empty: nothing."""
    quiet_s: float = 15.0
    """Longest time without a word in a stream; then a comment says that the request waits."""


class Api:
    """The interface to one desk."""

    def __init__(self, desk: Desk, options: ApiOptions) -> None:
        self._desk = desk
        self._options = options
        self._responses: Counter[int] = Counter()

    def application(self) -> Starlette:
        """The routes, to be mounted at `/v1`."""
        routes = [
            Route("/models", self._models, methods=["GET"]),
            Route("/models/{name:path}", self._model, methods=["GET"]),
            Route("/chat/completions", self._chat, methods=["POST"]),
            Route("/completions", self._completions, methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers=HANDLERS, middleware=self._middleware())

    def metrics(self) -> Starlette:
        """Counters for Prometheus, to be put at `/metrics`."""
        return Starlette(
            routes=[Route("/metrics", self._metrics)], exception_handlers=HANDLERS, middleware=self._middleware()
        )

    def _middleware(self) -> list[Middleware]:
        return [
            Middleware(Tally, responses=self._responses),
            Middleware(KeyGate, key=self._options.key),
        ]

    async def _metrics(self, _request: Request) -> Response:
        desk = self._desk
        are_exact = None
        with contextlib.suppress(Unavailable), desk.borrowed() as lent:
            are_exact = lent.loaded.setting.are_requests_exact
        text = exposition(
            desk.counts, desk.statistics, self._responses, is_ready=not desk.refusal, are_requests_exact=are_exact
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _models(self, _request: Request) -> Response:
        found = [] if self._desk.refusal else [self._model_document()]
        return JSONResponse({"object": "list", "data": found})

    async def _model(self, request: Request) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._model_document())

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, chat_requests)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest, completion_requests)

    async def _answer(
        self,
        request: Request,
        kind: type[AnyRequest],
        translate: Callable[[AnyRequest, Lent, Defaults], list[Asked]],
    ) -> Response:
        fields = parse(kind, read_json(await self._body(request)))
        await self._desk.wait_for_pool()
        self._require_model(fields.model)
        # Long prompts take a while to tokenise; the answers of others go on meanwhile.
        asking, head = await asyncio.to_thread(self._ask, fields, translate)
        try:
            async with asking.watching(request):
                if not fields.stream:
                    await asking.finish()
                    return JSONResponse(whole_document(head, asking.answers, self._piece))
                stream = _stream(asking, head, self._piece, includes_usage=fields.includes_usage)
                # What is wrong with a request shows by its first event: until then the status can tell of it.
                first = await anext(stream)
            return _EventStream(first, stream)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException:
            asking.cancel()
            raise

    def _ask(
        self, fields: AnyRequest, translate: Callable[[AnyRequest, Lent, Defaults], list[Asked]]
    ) -> tuple[Asking, Head]:
        with self._desk.borrowed() as lent:
            asked = translate(fields, lent, self._options.defaults)
            if len(asked) > self._desk.most_requests:
                raise ApiError(
                    400,
                    f"{len(asked)} answers are asked for; this server holds {self._desk.most_requests} at once",
                    "invalid_value",
                    "n",
                )
            tickets = self._desk.submit([one.request for one in asked])
            return Asking(self._desk, lent, asked, tickets, self._options.quiet_s), head_of(fields, _name(lent))

    async def _body(self, request: Request) -> bytes:
        most = self._options.most_body_bytes
        announced = request.headers.get("content-length", "0")
        is_large = announced.isdecimal() and int(announced) > most
        body = bytearray()
        if not is_large:
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    is_large = True
                    break
        if is_large:
            raise ApiError(413, f"the request is larger than the {most} bytes that this server reads", "too_large")
        return bytes(body)

    def _require_model(self, name: str | None) -> None:
        with self._desk.borrowed() as lent:
            loaded = _name(lent)
        if name and name.removesuffix(".gguf") not in (loaded, ALIAS):
            raise ApiError(
                404,
                f"the model {name!r} is not loaded here; {loaded} is, also called {ALIAS!r}",
                "model_not_found",
                "model",
            )

    def _model_document(self) -> dict[str, Any]:
        with self._desk.borrowed() as lent:
            loaded = lent.loaded
            return {
                "id": _name(lent),
                "object": "model",
                "created": int(loaded.config.target.stat().st_mtime),
                "owned_by": "quorum",
                "context_length": loaded.context.context_tokens,
                "drafters": list(loaded.panel.names),
                "exactness": loaded.setting.badge,
                "requests_at_once": loaded.setting.requests_badge,
            }

    def _piece(self, token: int) -> bytes:
        with self._desk.borrowed() as lent:
            return lent.loaded.model.vocabulary.piece(token)


def _name(lent: Lent) -> str:
    return lent.loaded.config.target.stem


async def _stream(
    asking: Asking, head: Head, piece: Callable[[int], bytes], *, includes_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The answers as server-sent events; what fails on the way is told in the stream."""
    has_begun = False
    try:
        async with contextlib.aclosing(asking.rounds()) as rounds:
            async for found in rounds:
                events = [] if found else [WAITS]
                for answer, delta in found:
                    if isinstance(delta, PrefillProgress):
                        events.append(f": read {delta.done_tokens} of {delta.total_tokens} tokens\n\n".encode())
                        continue
                    if head.is_chat and not answer.is_announced:
                        answer.is_announced = True
                        events.append(_event(first_chunk(head, answer.index)))
                    if delta.content or delta.reasoning or delta.calls or (head.has_log_probabilities and delta.tokens):
                        events.append(_event(chunk_document(head, answer.index, delta, piece)))
                    if delta.is_last:
                        events.append(_event(last_chunk(head, answer)))
                yield b"".join(events)
                has_begun = True
    except QuorumError as error:
        if not has_begun:
            raise
        yield _event(api_error(error).document)
        return
    if includes_usage:
        yield _event(usage_chunk(head, asking.answers))
    yield b"data: [DONE]\n\n"


def _event(document: Mapping[str, Any]) -> bytes:
    return f"data: {on_one_line(document)}\n\n".encode()


class _EventStream(StreamingResponse):
    """Server-sent events, the first of which is there already; the rest is given up when the client goes."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        self._rest = rest
        super().__init__(self._all(first), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _all(self, first: bytes) -> AsyncIterator[bytes]:
        yield first
        with contextlib.suppress(ClientGone):
            async for events in self._rest:
                yield events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


async def _tell_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.document, error.status, error.headers)


async def _tell_quorum_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuorumError)
    return await _tell_api_error(request, api_error(error))


async def _tell_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        refusal = ApiError(404, f"there is nothing at {request.url.path}", "not_found")
    elif error.status_code == 405:
        refusal = ApiError(405, f"{request.url.path} does not take {request.method}", "method_not_allowed")
    else:
        refusal = ApiError(error.status_code, error.detail, "refused")
    return JSONResponse(refusal.document, refusal.status, {**refusal.headers, **(error.headers or {})})


async def _tell_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _tell_mistake(_request: Request, error: Exception) -> Response:
    mistake = ApiError(500, f"Quorum made a mistake ({type(error).__name__}: {error}); please report it", "failed")
    return JSONResponse(mistake.document, mistake.status)


HANDLERS: Mapping[Any, Any] = {
    ApiError: _tell_api_error,
    QuorumError: _tell_quorum_error,
    HTTPException: _tell_http_exception,
    ClientDisconnect: _tell_gone,
    Exception: _tell_mistake,
}
"""How each failure is told."""
