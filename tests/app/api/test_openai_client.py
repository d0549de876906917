"""The official OpenAI client against a real server: what people's programs do, nothing mocked."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from engine.config import GenerationSettings, Sampling, SetConfig
from engine.loader import LoadedSet
from engine.runtime.template import Message
from engine.session import Session
from engine.types import Finished
from tests.app.api.conftest import Served

MODEL = "quorum"
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three rivers."}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 12}, "days": {"$ref": "#/$defs/Days"}},
            "required": ["place", "days"],
            "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}


def session_answers(
    config: SetConfig, conversations: list[list[Message]], settings: GenerationSettings
) -> list[Finished]:
    """What a session of its own says to each."""
    loaded = LoadedSet.load(config)
    answers = []
    try:
        for messages in conversations:
            session = Session(loaded)
            *_, last = session.chat(messages, settings, threading.Event())
            assert isinstance(last, Finished)
            answers.append(last)
            session.close()
    finally:
        loaded.close()
    return answers


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"temperature": 0}, Sampling(temperature=0)),
        (
            {"temperature": 0.9, "top_p": 0.8, "seed": 11, "frequency_penalty": 0.4, "extra_body": {"top_k": 30}},
            Sampling(temperature=0.9, top_p=0.8, top_k=30, seed=11, frequency_penalty=0.4),
        ),
    ],
)
def test_an_answer_is_a_sessions_answer(
    client: openai.OpenAI, set_config: SetConfig, fields: dict[str, Any], sampling: Sampling
) -> None:
    settings = GenerationSettings(sampling, max_tokens=40)
    [expected] = session_answers(set_config, [[Message("user", "Name three rivers.")]], settings)
    for policy in ("auto", "off", "fixed:4"):
        extra = {**fields.get("extra_body", {}), "speculation": {"policy": policy}}
        answer = client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=40, **{**fields, "extra_body": extra}
        )
        assert answer.choices[0].message.content == expected.text
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(expected.token_ids)


def test_a_second_turn_is_a_sessions_second_turn_and_reads_only_what_is_new(
    client: openai.OpenAI, set_config: SetConfig
) -> None:
    settings = GenerationSettings(Sampling(temperature=0), max_tokens=30)
    first = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=30)
    said = first.choices[0].message.content
    assert said
    follow_up: list[ChatCompletionMessageParam] = [
        *ASKED,
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And a lake?"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=follow_up, max_tokens=30)
    loaded = LoadedSet.load(set_config)
    try:
        session = Session(loaded)
        messages = [Message("user", "Name three rivers.")]
        *_, one = session.chat(messages, settings, threading.Event())
        assert isinstance(one, Finished)
        messages = [*messages, Message("assistant", one.text), Message("user", "And a lake?")]
        *_, two = session.chat(messages, settings, threading.Event())
        assert isinstance(two, Finished)
        session.close()
    finally:
        loaded.close()
    assert second.choices[0].message.content == two.text
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens == two.metrics.prompt_tokens
    details = second.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    assert details.cached_tokens >= first.usage.prompt_tokens


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=24, seed=3, temperature=0.8)
    parts: dict[str, Any] = {"text": "", "reasons": [], "roles": [], "usages": []}
    with client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=24,
        seed=3,
        temperature=0.8,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            parts["usages"].append(chunk.usage)
            for choice in chunk.choices:
                parts["text"] += choice.delta.content or ""
                parts["roles"] += [choice.delta.role] if choice.delta.role else []
                parts["reasons"] += [choice.finish_reason] if choice.finish_reason else []
    assert parts["text"] == whole.choices[0].message.content
    assert parts["reasons"] == [whole.choices[0].finish_reason] == ["length"]
    assert parts["roles"] == ["assistant"]
    *earlier, last = parts["usages"]
    assert last.completion_tokens == 24
    assert not any(earlier)


def test_several_answers_have_seeds_that_follow_each_other(client: openai.OpenAI) -> None:
    several = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=16, temperature=1, seed=5, n=3)
    alone = [
        client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=16, temperature=1, seed=seed)
        for seed in (5, 6, 7)
    ]
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert texts == [answer.choices[0].message.content for answer in alone]
    assert len(set(texts)) > 1
    assert several.usage is not None
    assert several.usage.prompt_tokens == alone[0].usage.prompt_tokens  # type: ignore[union-attr]


def test_log_probabilities_belong_to_the_answers_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob < 0
        assert bytes(entry.bytes or []).decode() == entry.token
    streamed = [
        entry.token
        for chunk in client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=12, temperature=0, logprobs=True, stream=True
        )
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert streamed == [entry.token for entry in logprobs.content]


def test_stop_strings_end_answers_and_are_no_part_of_them(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=40, temperature=0)
    text = whole.choices[0].message.content
    assert text
    stop = text[20:24]
    for stops in (stop, ["never said so", stop]):
        cut = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=40, temperature=0, stop=stops)
        assert cut.choices[0].message.content == text[: text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"


def test_a_schema_is_followed(client: openai.OpenAI) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "length_km": {"type": "integer"}},
        "required": ["name", "length_km"],
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": {"name": "river", "schema": schema}},
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert set(found) == {"name", "length_km"}
    assert isinstance(found["length_km"], int)
    anything = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=200, response_format={"type": "json_object"}, stop=["}"]
    )
    assert (anything.choices[0].message.content or "").lstrip().startswith("{")
    colour = client.chat.completions.create(
        model=MODEL, messages=ASKED, extra_body={"grammar": 'root ::= "red" | "blue"'}
    )
    assert colour.choices[0].message.content in ("red", "blue")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_is_made(client: openai.OpenAI, choice: Any) -> None:
    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is the weather in Rome?"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=asked, tools=[WEATHER], tool_choice=choice, max_tokens=120
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"place", "days"}
    streamed = [
        call_part
        for chunk in client.chat.completions.create(
            model=MODEL, messages=asked, tools=[WEATHER], tool_choice=choice, max_tokens=120, stream=True
        )
        for part in chunk.choices
        for call_part in part.delta.tool_calls or []
    ]
    [part] = streamed
    assert part.index == 0
    assert part.function is not None
    assert part.function.name == "weather"
    assert json.loads(part.function.arguments or "") == arguments
    made: Any = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    back = client.chat.completions.create(
        model=MODEL,
        messages=[*asked, made, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}],
        tools=[WEATHER],
        tool_choice="none",
        max_tokens=8,
    )
    assert back.choices[0].message.content


def test_text_is_continued(client: openai.OpenAI, served: Served) -> None:
    one = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, logprobs=2)
    assert "Paris" in one.choices[0].text
    logprobs = one.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == one.choices[0].text
    assert all(len(top) == 2 for top in logprobs.top_logprobs or [])
    with served.service.desk.borrowed() as lent:
        tokens = lent.loaded.model.vocabulary.tokenize("The capital of France is", adds_special=True)
    many = client.completions.create(
        model=MODEL, prompt=["The capital of France is", "Once upon a"], max_tokens=4, n=2, temperature=0
    )
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text == one.choices[0].text
    assert "time" in many.choices[2].text
    by_number = client.completions.create(model=MODEL, prompt=tokens, max_tokens=4)
    assert by_number.choices[0].text == one.choices[0].text
    streamed = client.completions.create(model=MODEL, prompt=[tokens], max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text


def test_models_can_be_listed_and_looked_at(client: openai.OpenAI, set_config: SetConfig) -> None:
    [model] = client.models.list().data
    assert model.id == set_config.target.stem
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError, match="not loaded here"):
        client.models.retrieve("gpt-4")


def test_what_drafting_did_is_told(served: Served) -> None:
    repeating = {"prompt": "one two three, " * 10, "max_tokens": 40}
    bodies = {}
    for policy in ("fixed:4", "off"):
        response = served.post("/v1/completions", {**repeating, "speculation": {"policy": policy}})
        bodies[policy] = response.json()
    timings, own = bodies["fixed:4"]["timings"], bodies["fixed:4"]["quorum"][0]
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    assert timings["predicted_n"] == bodies["fixed:4"]["usage"]["completion_tokens"] == 40
    assert own["passes_with_drafts"] + own["passes_without"] + timings["draft_n_accepted"] == 40
    assert own["ended_by"] == "length"
    assert bodies["off"]["timings"]["draft_n"] == 0
    assert bodies["off"]["choices"] == bodies["fixed:4"]["choices"]


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "not loaded here"),
        ({"temperature": 9}, openai.BadRequestError, "temperature must be from 0 to 5"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "at most 600"),
        ({"seed": -3}, openai.BadRequestError, "seed"),
        ({"n": 100}, openai.BadRequestError, "holds 5 at once"),
        ({"logit_bias": {"999999": 1}}, openai.BadRequestError, "49152 tokens"),
        ({"stream": True, "extra_body": {"grammar": "nothing ::="}}, openai.BadRequestError, "grammar"),
        ({"messages": [{"role": "user", "content": "river " * 2000}]}, openai.BadRequestError, "1024"),
        ({"extra_body": {"speculation": {"policy": "wild"}}}, openai.BadRequestError, "policy"),
        ({"extra_body": {"speculation": {"polcy": "off"}}}, openai.BadRequestError, "polcy"),
    ],
)
def test_what_cannot_be_done_is_explained(
    client: openai.OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": ASKED, "max_tokens": 4, **fields})
    assert raised.value.body["message"]  # type: ignore[index]
