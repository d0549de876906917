"""The server's own duties: limits, order, clients that go, sets that go, strangers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket

import httpx
import pytest

from app.api.routes import ApiOptions
from app.api.translate import Defaults
from app.conversations import Conversations
from app.service import Service
from engine.config import SetConfig
from engine.pool import PoolSettings
from tests.app.api.conftest import (
    GREEDY,
    MOST_ACTIVE,
    MOST_BODY_BYTES,
    MOST_WAITING,
    QUESTION,
    Served,
    serving_in_thread,
    wait_until,
)
from tests.app.conftest import PATIENCE_S, finished, loading, settings

CHAT = "/v1/chat/completions"


def test_unknown_places_and_methods_are_told_as_json(served: Served) -> None:
    for path, status, code in (("/v1/embeddings", 404, "not_found"), ("/nothing", 404, "not_found")):
        response = httpx.post(f"{served.url}{path}", json={})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    response = httpx.get(f"{served.url}{CHAT}")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[1]", b"[" * 5000, b'"text"', b"", b"null"])
def test_what_is_no_json_object_is_refused(served: Served, content: bytes) -> None:
    response = httpx.post(f"{served.url}{CHAT}", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_large_bodies_are_refused_unread(served: Served) -> None:
    large = {"messages": [{"role": "user", "content": "x" * MOST_BODY_BYTES}]}
    status, error = served.refusal(CHAT, large)
    assert (status, error["code"]) == (413, "too_large")

    def parts() -> object:
        for _ in range(64):
            yield b" " * 1024

    response = httpx.post(f"{served.url}{CHAT}", content=parts())  # type: ignore[arg-type]
    assert response.status_code == 413


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}])
def test_strangers_get_no_further(served: Served, headers: dict[str, str]) -> None:
    before = served.service.desk.counts
    response = httpx.post(f"{served.url}{CHAT}", json={"messages": QUESTION, "max_tokens": 2}, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "foreign_request")
    for path in ("/health", "/metrics"):
        assert httpx.get(f"{served.url}{path}", headers=headers).status_code == 403
    assert served.service.desk.counts == before


def test_a_key_opens_everything_but_health(served: Served) -> None:
    body = {"messages": QUESTION, "max_tokens": 2}
    with serving_in_thread(served.service, ApiOptions(Defaults(GREEDY), key="secret")) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"x-api-key": "secret"}):
            for path in ("/v1/models", "/metrics"):
                response = httpx.get(f"{url}{path}", headers=headers)
                assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert httpx.post(f"{url}{CHAT}", json=body, headers=headers).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
        assert httpx.get(f"{url}/metrics", headers=headers).status_code == 200
        assert httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=PATIENCE_S).status_code == 200


def test_a_full_queue_says_when_to_come_back(served: Served) -> None:
    desk = served.service.desk
    served.chat(max_tokens=1)  # the pool is made
    tickets = served.occupy(MOST_ACTIVE)
    try:
        wait_until(lambda: (found := desk.statistics) is not None and found.active == MOST_ACTIVE, "all to be answered")
        tickets += served.occupy(MOST_WAITING)
        response = served.post(CHAT, {"messages": QUESTION, "max_tokens": 2})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert int(response.headers["retry-after"]) >= 1
    finally:
        for ticket in tickets:
            ticket.cancel()
    wait_until(lambda: desk.is_idle, "the requests to end")
    assert served.chat(max_tokens=2)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_goes_ends_its_answer(served: Served, streams: bool) -> None:
    """The others go on; what was still to be said is not said."""
    desk = served.service.desk
    served.chat(max_tokens=1)
    [other] = served.occupy(1)
    before = desk.counts
    body = json.dumps({"messages": QUESTION, "stream": streams, "n": 1, "logit_bias": {"2": -100, "0": -100}}).encode()
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if streams:
            assert b"200 OK" in connection.recv(4096)
        wait_until(lambda: (found := desk.statistics) is not None and found.active == 2, "it to be answered")
    wait_until(lambda: desk.counts["cancelled"] == before["cancelled"] + 1, "it to be cancelled")
    assert not other.is_over
    other.cancel()
    wait_until(lambda: desk.is_idle, "the other to end")
    assert desk.counts["done"] == before["done"]


def test_more_than_find_room_wait_their_turn(served: Served) -> None:
    with concurrent.futures.ThreadPoolExecutor(MOST_ACTIVE + MOST_WAITING) as threads:
        answers = [
            threads.submit(served.chat, max_tokens=12, temperature=1, seed=seed)
            for seed in range(MOST_ACTIVE + MOST_WAITING)
        ]
        found = [answer.result()["choices"][0]["message"]["content"] for answer in answers]
    alone = [
        served.chat(max_tokens=12, temperature=1, seed=seed)["choices"][0]["message"]["content"]
        for seed in range(MOST_ACTIVE + MOST_WAITING)
    ]
    assert found == alone


def test_chats_and_requests_go_on_beside_each_other(served: Served) -> None:
    service = served.service
    conversation = service.conversations.create()
    run = service.ask(conversation.id, "Tell me a long story about a river.", settings(max_tokens=300))
    wait_until(lambda: bool(run.read().text), "the chat's answer to begin")
    before = len(run.read().tokens)
    answer = served.chat(max_tokens=8)
    assert not run.is_over, "the request was answered only after the chat"
    assert len(run.read().tokens) > before, "the chat stood still"
    assert answer["usage"]["completion_tokens"] == 8
    service.stop(conversation.id)
    finished(run)


def test_metrics_are_prometheus_text(served: Served) -> None:
    served.chat(max_tokens=3)
    response = httpx.get(f"{served.url}/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert values["quorum_ready"] == "1"
    assert values["quorum_requests_exact"] == "1"
    assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["requests_at_once"].startswith("exact")
    assert float(values["quorum_done_total"]) >= 1
    assert float(values["quorum_tokens_total"]) >= 3
    assert float(values['quorum_http_responses_total{status="200"}']) >= 1
    names = [line.split()[2] for line in response.text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_a_set_that_goes_ends_its_requests_with_a_reason(client_home: None, set_config: SetConfig) -> None:
    service = Service(Conversations(), pool_settings=PoolSettings(MOST_ACTIVE, MOST_WAITING))
    endless = {"messages": QUESTION, "logit_bias": {"2": -100, "0": -100}}
    with contextlib.closing(service), serving_in_thread(service, ApiOptions(Defaults(GREEDY))) as url:
        served = Served(url, service)
        status, error = served.refusal(CHAT, {"messages": QUESTION})
        assert (status, error["code"]) == (503, "not_ready")
        assert "load one" in error["message"]
        assert httpx.get(f"{url}/health").status_code == 503
        assert httpx.get(f"{url}/v1/models").json()["data"] == []
        finished(service.load(loading(set_config)))
        assert httpx.get(f"{url}/health").json() == {"status": "ok", "model": set_config.target.stem}
        with concurrent.futures.ThreadPoolExecutor() as threads:
            whole = threads.submit(served.refusal, CHAT, endless)
            with httpx.stream("POST", f"{url}{CHAT}", json={**endless, "stream": True}, timeout=PATIENCE_S) as stream:
                lines = stream.iter_lines()
                next(line for line in lines if line.startswith("data:"))
                wait_until(lambda: (found := service.desk.statistics) is not None and found.active == 2, "both to run")
                finished(service.load(loading(set_config)))
                *_, last = (line for line in lines if line.startswith("data:"))
            assert "exchanged" in json.loads(last.removeprefix("data:"))["error"]["message"]
            status, error = whole.result()
            assert (status, error["code"]) == (503, "not_ready")
            assert "exchanged" in error["message"]
        assert served.chat(max_tokens=2)["usage"]["completion_tokens"] == 2
        finished(service.unload())
        assert served.refusal(CHAT, {"messages": QUESTION})[0] == 503
