"""What an open page is sent, over the route that its script reads."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from fastapi.testclient import TestClient

from app.conversations import LISTED_AT_FIRST
from app.layout import TEXT_VIEW
from app.page_state import TURNS_AT_FIRST, PageWatch
from app.page_stream import PATH
from app.service import Service
from tests.app.conftest import finished, settings


def events(client: TestClient, conversation_id: str) -> list[dict[str, Any]]:
    """All that is sent until the stream says that it is over."""
    asked: dict[str, str | int] = {"conversation": conversation_id, "words": "", "view": TEXT_VIEW}
    asked |= {"turns": TURNS_AT_FIRST, "listed": LISTED_AT_FIRST}
    answered = client.get(PATH, params=asked)
    assert answered.headers["content-type"].startswith("text/event-stream")
    *told, last, rest = answered.text.split("\n\n")
    assert (last, rest) == ("event: end\ndata:", "")
    return [json.loads(one.removeprefix("data: ")) for one in told]


def drawn(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat's messages after these events, as the page's script puts them together."""
    messages: list[dict[str, Any]] = []
    for event in told:
        if event["chat"]:
            messages = messages[: event["chat"]["kept"]] + event["chat"]["more"]
    return messages


def texts(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"][0]["text"] for message in messages]


def test_a_page_at_rest_is_told_all_once(client: TestClient, service: Service) -> None:
    [told] = events(client, service.conversations.create().id)
    assert told["chat"] == {"kept": 0, "more": []}
    components = [json.dumps(value) for value in told["values"].values()]
    assert sum("No model is loaded." in value for value in components) == 1
    assert [*told["values"]] == [str(place) for place in range(len(components))]


def test_of_a_running_answer_only_what_changes_is_sent(client: TestClient, loaded: Service) -> None:
    conversation_id = loaded.conversations.create().id
    finished(loaded.ask(conversation_id, "Name a colour.", settings(8)))
    before = len(PageWatch(loaded, conversation_id).look().messages)
    run = loaded.ask(conversation_id, "Tell me about the sea.", settings(96))
    first, *later = events(client, conversation_id)
    assert len(later) > 1
    state = PageWatch(loaded, conversation_id).look()
    assert texts(drawn([first, *later])) == [message["content"].strip() for message in state.messages]
    assert run.peek().text.strip() in texts(drawn([first, *later]))
    assert all(event["chat"]["kept"] > before for event in later if event["chat"])
    status = next(place for place, value in first["values"].items() if value == state.status)
    assert not any(status in event["values"] for event in later)
    live = next(place for place, value in later[-1]["values"].items() if value == state.live)
    assert sum(live in event["values"] for event in later) > 1


def test_a_thought_is_drawn_apart_and_counted(client: TestClient, loaded: Service) -> None:
    conversation_id = loaded.conversations.create().id
    finished(loaded.ask(conversation_id, "Name a colour.", settings(8)))
    (turn,) = loaded.conversations.get(conversation_id).turns  # type: ignore[union-attr]
    loaded.conversations.set_turn(conversation_id, 0, replace(turn, thinking="A colour.", answer="Blue.", note=""))
    loaded.ask(conversation_id, "And a river?", settings(48))
    told = events(client, conversation_id)
    question, thought, answer, *_ = messages = drawn(told)
    assert texts([question, thought, answer]) == ["Name a colour.", "A colour.", "Blue."]
    assert thought["metadata"]["title"] == "Reasoning"
    assert texts(messages)[3] == "And a river?"
    assert {event["chat"]["kept"] for event in told[1:] if event["chat"]} == {4}


def test_a_closed_service_ends_the_stream(client: TestClient, loaded: Service) -> None:
    conversation_id = loaded.conversations.create().id
    loaded.ask(conversation_id, "Tell me about the sea.", settings(400))
    loaded.close()
    told = events(client, conversation_id)
    assert any("Quorum has ended" in json.dumps(value) for value in told[-1]["values"].values())
