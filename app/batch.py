"""Many requests out of a file, answered side by side into another; what a kill leaves is gone on with.

Each input line is a request: `messages` or `prompt`, an `id` if wanted, and any field of the API's requests. Lines of
OpenAI's batch format (`custom_id`, `url`, `body`) are understood too. Each output line is the answer to one of them, in
the order in which they are done, with the number of its input line and a fingerprint of what was asked. Output lines
are written whole; a torn last one is cut off and its row answered again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from app.api.desk import Lent, submit_all
from app.api.documents import head_of, on_one_line, whole_document
from app.api.errors import ApiError, api_error
from app.api.schema import AnswerFields, ChatRequest, CompletionRequest, parse
from app.api.translate import Asked, Defaults, chat_requests, completion_requests
from engine.errors import EnvironmentProblem, QuorumError, SettingError
from engine.pool import Pool, Ticket
from engine.types import Finished, FinishReason

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Line:
    """One request of the input."""

    number: int
    """Of its line, from 1."""
    text: str
    fingerprint: str
    """Of what is asked and of the settings: equal where the same answer is wanted."""


def read_input(text: str, settings: str) -> list[Line]:
    """The requests of an input file; lines without anything are left out.

    Args:
        text: What the file holds.
        settings: What answers depend on besides their lines.

    Raises:
        SettingError: there is no request in it.
    """
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            digest = hashlib.sha256(f"{settings}\n{line.strip()}".encode("utf-8", "replace")).hexdigest()
            lines.append(Line(number, line.strip(), digest[:16]))
    if not lines:
        raise SettingError("there is no request in the input; each line is one, as JSON with messages or prompt")
    return lines


class Output:
    """The output file: rows that are there, and those that are added. One process at a time writes it."""

    def __init__(self, path: Path, lines: Sequence[Line], *, begins_anew: bool) -> None:
        """Args:
        path: The file; it is made where there is none.
        lines: The requests whose answers it holds or is to hold.
        begins_anew: Whether what is there is thrown away.

        Raises:
            SettingError: it holds answers to something else, or another process writes it.
            EnvironmentProblem: it cannot be written.
        """
        self._path = path
        self._lock = filelock.FileLock(f"{path}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise SettingError(f"another batch is writing {path}; wait for its end, or choose another --out") from None
        except OSError as error:
            raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from error
        self._file = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._file = os.open(path, flags | (os.O_TRUNC if begins_anew else 0), 0o644)
            self.done = self._recover(lines)
            """Numbers of the lines that are answered already."""
        except OSError as error:
            self.close()
            raise EnvironmentProblem(f"cannot write {path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def add(self, row: Mapping[str, Any]) -> None:
        """Write one row.

        Raises:
            EnvironmentProblem: there is no room for it, or the like.
        """
        rest = memoryview(f"{on_one_line(row)}\n".encode("utf-8", "replace"))
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise EnvironmentProblem(f"cannot write {self._path}: {error.strerror}; what is there stays") from error

    def close(self) -> None:
        """Safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._lock.is_locked:
            self._lock.release()
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}.lock")

    def _recover(self, lines: Sequence[Line]) -> frozenset[int]:
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        fingerprints = {line.number: line.fingerprint for line in lines}
        done: set[int] = set()
        for place, text in enumerate(content[:whole].splitlines(), start=1):
            number, fingerprint = _identity(text)
            if fingerprint is None or fingerprints.get(number) != fingerprint:
                raise SettingError(
                    f"line {place} of {self._path} is no answer to this input with these settings; repeat those it was "
                    "made with, choose another --out, or throw it away with --restart"
                )
            done.add(number)
        if whole < len(content):
            os.truncate(self._path, whole)
        return frozenset(done)


def _identity(text: bytes) -> tuple[int, str | None]:
    try:
        row = json.loads(text)
        return int(row["row"]), str(row["request"])
    except (ValueError, KeyError, TypeError):
        return 0, None


@dataclass(frozen=True, slots=True)
class Added:
    """What is asked of every row that does not say otherwise."""

    n: int | None = None
    log_probabilities: int | None = None
    """The most probable tokens to tell with each token; None: no log-probabilities."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A line as it was understood."""

    line: Line
    name: object
    """Its `id` or `custom_id`."""
    is_openai: bool
    fields: AnswerFields | None
    refusal: ApiError | None = None


class _Open:
    """A row that is being answered."""

    def __init__(self, request: _Request, asked: Sequence[Asked], tickets: Sequence[Ticket]) -> None:
        self.request = request
        self.tickets = tickets
        self.answers = [one.answer(index) for index, one in enumerate(asked)]

    def cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()

    def read(self) -> bool:
        """Take what has come; whether all answers are over.

        Raises:
            QuorumError: one of them failed.
        """
        for ticket, answer in zip(self.tickets, self.answers, strict=True):
            while (event := ticket.read(0)) is not None:
                answer.take(event)
        return all(answer.finished is not None for answer in self.answers)


class Batch:
    """Answers rows with a pool. Used by the thread that owns the pool."""

    def __init__(self, pool: Pool, lent: Lent, defaults: Defaults, added: Added) -> None:
        self._pool = pool
        self._lent = lent
        self._defaults = defaults
        self._added = added
        self._open: list[_Open] = []
        self.failed = 0
        """Rows that were answered with an error."""
        self.tokens = 0
        """Said so far."""

    def rows(self, lines: Iterator[Line], is_cancelled: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Answers to all lines, each as it is done; when cancelled, those that are done by then."""
        requests = map(self._understand, lines)
        waiting = next(requests, None)
        try:
            while (waiting or self._open) and not is_cancelled():
                while waiting is not None and self._has_room(waiting):
                    refused = self._begin(waiting)
                    waiting = next(requests, None)
                    if refused is not None:
                        yield refused
                self._pool.step()
                yield from self._finished()
        finally:
            for row in self._open:
                row.cancel()
            self._open.clear()

    def _has_room(self, request: _Request) -> bool:
        wanted = 1 if request.fields is None else _answers(request.fields)
        settings = self._pool.settings
        return wanted > settings.most_waiting or self._pool.statistics.waiting + wanted <= settings.most_waiting

    def _understand(self, line: Line) -> _Request:
        name: object = None
        is_openai = False
        try:
            document = _read(line)
            is_openai = "custom_id" in document or "body" in document
            name = document.get("custom_id" if is_openai else "id")
            kind, body = _kind(document, is_openai=is_openai)
            return _Request(line, name, is_openai, parse(kind, self._completed(kind, body)))
        except ApiError as error:
            return _Request(line, name, is_openai, None, error)

    def _completed(self, kind: type[AnswerFields], body: Mapping[str, Any]) -> dict[str, Any]:
        """The body with what every row is asked."""
        added: dict[str, Any] = {} if self._added.n is None else {"n": self._added.n}
        wanted = self._added.log_probabilities
        if wanted is not None:
            added |= {"logprobs": True, "top_logprobs": wanted} if kind is ChatRequest else {"logprobs": wanted}
        return added | dict(body)

    def _begin(self, request: _Request) -> dict[str, Any] | None:
        """Hand a request in; returns its row when it is refused."""
        try:
            if request.refusal is not None:
                raise request.refusal
            if isinstance(request.fields, ChatRequest):
                asked = chat_requests(request.fields, self._lent, self._defaults)
            else:
                assert isinstance(request.fields, CompletionRequest)
                asked = completion_requests(request.fields, self._lent, self._defaults)
            if len(asked) > self._pool.settings.most_waiting:
                raise ApiError(
                    400,
                    f"the row asks for {len(asked)} answers; {self._pool.settings.most_waiting} at most find room",
                    "invalid_value",
                )
            tickets = submit_all(self._pool, [one.request for one in asked])
            self._open.append(_Open(request, asked, tickets))
        except (ApiError, QuorumError) as error:
            return self._failure(request, error)
        return None

    def _finished(self) -> Iterator[dict[str, Any]]:
        for row in list(self._open):
            try:
                if not row.read():
                    continue
                document = self._answer(row)
            except QuorumError as error:
                row.cancel()
                document = self._failure(row.request, error)
            self._open.remove(row)
            yield document

    def _answer(self, row: _Open) -> dict[str, Any]:
        ends: list[Finished] = [answer.end for answer in row.answers]
        if any(end.reason is FinishReason.CANCELLED for end in ends):
            raise EnvironmentProblem("the answer was ended before its time")
        self.tokens += sum(len(end.token_ids) for end in ends)
        request = row.request
        assert request.fields is not None
        head = head_of(request.fields, self._lent.loaded.config.target.stem)
        body = whole_document(head, row.answers, self._lent.loaded.model.vocabulary.piece)
        if request.is_openai:
            response = {"status_code": 200, "request_id": head.id, "body": body}
            return {**_identified(request), "response": response, "error": None}
        return {**_identified(request), **{name: body[name] for name in ("choices", "usage", "timings", "quorum")}}

    def _failure(self, request: _Request, error: ApiError | QuorumError) -> dict[str, Any]:
        self.failed += 1
        told = error if isinstance(error, ApiError) else api_error(error)
        if request.is_openai:
            response = {"status_code": told.status, "request_id": "", "body": told.document}
            return {
                **_identified(request),
                "response": response,
                "error": {"code": told.code, "message": told.message},
            }
        return {**_identified(request), **told.document}


def _identified(request: _Request) -> dict[str, Any]:
    """What tells which row it is."""
    identity: dict[str, Any] = {"row": request.line.number, "request": request.line.fingerprint}
    if request.is_openai:
        return {**identity, "id": f"batch_req_{request.line.fingerprint}", "custom_id": request.name}
    return identity if request.name is None else {**identity, "id": request.name}


def _read(line: Line) -> dict[str, Any]:
    try:
        document = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the line is no JSON: {error}", "invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the line must be a JSON object with messages or prompt", "invalid_type")
    return document


def _kind(
    document: dict[str, Any], *, is_openai: bool
) -> tuple[type[ChatRequest] | type[CompletionRequest], dict[str, Any]]:
    """Which route the line is for, and the request itself."""
    body = document.get("body") if is_openai else document
    if not isinstance(body, dict):
        raise ApiError(400, "body must be a JSON object", "invalid_type", "body")
    if body.get("stream"):
        raise ApiError(400, "nothing is streamed into a file; leave stream out", "unsupported_parameter", "stream")
    url = document.get("url") if is_openai else None
    if url not in (None, CHAT_URL, COMPLETIONS_URL):
        raise ApiError(400, f"url must be {CHAT_URL} or {COMPLETIONS_URL}, found {url!r}", "invalid_value", "url")
    if url == COMPLETIONS_URL or (url is None and "messages" not in body and "prompt" in body):
        return CompletionRequest, body
    if "messages" not in body:
        raise ApiError(400, "the line has neither messages nor prompt", "missing_parameter", "messages")
    return ChatRequest, body


def _answers(fields: AnswerFields) -> int:
    prompts = len(fields.prompts) if isinstance(fields, CompletionRequest) else 1
    return prompts * fields.choices
