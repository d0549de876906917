"""A service with the real starter, on one thread so that busy threads do not wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from fastapi.testclient import TestClient
from playwright.sync_api import Browser, expect, sync_playwright

from app.choices import SetChoice
from app.conversations import Conversations
from app.jobs import Job, Preparation
from app.server import create_app
from app.service import Service
from engine.config import GenerationSettings, ModelPlacement, Policy, PolicyKind, Sampling, SetConfig, Speculation
from tests.app.browser import ARGUMENTS, PATIENCE_MS, find_browser

AnyJob = TypeVar("AnyJob", bound=Job)

HOST = "127.0.0.1"
PATIENCE_S = 240.0
"""Far longer than anything here takes, even on a machine that is busy with something else."""


class FakeClock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def settings(max_tokens: int | None = None, policy: PolicyKind = PolicyKind.AUTO) -> GenerationSettings:
    """Greedy, so that answers are known."""
    return GenerationSettings(Sampling(temperature=0), Speculation(Policy(policy)), max_tokens=max_tokens)


def loading(config: SetConfig) -> Preparation:
    """A load that needs no preparation."""
    return lambda _report, _cancel: config


def finished(job: AnyJob) -> AnyJob:
    assert job.wait_until_over(PATIENCE_S), "the job did not end"
    return job


@pytest.fixture(scope="session")
def set_config(starter: Path, tmp_path_factory: pytest.TempPathFactory) -> SetConfig:
    """The starter with the drafters that need no file; this machine is measured once for all tests."""
    return SetConfig(
        target=starter,
        context_tokens=1024,
        placement=ModelPlacement(threads=1),
        cost_file=tmp_path_factory.mktemp("costs") / "costs.json",
    )


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def service(clock: FakeClock, home: Path) -> Iterator[Service]:
    """Nothing loaded yet."""
    made = Service(Conversations(), clock=clock)
    yield made
    made.close()


@pytest.fixture
def loaded(service: Service, set_config: SetConfig) -> Service:
    """The starter loaded."""
    finished(service.load(loading(set_config)))
    assert service.loaded is not None
    return service


def client_of(service: Service, defaults: GenerationSettings) -> TestClient:
    """Asks the server around the page, made by what the environment says now."""
    return TestClient(create_app(service, SetChoice(), defaults, HOST, 7860), base_url=f"http://{HOST}:7860")


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    """Asks the server around the page, with nothing loaded but what a test loads."""
    with client_of(service, GenerationSettings()) as made:
        yield made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Quorum's folders, empty."""
    folder = tmp_path / "home"
    monkeypatch.setenv("QUORUM_HOME", str(folder))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = find_browser()
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield launched
        launched.close()
