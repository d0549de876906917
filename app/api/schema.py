"""What clients may send, checked field by field. Fields of others' inventions are let pass, as such servers do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.api.errors import ApiError

MOST_CHOICES = 128
MOST_STOPS = 64
ERRORS_TOLD = 3

REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "models here answer in text",
    "web_search_options": "nothing here searches the web",
    "suffix": "text is only continued at its end",
    "echo": "put the prompt before the answer yourself",
}
"""Known fields that would change the answer and are not supported, and what to do instead."""


class Schema(BaseModel):
    """Strict: a number in quotes is no number."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, frozen=True)


class ContentPart(Schema):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class CalledFunction(Schema):
    """Which function an earlier answer asked for, with its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class CallMade(Schema):
    """A tool call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Schema):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[ContentPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[CallMade, ...] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())


class FunctionDescription(Schema):
    """A function that the model may ask for."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Schema):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDescription


class ChosenFunction(Schema):
    """The function's name alone."""

    name: str


class ToolChoice(Schema):
    """The one function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class NamedSchema(Schema):
    """A JSON schema under a name, as OpenAI has it."""

    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Schema):
    """What form the answer takes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StreamOptions(Schema):
    """What is streamed besides the answer."""

    include_usage: bool | None = None


class TemplateSwitches(Schema):
    """Switches of the model's chat template."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enable_thinking: bool | None = None


class SpeculationFields(Schema):
    """How this request is drafted for; what is left out stays as the server was started."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    policy: str | None = None
    weights: str | None = None
    vote: str | None = None
    look_ahead: str | None = None
    shape: str | None = None
    acceptance: str | None = None


class AnswerFields(Schema):
    """What both kinds of request say about their answers. None stands for the server's own choice."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[tuple[str, ...], Field(max_length=MOST_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    grammar: str | None = None
    response_format: ResponseFormat | None = None
    speculation: SpeculationFields | None = None

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def has_log_probabilities(self) -> bool:
        """Whether they are asked for."""
        raise NotImplementedError

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(AnswerFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: tuple[Tool, ...] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateSwitches | None = None

    @property
    def has_log_probabilities(self) -> bool:
        return bool(self.logprobs)


class CompletionRequest(AnswerFields):
    """`POST /v1/completions`."""

    prompt: (
        str
        | Annotated[tuple[str, ...], Field(min_length=1)]
        | Annotated[tuple[int, ...], Field(min_length=1)]
        | Annotated[tuple[tuple[int, ...], ...], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None

    @property
    def has_log_probabilities(self) -> bool:
        return self.logprobs is not None

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """Each prompt as text or token ids."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        if isinstance(self.prompt[0], int):
            return (tuple(token for token in self.prompt if isinstance(token, int)),)
        return tuple(prompt for prompt in self.prompt if not isinstance(prompt, int))


AnyRequest = TypeVar("AnyRequest", bound=AnswerFields)


def parse(kind: type[AnyRequest], document: object) -> AnyRequest:
    """Check a request that was read from JSON.

    Raises:
        ApiError: something is missing, of the wrong kind or not supported; the message names field and value.
    """
    if not isinstance(document, Mapping):
        raise ApiError(400, f"the request must be a JSON object, found {_shown(document)}", "invalid_type")
    for name, instead in REFUSED.items():
        if document.get(name):
            raise ApiError(400, f"{name} is not supported; {instead}", "unsupported_parameter", name)
    modalities = document.get("modalities") or ["text"]
    if modalities != ["text"]:
        raise ApiError(
            400, f"modalities must be ['text'], found {_shown(modalities)}", "unsupported_parameter", "modalities"
        )
    try:
        return kind.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise _explained(error) from None


def read_json(body: bytes) -> object:
    """The body as data.

    Raises:
        ApiError: it is no JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is no JSON: {reason}", "invalid_json") from None


def _explained(error: ValidationError) -> ApiError:
    """The first faults, each with its place; the deepest come first, as they tell most of a value with alternatives."""
    faults = sorted(error.errors(include_url=False), key=lambda fault: -len(fault["loc"]))
    told = []
    places = []
    for fault in faults:
        place = ".".join(str(part) for part in fault["loc"] if not _is_alternative(part))
        if place not in places:
            places.append(place)
            found = "" if fault["type"] in ("missing", "json_invalid") else f", found {_shown(fault.get('input'))}"
            message = fault["msg"].replace("Tuple", "List")
            told.append(f"{place or 'the request'}: {message[:1].lower()}{message[1:]}{found}")
    missing = faults[0]["type"] == "missing"
    return ApiError(
        400, "; ".join(told[:ERRORS_TOLD]), "missing_parameter" if missing else "invalid_value", places[0] or None
    )


def _is_alternative(part: int | str) -> bool:
    """Pydantic puts the alternative that it tried into a place; clients know nothing of it."""
    return isinstance(part, str) and (part in ("str", "int", "ToolChoice") or "[" in part)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
