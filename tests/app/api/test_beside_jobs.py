"""Requests of other programs while the model has something else to do, and what those who wait are told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import httpx
import pytest

from app.api.desk import IS_COMPARED
from app.api.routes import ApiOptions
from app.api.translate import Defaults
from app.bench.prompts import Prompt
from app.comparison import ComparisonRequest
from app.jobs import JobState, ReportingJob
from app.service import Service
from engine.runtime.template import Message
from tests.app.api.conftest import GREEDY, MOST_ACTIVE, QUESTION, Served, serving_in_thread, wait_until
from tests.app.conftest import PATIENCE_S, finished

CHAT = "/v1/chat/completions"
COMPARED = ComparisonRequest(
    (("ngram",),), ("fixed:2",), (Prompt("one", "chat", (Message("user", "Name a river."),)),), 1, 400
)


@pytest.mark.parametrize(
    ("begin", "doing"),
    [
        (Service.verify, "comparing drafted answers with plain ones"),
        (Service.check, "measuring how exact the model is"),
    ],
)
def test_requests_go_on_beside_what_the_page_has_measured(
    served: Served, begin: Callable[[Service], ReportingJob], doing: str
) -> None:
    expected = served.chat(max_tokens=8)
    job = begin(served.service)
    wait_until(lambda: job.peek().state is not JobState.WAITING, "the job to begin")
    health = httpx.get(f"{served.url}/health").json()
    assert (health["status"], health["occupied_by"]) == ("ok", doing)
    found = served.chat(max_tokens=8)
    assert not job.is_over, "the request was answered only after the job"
    assert found["choices"] == expected["choices"]
    job.cancel()
    finished(job)
    assert "occupied_by" not in httpx.get(f"{served.url}/health").json()


def test_requests_are_refused_while_a_comparison_takes_the_models_place(served: Served) -> None:
    desk = served.service.desk
    job = served.service.compare(COMPARED)
    wait_until(lambda: desk.refusal == IS_COMPARED, "the comparison to begin")
    response = served.post(CHAT, {"messages": QUESTION, "max_tokens": 2})
    assert (response.status_code, response.json()["error"]["message"]) == (503, IS_COMPARED)
    assert int(response.headers["retry-after"]) >= 1
    health = httpx.get(f"{served.url}/health")
    assert (health.status_code, health.json()["reason"]) == (503, IS_COMPARED)
    job.cancel()
    finished(job)
    wait_until(lambda: not desk.refusal, "the set to be there again")
    assert served.chat(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_whoever_waits_for_a_stream_is_told_so(served: Served) -> None:
    """Also where the bell rings all the time, since the answers of others go on."""
    service = served.service
    served.chat(max_tokens=1)
    tickets = served.occupy(MOST_ACTIVE)
    try:
        body = {"messages": QUESTION, "max_tokens": 3, "stream": True}
        with contextlib.ExitStack() as ends:
            url = ends.enter_context(serving_in_thread(service, ApiOptions(Defaults(GREEDY), quiet_s=0.05)))
            response = ends.enter_context(httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=PATIENCE_S))
            lines = (line for line in response.iter_lines() if line)
            assert [next(lines) for _ in range(3)] == [": the request waits for the model"] * 3
            for ticket in tickets:
                ticket.cancel()
            said = [line for line in lines if line.startswith("data:")]
    finally:
        for ticket in tickets:
            ticket.cancel()
    assert said[-1] == "data: [DONE]"
    assert len(said) > 3
    wait_until(lambda: service.desk.is_idle, "the requests to end")
