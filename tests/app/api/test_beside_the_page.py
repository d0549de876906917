"""The same routes beside the chat page."""

from __future__ import annotations

import os

import pytest

from app.service import Service
from engine.config import GenerationSettings, Sampling
from tests.app.api.conftest import QUESTION
from tests.app.conftest import client_of, finished, settings

GREEDY = GenerationSettings(Sampling(temperature=0))


def test_without_a_model_the_routes_say_what_comes_first(service: Service) -> None:
    with client_of(service, GREEDY) as client:
        assert client.get("/").status_code == 200
        assert client.get("/v1/models").json()["data"] == []
        response = client.post("/v1/chat/completions", json={"messages": QUESTION})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert client.get("/v1/nothing").json()["error"]["code"] == "not_found"
        assert "quorum_ready 0" in client.get("/metrics").text
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403


def test_a_request_is_answered_as_a_chat_is(loaded: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = loaded.conversations.create()
    run = finished(loaded.ask(conversation.id, QUESTION[0]["content"], settings(max_tokens=16)))
    body = {"messages": QUESTION, "max_tokens": 16}
    with client_of(loaded, GREEDY) as client:
        response = client.post("/v1/chat/completions", json=body)
        assert response.json()["choices"][0]["message"]["content"] == run.read().text
    monkeypatch.setitem(os.environ, "QUORUM_API_KEY", "secret")
    with client_of(loaded, GREEDY) as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 401
        assert client.get("/").status_code == 200
