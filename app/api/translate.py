"""From a checked request to what the pool takes: prompts as tokens, settings of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from app.api.answer import Answer
from app.api.desk import Lent
from app.api.errors import ApiError
from app.api.schema import AnswerFields, ChatMessage, ChatRequest, CompletionRequest, ToolChoice
from app.api.tools import call_grammar, written_out
from engine.config import (
    Acceptance,
    GenerationSettings,
    LookAhead,
    Policy,
    Sampling,
    Shape,
    Speculation,
    VoteMode,
    WeightRule,
)
from engine.errors import SettingError
from engine.pool import PoolRequest
from engine.runtime.grammar import grammar_of_schema
from engine.runtime.sampler import SEED_LIMIT
from engine.runtime.template import Message, ToolCall
from engine.transcript import Transcript

ANY_JSON_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request says nothing, and how far requests may go."""

    settings: GenerationSettings = field(default_factory=GenerationSettings)
    most_tokens: int | None = None
    """Of an answer; None: as many as the context has room for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer that is asked for."""

    request: PoolRequest
    prompt_number: int = 0
    transcript: Transcript | None = None
    """Of the conversation; None for text that is continued."""
    reads_calls: bool = False
    """Whether the answer may hold tool calls."""

    def answer(self, index: int) -> Answer:
        """The answer, of which there is nothing yet.

        Args:
            index: Among the answers to the same request.
        """
        return Answer(index, self.prompt_number, self.reads_calls)


def chat_requests(request: ChatRequest, lent: Lent, defaults: Defaults) -> list[Asked]:
    """The answers that a chat request asks for.

    Raises:
        ApiError: fields contradict each other or a limit of the server.
        QuorumError: a value is out of range, or the template refuses the conversation.
    """
    template = lent.loaded.template
    tools = [_tool(tool.model_dump(exclude_none=True)) for tool in request.tools or ()]
    if request.tool_choice == "none":
        tools = []
    thinking = _thinking(request)
    settings = _settings(request, defaults, grammar=_enforced_call(request, tools))
    settings = replace(
        settings,
        max_tokens=_token_limit(request.max_completion_tokens or request.max_tokens, defaults),
        thinking=thinking,
        top_log_probabilities=_log_probabilities(request),
    )
    messages = [_message(message) for message in request.messages]
    if not template.knows_tools:
        messages = written_out(messages, tools)
    rendered = template.render(messages, thinking, tools if template.knows_tools else ())
    vocabulary = lent.loaded.model.vocabulary

    def tokenize(text: str, begins: bool) -> list[int]:
        return vocabulary.tokenize(text, adds_special=begins and not template.starts_with_bos(text))

    transcript = lent.recollection.encode(rendered, tokenize)
    prompt = tuple(token for piece in transcript.pieces for token in piece.tokens)
    opened = template.opens_thought(rendered)
    parts = tuple(transcript.prompt_parts)
    return [
        Asked(PoolRequest(prompt, seeded, opened, parts), transcript=transcript, reads_calls=bool(tools))
        for seeded in _choices(settings, request.choices)
    ]


def completion_requests(request: CompletionRequest, lent: Lent, defaults: Defaults) -> list[Asked]:
    """The answers that a completion request asks for, prompt by prompt.

    Raises:
        ApiError: fields contradict each other or a limit of the server.
        QuorumError: a value is out of range.
    """
    if request.best_of not in (None, request.choices):
        raise ApiError(400, "best_of must equal n; ask for n answers", "unsupported_parameter", "best_of")
    settings = replace(
        _settings(request, defaults),
        max_tokens=_token_limit(request.max_tokens, defaults),
        top_log_probabilities=request.logprobs,
    )
    prompts = [_prompt(prompt, lent) for prompt in request.prompts]
    return [
        Asked(PoolRequest(prompt, seeded), number)
        for number, prompt in enumerate(prompts)
        for seeded in _choices(settings, request.choices)
    ]


def _settings(request: AnswerFields, defaults: Defaults, grammar: str = "") -> GenerationSettings:
    """Everything that both kinds of request have.

    Args:
        grammar: That something else asks for.
    """
    base = defaults.settings.sampling
    given: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "repeat_penalty": request.repeat_penalty or request.repetition_penalty,
        "penalty_last_tokens": request.repeat_last_n,
        "seed": request.seed,
        "logit_bias": None if request.logit_bias is None else _biases(request.logit_bias),
        "grammar": _grammar(request, grammar),
    }
    sampling: Sampling = replace(base, **{name: value for name, value in given.items() if value is not None})
    return replace(
        defaults.settings,
        sampling=sampling,
        speculation=_speculation(request, defaults.settings.speculation),
        stop_strings=request.stops or defaults.settings.stop_strings,
    )


def _grammar(request: AnswerFields, enforced: str) -> str | None:
    form = request.response_format
    asked = {"tool_choice": enforced, "grammar": request.grammar}
    if form is not None and form.type != "text":
        schema = ANY_JSON_OBJECT
        if form.type == "json_schema":
            if form.json_schema is None:
                raise ApiError(
                    400,
                    "response_format of type json_schema needs json_schema.schema",
                    "missing_parameter",
                    "response_format.json_schema",
                )
            schema = json.dumps(form.json_schema.schema_)
        asked["response_format"] = grammar_of_schema(schema)
    given = [name for name, text in asked.items() if text]
    if len(given) > 1:
        raise ApiError(
            400, f"{' and '.join(given)} both say what form the answer takes; give one of them", "conflict", given[1]
        )
    return asked[given[0]] if given else None


def _speculation(request: AnswerFields, base: Speculation) -> Speculation:
    fields = request.speculation
    if fields is None:
        return base
    changes: dict[str, Any] = {}
    if fields.policy is not None:
        changes["policy"] = Policy.parse(fields.policy)
    kinds: dict[str, type[Enum]] = {
        "weights": WeightRule,
        "vote": VoteMode,
        "look_ahead": LookAhead,
        "shape": Shape,
        "acceptance": Acceptance,
    }
    for name, kind in kinds.items():
        value = getattr(fields, name)
        if value is None:
            continue
        try:
            changes[name] = kind(value)
        except ValueError:
            choices = ", ".join(choice.value for choice in kind)
            raise ApiError(
                400,
                f"speculation.{name} must be one of {choices}, found {value!r}",
                "invalid_value",
                f"speculation.{name}",
            ) from None
    return replace(base, **changes)


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if not token.isdecimal() or len(token) > 9:
            raise SettingError(f"logit_bias takes token numbers as keys, found {token!r}")
    return tuple((int(token), bias) for token, bias in biases.items())


def _token_limit(asked: int | None, defaults: Defaults) -> int | None:
    most = defaults.most_tokens
    if asked is not None and most is not None and asked > most:
        raise ApiError(
            400, f"max_tokens must be at most {most} on this server, found {asked}", "invalid_value", "max_tokens"
        )
    return asked or defaults.settings.max_tokens or most


def _choices(settings: GenerationSettings, count: int) -> list[GenerationSettings]:
    """The settings of several answers to one prompt: seeds follow each other, so that the answers differ."""
    seed = settings.sampling.seed
    if seed is None or count == 1:
        return [settings] * count
    return [
        replace(settings, sampling=replace(settings.sampling, seed=(seed + number) % SEED_LIMIT))
        for number in range(count)
    ]


def _log_probabilities(request: ChatRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "conflict", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _thinking(request: ChatRequest) -> bool | None:
    if request.chat_template_kwargs is not None and request.chat_template_kwargs.enable_thinking is not None:
        return request.chat_template_kwargs.enable_thinking
    return None if request.reasoning_effort is None else request.reasoning_effort not in ("none", "minimal")


def _message(message: ChatMessage) -> Message:
    calls = tuple(ToolCall(call.function.name, call.function.arguments, call.id) for call in message.tool_calls or ())
    role = "system" if message.role == "developer" else message.role
    return Message(role, message.text, calls, message.tool_call_id or "", message.name or "")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"description": "", "parameters": {"type": "object", "properties": {}}, **tool["function"]}
    return {"type": "function", "function": function}


def _enforced_call(request: ChatRequest, tools: Sequence[Mapping[str, Any]]) -> str:
    """The grammar of the call that must be made; empty where none must."""
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return ""
    if not tools:
        raise ApiError(400, "tool_choice needs tools to choose from", "conflict", "tool_choice")
    if isinstance(choice, ToolChoice):
        tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
        if not tools:
            raise ApiError(
                400,
                f"tool_choice names {choice.function.name!r}, which is not among the tools",
                "invalid_value",
                "tool_choice.function.name",
            )
    return call_grammar(tools, allows_several=choice == "required" and request.parallel_tool_calls is True)


def _prompt(prompt: str | tuple[int, ...], lent: Lent) -> tuple[int, ...]:
    vocabulary = lent.loaded.model.vocabulary
    if isinstance(prompt, str):
        return tuple(vocabulary.tokenize(prompt, adds_special=True))
    for token in prompt:
        if not 0 <= token < vocabulary.size:
            raise ApiError(
                400,
                f"prompt has token {token}; this model's tokens are 0 to {vocabulary.size - 1}",
                "invalid_value",
                "prompt",
            )
    return prompt
