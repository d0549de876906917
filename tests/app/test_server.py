"""The server around the page, without a browser and without a model."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from app.choices import SetChoice, preparation
from app.controls import AnswerControls
from app.page_stream import PATH
from app.server import PORTS_TRIED, listen
from engine.config import GenerationSettings, Policy, PolicyKind, Shape, Speculation
from engine.errors import EnvironmentProblem, MemoryShortage, ModelFileError, SettingError
from engine.runtime.devices import Device
from models import budget
from tests.app.conftest import HOST
from tests.conftest import with_model


def test_health_tells_what_is_loaded(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok", "model": None}


def test_the_page_is_served_to_us_and_to_nobody_else(client: TestClient) -> None:
    assert client.get("/").status_code == 200
    for path in ("/", "/health", "/config", "/gradio_api/info", PATH):
        assert client.get(path, headers={"host": "evil.example"}).status_code == 403
        assert client.get(path, headers={"origin": "https://evil.example"}).status_code == 403
    assert client.post("/gradio_api/queue/join", headers={"origin": "null"}, json={}).status_code == 403


def test_the_page_reports_to_nobody_and_keeps_no_history(client: TestClient) -> None:
    config = client.get("/config").json()
    assert config["analytics_enabled"] is False
    assert not config.get("run_history")
    assert config["connect_heartbeat"] is False


def test_a_port_in_use_gives_the_next_one() -> None:
    with listen(HOST, 0) as taken:
        port = taken.getsockname()[1]
        with listen(HOST, port) as second:
            assert port < second.getsockname()[1] < port + PORTS_TRIED


def test_an_address_that_is_not_ours_is_explained() -> None:
    with pytest.raises(EnvironmentProblem, match="--port"):
        listen("192.0.2.1", 7860)


def test_names_become_files(starter: Path, home: Path) -> None:
    folder = with_model(home, starter) / "cache" / "models"
    config = preparation(SetChoice())(lambda _phase, _share: None, threading.Event())
    assert config.target == folder / starter.name
    assert config.drafters == ("ngram", "suffix")
    with pytest.raises(ModelFileError, match="nothing-like-it"):
        preparation(SetChoice("nothing-like-it"))(lambda _phase, _share: None, threading.Event())


def test_layers_are_chosen_unless_they_are_given(starter: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Device("CUDA0", "a GPU", free_bytes=2**20, total_bytes=2**33)
    monkeypatch.setattr(budget, "has_gpu", lambda: True)
    monkeypatch.setattr(budget, "list_devices", lambda: (small,))
    said: list[str] = []
    chosen = SetChoice(str(starter), drafters=(), context_tokens=512)
    placed = preparation(chosen)(lambda phase, _share: said.append(phase), threading.Event())
    assert placed.placement.gpu_layers == 0
    assert said[-1].startswith("The GPU has 1 MB free, too little for a layer")
    with pytest.raises(MemoryShortage, match="does not fit"):
        preparation(replace(chosen, gpu_layers=7))(lambda _phase, _share: None, threading.Event())
    monkeypatch.setattr(budget, "list_devices", lambda: (replace(small, free_bytes=2**33),))
    given = preparation(replace(chosen, gpu_layers=7))(lambda phase, _share: said.append(phase), threading.Event())
    assert given.placement.gpu_layers == 7
    assert len(said) == 1


GIVEN = Speculation(Policy(PolicyKind.FIXED, 5), shape=Shape.CHAIN)


@pytest.fixture
def controls() -> AnswerControls:
    import gradio as gr

    from app.controls import build_answer_controls

    with gr.Blocks():
        return build_answer_controls(GenerationSettings(speculation=GIVEN))


def test_untouched_controls_say_what_they_were_built_with(controls: AnswerControls) -> None:
    values = {component: component.value for component in controls.all()}
    assert controls.settings(values) == GenerationSettings(speculation=GIVEN)


@pytest.mark.parametrize(("choice", "thinking"), [("model", None), ("on", True), ("off", False)])
def test_thinking_is_the_models_own_choice_unless_it_is_made(
    controls: AnswerControls, choice: str, thinking: bool | None
) -> None:
    values = {component: component.value for component in controls.all()}
    assert controls.settings(values | {controls.thinking: choice}).thinking is thinking


def test_controls_refuse_what_makes_no_sense(controls: AnswerControls) -> None:
    values = {component: component.value for component in controls.all()}
    for component, value, says in (
        (controls.temperature, 9, "temperature"),
        (controls.seed, "-4", "seed"),
        (controls.max_tokens, "0", "max tokens"),
        (controls.top_k, "1.5", "Top-k .* whole number"),
    ):
        with pytest.raises(SettingError, match=says):
            controls.settings(values | {component: value})
