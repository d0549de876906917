"""The interface as clients meet it: a real server in a thread, in front of the real starter."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from app.api.routes import ApiOptions
from app.api.translate import Defaults
from app.conversations import Conversations
from app.server import create_api_app, listen
from app.service import Service
from engine.config import GenerationSettings, Sampling, SetConfig
from engine.pool import PoolRequest, PoolSettings, Ticket
from tests.app.conftest import PATIENCE_S, finished, loading

HOST = "127.0.0.1"
MOST_ACTIVE = 2
MOST_WAITING = 3
MOST_TOKENS = 600
MOST_BODY_BYTES = 20_000
GREEDY = GenerationSettings(Sampling(temperature=0))
QUESTION = [{"role": "user", "content": "Name three rivers."}]


@dataclass
class Served:
    """A server that runs, and what stands behind it."""

    url: str
    service: Service

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_S)

    def chat(self, **fields: Any) -> dict[str, Any]:
        """The answer to a chat request that is well formed."""
        response = self.post("/v1/chat/completions", {"messages": QUESTION, **fields})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def refusal(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        response = self.post(path, body)
        return response.status_code, dict(response.json()["error"])

    def occupy(self, count: int) -> list[Ticket]:
        """So many requests that do not end by themselves for a long time."""
        endless = GenerationSettings(Sampling(temperature=0, logit_bias=((0, -100.0), (2, -100.0))))
        prompt = (1, 4093, 198, 26843, 216)
        return self.service.desk.submit([PoolRequest(prompt, endless)] * count)


@pytest.fixture(scope="module")
def client_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUORUM_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@contextlib.contextmanager
def serving_in_thread(service: Service, options: ApiOptions) -> Iterator[str]:
    """A real server for the time being; its address."""
    listener = listen(HOST, 0)
    app = create_api_app(service, options, HOST)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    wait_until(lambda: server.started, "the server to start")
    try:
        yield f"http://{HOST}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def served(client_home: None, set_config: SetConfig) -> Iterator[Served]:
    """The starter, greedy unless told otherwise, with little room so that it can be filled."""
    service = Service(Conversations(), pool_settings=PoolSettings(MOST_ACTIVE, MOST_WAITING))
    try:
        finished(service.load(loading(set_config)))
        options = ApiOptions(Defaults(GREEDY, MOST_TOKENS), MOST_BODY_BYTES)
        with serving_in_thread(service, options) as url:
            yield Served(url, service)
    finally:
        service.close()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)
