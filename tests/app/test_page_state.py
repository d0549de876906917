"""What a page shows at one moment, as the service goes through its states."""

from __future__ import annotations

import threading
from pathlib import Path

from app import views
from app.jobs import JobState, PhaseReport
from app.page_state import page_state
from app.service import Service
from engine.config import SetConfig
from engine.errors import EnvironmentProblem
from tests.app.conftest import PATIENCE_S, finished, loading, settings


def test_before_anything_is_loaded(service: Service) -> None:
    state = page_state(service, service.conversations.create().id)
    assert state.is_quiet
    assert "No model is loaded" in state.status
    assert "No model is loaded" in state.hint
    assert not state.can_load_again


def test_a_first_load_shows_progress_and_when_it_fails_can_be_tried_again(service: Service) -> None:
    conversation_id = service.conversations.create().id
    started, go = threading.Event(), threading.Event()

    def prepare(report: PhaseReport, _cancel: threading.Event) -> SetConfig:
        report("Downloading the starter model", 0.25)
        started.set()
        assert go.wait(PATIENCE_S)
        raise EnvironmentProblem("there is no network")

    load = service.load(prepare)
    assert started.wait(PATIENCE_S)
    state = page_state(service, conversation_id)
    assert state.is_loading
    assert "Downloading the starter model <b>25 %</b>" in state.status
    assert "You can write already" in state.hint
    go.set()
    finished(load)
    state = page_state(service, conversation_id)
    assert state.is_quiet
    assert "there is no network" in state.status
    assert state.can_load_again


def test_an_answer_is_shown_while_it_runs_and_kept_when_it_is_over(loaded: Service) -> None:
    conversation_id = loaded.conversations.create().id
    run = loaded.ask(conversation_id, "Name a colour.", settings(8))
    state = page_state(loaded, conversation_id)
    assert [message["role"] for message in state.messages] == ["user", "assistant"]
    finished(run)
    state = page_state(loaded, conversation_id)
    assert state.is_quiet
    assert state.can_retry
    assert state.hint == views.KEYS_HINT
    assert [message["content"] for message in state.messages[:2]] == ["Name a colour.", run.peek().text]
    assert "ended at the limit" in state.messages[2]["content"]


def test_the_error_of_a_load_goes_once_a_question_is_asked(loaded: Service, tmp_path: Path) -> None:
    conversation_id = loaded.conversations.create().id
    load = finished(loaded.load(loading(SetConfig(tmp_path / "none.gguf"))))
    assert load.peek().state is JobState.FAILED
    assert "none.gguf" in page_state(loaded, conversation_id).status
    finished(loaded.ask(conversation_id, "Name a colour.", settings(4)))
    assert "none.gguf" not in page_state(loaded, conversation_id).status
