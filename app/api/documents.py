"""Answers as the JSON that OpenAI's clients read, and llama-server's timings beside it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.answer import Answer, Delta
from app.api.schema import AnswerFields, ChatRequest
from engine.runtime.template import ToolCall
from engine.types import EmittedToken, Finished, LogProbabilities

LINE_BREAKS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Characters that JSON lets stand and that some readers take for the end of a line."""
Piece = Callable[[int], bytes]
"""The bytes of a token."""


@dataclass(frozen=True, slots=True)
class Head:
    """What all documents of one request begin with."""

    id: str
    created: int
    model: str
    is_chat: bool
    has_log_probabilities: bool

    def document(self, *, is_chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "quorum",
        }


def head_of(request: AnswerFields, model: str) -> Head:
    """The head of the answers to a request, with an identity of its own."""
    is_chat = isinstance(request, ChatRequest)
    identity = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
    return Head(identity, int(time.time()), model, is_chat, request.has_log_probabilities)


def on_one_line(document: Mapping[str, Any]) -> str:
    """JSON without a character at which any reader might break a line."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).translate(LINE_BREAKS)


def whole_document(head: Head, answers: Sequence[Answer], piece: Piece) -> dict[str, Any]:
    """All answers at once."""
    return {
        **head.document(is_chunk=False),
        "choices": [choice_document(head, answer, piece) for answer in answers],
        "usage": usage_document(answers),
        "timings": timings_document(answers),
        "quorum": [own_document(answer) for answer in answers],
    }


def choice_document(head: Head, answer: Answer, piece: Piece) -> dict[str, Any]:
    """One finished answer."""
    assert answer.finished is not None
    kept = answer.tokens[: len(answer.finished.token_ids)]
    choice: dict[str, Any] = {"index": answer.index}
    if head.is_chat:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
        if not answer.calls:
            message["content"] = answer.content
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [call_document(call) for call in answer.calls]
        choice["message"] = message
    else:
        choice["text"] = answer.content
    return {
        **choice,
        "logprobs": log_probabilities(head, kept, answer.texts, 0, piece),
        "finish_reason": answer.finish_reason,
    }


def chunk_document(head: Head, index: int, delta: Delta, piece: Piece) -> dict[str, Any]:
    """What an event added to an answer that is streamed."""
    choice: dict[str, Any] = {"index": index}
    if head.is_chat:
        told: dict[str, Any] = {}
        if delta.content:
            told["content"] = delta.content
        if delta.reasoning:
            told["reasoning_content"] = delta.reasoning
        if delta.calls:
            numbered = enumerate(delta.calls, start=delta.calls_before)
            told["tool_calls"] = [{"index": number, **call_document(call)} for number, call in numbered]
        choice["delta"] = told
    else:
        choice["text"] = delta.content
    logprobs = None
    if delta.tokens:
        logprobs = log_probabilities(head, delta.tokens, delta.texts, delta.characters_before, piece)
    return {
        **head.document(is_chunk=True),
        "choices": [
            {
                **choice,
                "logprobs": logprobs,
                "finish_reason": None,
            }
        ],
    }


def first_chunk(head: Head, index: int) -> dict[str, Any]:
    """Who speaks."""
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    return {**head.document(is_chunk=True), "choices": [choice]}


def last_chunk(head: Head, answer: Answer) -> dict[str, Any]:
    """That an answer has ended, why, and what it took."""
    choice: dict[str, Any] = {"index": answer.index}
    if head.is_chat:
        choice["delta"] = {}
    else:
        choice["text"] = ""
    return {
        **head.document(is_chunk=True),
        "choices": [{**choice, "logprobs": None, "finish_reason": answer.finish_reason}],
        "timings": timings_document([answer]),
        "quorum": [own_document(answer)],
    }


def usage_chunk(head: Head, answers: Sequence[Answer]) -> dict[str, Any]:
    """The usage, alone in its chunk."""
    return {**head.document(is_chunk=True), "choices": [], "usage": usage_document(answers)}


def call_document(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_document(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens read and said. A prompt with several answers counts once, as its first answer found it."""
    prompts = {answer.prompt_number: answer.end for answer in reversed(answers)}
    read = sum(end.metrics.prompt_tokens for end in prompts.values())
    said = sum(len(answer.end.token_ids) for answer in answers)
    return {
        "prompt_tokens": read,
        "completion_tokens": said,
        "total_tokens": read + said,
        "prompt_tokens_details": {"cached_tokens": sum(end.metrics.reused_tokens for end in prompts.values())},
    }


def timings_document(answers: Sequence[Answer]) -> dict[str, Any]:
    """As llama-server tells them. Of several answers: counts of all, times of the slowest."""
    ends = [answer.end for answer in answers]
    read = sum(end.metrics.prompt_tokens - end.metrics.reused_tokens for end in ends)
    reused = sum(end.metrics.reused_tokens for end in ends)
    said = sum(end.metrics.emitted for end in ends)
    prompt_ms = max(end.timings.prefill_ms for end in ends)
    said_ms = max(end.timings.decode_ms for end in ends)
    return {
        "cache_n": reused,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read if read else 0.0,
        "prompt_per_second": read / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": said,
        "predicted_ms": said_ms,
        "predicted_per_token_ms": said_ms / said if said else 0.0,
        "predicted_per_second": said / said_ms * 1e3 if said_ms else 0.0,
        "draft_n": sum(end.metrics.verified for end in ends),
        "draft_n_accepted": sum(end.metrics.accepted for end in ends),
    }


def own_document(answer: Answer) -> dict[str, Any]:
    """What Quorum knows of an answer besides."""
    end: Finished = answer.end
    metrics = end.metrics
    return {
        "seed": end.seed,
        "ended_by": end.reason.value,
        "time_to_first_token_ms": end.timings.time_to_first_token_ms,
        "passes_with_drafts": metrics.verify_steps,
        "passes_without": metrics.plain_steps,
        "acceptance_rate": metrics.acceptance_rate,
        "mean_accepted_length": metrics.mean_accepted_length,
        "agreement": metrics.mean_agreement,
        "drafting": end.state.is_on,
        "why": end.state.reason,
        "speedup": end.state.speedup,
        "drafters": {
            drafter.name: {"weight": drafter.weight, "proposed": drafter.proposed, "hits": drafter.hits}
            for drafter in metrics.drafters
        },
    }


def log_probabilities(
    head: Head, tokens: Sequence[EmittedToken], texts: Sequence[str], offset: int, piece: Piece
) -> dict[str, Any] | None:
    """The target's log-probabilities of tokens, in the form that the route has.

    Args:
        head: Of the request.
        tokens: Each with its log-probabilities, where they were asked for.
        texts: What became readable by each token.
        offset: Characters of the answer before them.
        piece: The bytes of a token.
    """
    if not head.has_log_probabilities:
        return None
    found = [(token.id, token.log_probabilities) for token in tokens if token.log_probabilities is not None]
    if head.is_chat:
        return {"content": [_entry(token, known, piece) for token, known in found], "refusal": None}
    offsets = []
    for text in texts[: len(found)]:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": [_text(token, piece) for token, _ in found],
        "token_logprobs": [known.chosen for _, known in found],
        "top_logprobs": [{_text(token, piece): value for token, value in known.top} for _, known in found],
        "text_offset": offsets,
    }


def _entry(token: int, known: LogProbabilities, piece: Piece) -> dict[str, Any]:
    top = [{"token": _text(rival, piece), "logprob": value, "bytes": list(piece(rival))} for rival, value in known.top]
    return {"token": _text(token, piece), "logprob": known.chosen, "bytes": list(piece(token)), "top_logprobs": top}


def _text(token: int, piece: Piece) -> str:
    return piece(token).decode("utf-8", "replace")
