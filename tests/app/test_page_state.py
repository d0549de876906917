"""What a page shows at one moment, as the service goes through its states."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from app import views
from app.jobs import JobState, PhaseReport
from app.page_state import TURNS_AT_FIRST, PageWatch
from app.service import Service
from engine.config import SetConfig
from engine.errors import EnvironmentProblem
from engine.types import FinishReason
from tests.app.conftest import PATIENCE_S, finished, loading, settings


def test_before_anything_is_loaded(service: Service) -> None:
    state = PageWatch(service, service.conversations.create().id).look()
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
    state = PageWatch(service, conversation_id).look()
    assert state.is_loading
    assert "Downloading the starter model <b>25 %</b>" in state.status
    assert "You can write already" in state.hint
    go.set()
    finished(load)
    state = PageWatch(service, conversation_id).look()
    assert state.is_quiet
    assert "there is no network" in state.status
    assert state.can_load_again


def test_an_answer_is_shown_while_it_runs_and_kept_when_it_is_over(loaded: Service) -> None:
    conversation_id = loaded.conversations.create().id
    run = loaded.ask(conversation_id, "Name a colour.", settings(8))
    state = PageWatch(loaded, conversation_id).look()
    assert [message["role"] for message in state.messages] == ["user", "assistant"]
    finished(run)
    state = PageWatch(loaded, conversation_id).look()
    assert state.is_quiet
    assert state.can_retry
    assert state.hint == views.KEYS_HINT
    assert [message["content"] for message in state.messages[:2]] == ["Name a colour.", run.peek().text]
    assert "ended at the limit" in state.messages[2]["content"]


def test_the_error_of_a_load_goes_once_a_question_is_asked(loaded: Service, tmp_path: Path) -> None:
    conversation_id = loaded.conversations.create().id
    load = finished(loaded.load(loading(SetConfig(tmp_path / "none.gguf"))))
    assert load.peek().state is JobState.FAILED
    assert "none.gguf" in PageWatch(loaded, conversation_id).look().status
    finished(loaded.ask(conversation_id, "Name a colour.", settings(4)))
    assert "none.gguf" not in PageWatch(loaded, conversation_id).look().status


def test_what_has_not_changed_is_not_made_again(loaded: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is asked of the database, and the figures drawn, only when they may have changed."""
    conversation_id = loaded.conversations.create().id
    finished(loaded.ask(conversation_id, "Name a colour.", settings(8)))
    watch = PageWatch(loaded, conversation_id)
    first = watch.look()
    assert [entry.name for entry in first.listing.entries] == ["Name a colour."]
    assert 'id="cost-card"' in first.inside
    assert "q-step" in first.trace

    def must_rest(*_args: object) -> None:
        raise AssertionError("this was made again")

    with monkeypatch.context() as patch:
        patch.setattr(loaded.conversations, "find", must_rest)
        patch.setattr("app.inside_view.cards", must_rest)
        patch.setattr("app.inside_view.trace", must_rest)
        patch.setattr("app.page_state.list_devices", must_rest)
        assert watch.look() == first
    loaded.conversations.rename(conversation_id, "Colours")
    finished(loaded.ask(conversation_id, "And a river?", settings(8)))
    later = watch.look()
    assert [entry.name for entry in later.listing.entries] == ["Colours"]
    assert later.trace != first.trace
    finished(loaded.unload())
    assert "cost-card" not in watch.look().inside


def test_an_answer_can_be_continued_unless_the_model_ended_it(loaded: Service) -> None:
    conversation_id = loaded.conversations.create().id
    finished(loaded.ask(conversation_id, "Name a colour.", settings(4)))
    assert PageWatch(loaded, conversation_id).look().can_resume
    (turn,) = loaded.conversations.get(conversation_id).turns  # type: ignore[union-attr]
    note = "the 2 oldest messages had no room in the context and were left out"
    loaded.conversations.set_turn(conversation_id, 0, replace(turn, finish_reason=FinishReason.STOP, note=note))
    state = PageWatch(loaded, conversation_id).look()
    assert not state.can_resume
    assert note in state.messages[-1]["content"]


def test_the_meter_names_what_the_next_question_pushes_out(loaded: Service) -> None:
    """The context holds 1024 tokens, of which an eighth is kept for the answer."""
    conversation_id = loaded.conversations.create().id
    finished(loaded.ask(conversation_id, "Name a colour.", settings(4)))
    assert "next to go" not in PageWatch(loaded, conversation_id).look().meter
    finished(loaded.ask(conversation_id, "Repeat: " + "word " * 900, settings(4)))
    meter = PageWatch(loaded, conversation_id).look().meter
    assert 'data-state="full"' in meter
    assert "next to go: “Name a colour.”" in meter
    finished(loaded.ask(conversation_id, "Name a river.", settings(130)))
    meter = PageWatch(loaded, conversation_id).look().meter
    assert 'data-state="roomy"' in meter
    assert "next to go" not in meter


def test_of_many_turns_the_latest_are_shown(service: Service) -> None:
    conversation_id = service.conversations.create().id
    for number in range(30):
        service.conversations.add_turn(conversation_id, f"Question {number}", "")
    state = PageWatch(service, conversation_id).look()
    asked = [message["content"] for message in state.messages if message["role"] == "user"]
    assert asked == [f"Question {number}" for number in range(30 - TURNS_AT_FIRST, 30)]
    assert state.earlier_turns == 30 - TURNS_AT_FIRST
    state = PageWatch(service, conversation_id, most_turns=50).look()
    assert len([message for message in state.messages if message["role"] == "user"]) == 30
    assert state.earlier_turns == 0
