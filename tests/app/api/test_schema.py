"""What is let in and what is refused, without a model."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.errors import ApiError
from app.api.schema import ChatRequest, CompletionRequest, parse, read_json

QUESTION = [{"role": "user", "content": "x"}]


def refusal(kind: Any, document: object) -> ApiError:
    with pytest.raises(ApiError) as raised:
        parse(kind, document)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "x"}, "messages", "found 'x'"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", "'tool', found 'wizard'"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "field required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"temperature": "1"}, "temperature", "valid number, found '1'"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, found 0"),
        ({"max_tokens": 1.5}, "max_tokens", "found 1.5"),
        ({"stream": "yes"}, "stream", "found 'yes'"),
        ({"n": 0}, "n", "found 0"),
        ({"top_logprobs": 21}, "top_logprobs", "found 21"),
        ({"tools": [{"type": "search"}]}, "tools.0.type", "'function', found 'search'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "found 'a b'"),
        ({"tool_choice": "maybe"}, "tool_choice", "'required', found 'maybe'"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "found 'yaml'"),
        ({"speculation": {"speed": 1}}, "speculation.speed", "not permitted"),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other", "not permitted"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"audio": {"voice": "x"}}, "audio", "text"),
        ({"modalities": ["text", "audio"]}, "modalities", "found"),
    ],
)
def test_faults_are_named_with_their_place(fields: dict[str, Any], param: str, says: str) -> None:
    error = refusal(ChatRequest, {"messages": QUESTION, **fields})
    assert error.param == param
    assert says in error.message


def test_many_faults_are_told_in_part() -> None:
    error = refusal(ChatRequest, {"messages": QUESTION, "n": 0, "seed": "a", "top_p": "b", "min_p": "c", "top_k": "d"})
    assert error.message.count(";") == 2


def test_the_unknown_and_the_empty_are_let_pass() -> None:
    request = parse(
        ChatRequest,
        {"messages": QUESTION, "user": "me", "n_predict": 4, "functions": None, "modalities": ["text"], "stop": None},
    )
    assert request.choices == 1
    assert request.stops == ()
    assert not hasattr(request, "user")


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}]
    request = parse(ChatRequest, {"messages": [{"role": "user", "content": parts}, {"role": "assistant"}]})
    assert [message.text for message in request.messages] == ["ab", ""]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_prompts_have_four_forms(prompt: object, prompts: tuple[object, ...]) -> None:
    assert parse(CompletionRequest, {"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], "a"], {"a": 1}, None, [True], [1.5]])
def test_other_prompts_are_refused(prompt: object) -> None:
    assert (refusal(CompletionRequest, {"prompt": prompt}).param or "").startswith("prompt")


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "end"}])
def test_what_would_change_a_completion_is_refused(fields: dict[str, Any]) -> None:
    assert refusal(CompletionRequest, {"prompt": "a", **fields}).code == "unsupported_parameter"


def test_half_characters_are_refused() -> None:
    body = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
    assert "invalid JSON" in refusal(ChatRequest, read_json(body)).message
