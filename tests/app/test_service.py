"""The service on the real starter: one worker, many readers, and nothing lost when something fails."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from app.bench.prompts import Prompt
from app.comparison import ComparisonRequest
from app.conversations import Conversations, Turn
from app.jobs import JobState, PhaseReport
from app.run import GRACE_S, Run, RunSnapshot
from app.service import Service
from app.sessions import MOST_SESSIONS
from app.worker import NotReady
from engine.config import SetConfig
from engine.errors import PromptError
from engine.runtime.template import Message
from engine.types import FinishReason, Metrics
from tests.app.conftest import PATIENCE_S, FakeClock, finished, loading, settings

LONG = "Write a very long story about a lighthouse keeper and the sea, in many chapters."
SHORT = "Name a colour."
READING_PAUSE_S = 0.005


def ask(service: Service, question: str, max_tokens: int | None = None) -> Run:
    return service.ask(service.conversations.create().id, question, settings(max_tokens))


def test_a_comparison_without_the_targets_file_leaves_the_loaded_set(
    service: Service, set_config: SetConfig, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.gguf"
    mine.hardlink_to(set_config.target)
    finished(service.load(loading(replace(set_config, target=mine))))
    mine.unlink()
    prompt = Prompt("own", "own", (Message("user", SHORT),))
    comparison = service.compare(ComparisonRequest((("ngram",),), ("auto",), (prompt,), rounds=1, max_tokens=4))
    assert finished(comparison).peek().state is JobState.FAILED
    assert "mine.gguf" in comparison.peek().error
    assert finished(ask(service, SHORT, 4)).peek().text


def read_until_text(run: Run, characters: int = 1) -> RunSnapshot:
    """Reads on until so much of the answer is there."""
    snapshot = run.read()
    while len(snapshot.text) < characters:
        assert not snapshot.is_over, f"over with {snapshot.text!r}"
        time.sleep(READING_PAUSE_S)
        snapshot = run.read()
    return snapshot


def turns_of(service: Service, conversation_id: str) -> tuple[Turn, ...]:
    conversation = service.conversations.get(conversation_id)
    assert conversation is not None
    return conversation.turns


def answer_of(service: Service, run: Run) -> str:
    return turns_of(service, run.conversation_id)[run.turn].answer


def metrics_of(run: Run) -> Metrics:
    metrics = run.peek().metrics
    assert metrics is not None
    return metrics


def test_two_readers_see_one_answer_grow(loaded: Service) -> None:
    run = ask(loaded, "Tell me about the sea.", 40)
    seen: list[list[str]] = [[], []]

    def read(texts: list[str]) -> None:
        snapshot = run.read()
        while not snapshot.is_over:
            texts.append(snapshot.text)
            time.sleep(READING_PAUSE_S)
            snapshot = run.read()
        texts.append(snapshot.text)

    readers = [threading.Thread(target=read, args=(texts,)) for texts in seen]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(PATIENCE_S)
    assert seen[0][-1] == seen[1][-1] == answer_of(loaded, run) != ""
    for texts in seen:
        assert len(set(texts)) > 5
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_snapshot_carries_what_the_panel_shows(loaded: Service) -> None:
    run = ask(loaded, "Say the word yes ten times.", 60)
    finished(run)
    snapshot = run.peek()
    assert snapshot.state is JobState.DONE
    assert snapshot.metrics is not None
    assert snapshot.timings is not None
    assert snapshot.speculation is not None
    assert sum(step.sent for step in snapshot.steps) == snapshot.metrics.verified
    assert sum(step.accepted for step in snapshot.steps) == snapshot.metrics.accepted
    assert len(snapshot.steps) == snapshot.metrics.verify_steps + snapshot.metrics.plain_steps
    assert {drafter.name for drafter in snapshot.metrics.drafters} == {"ngram", "suffix"}
    assert snapshot.timings.tokens_per_second > 0


def test_a_reader_that_comes_back_goes_on_where_the_answer_is(loaded: Service, clock: FakeClock) -> None:
    run = ask(loaded, LONG, 120)
    left_at = read_until_text(run, 20)
    clock.advance(GRACE_S - 1)
    back = loaded.run_of(run.conversation_id)
    assert back is run
    assert back.read().text.startswith(left_at.text)
    clock.advance(GRACE_S - 1)
    finished(run)
    assert run.peek().finish_reason is FinishReason.LENGTH


def test_an_unread_answer_ends_after_the_grace_and_is_kept(loaded: Service, clock: FakeClock) -> None:
    run = ask(loaded, LONG)
    read_until_text(run)
    clock.advance(GRACE_S + 1)
    finished(run)
    snapshot = run.peek()
    assert snapshot.state is JobState.CANCELLED
    assert snapshot.is_abandoned
    assert answer_of(loaded, run) == snapshot.text != ""
    assert finished(ask(loaded, SHORT, 5)).peek().finish_reason is FinishReason.LENGTH


def test_a_question_that_nobody_waits_for_is_not_answered(loaded: Service, clock: FakeClock) -> None:
    first = ask(loaded, LONG)
    second = ask(loaded, LONG)
    read_until_text(first)
    clock.advance(GRACE_S + 1)
    first.cancel()
    finished(second)
    assert second.peek().state is JobState.CANCELLED
    assert second.peek().steps == ()


def test_questions_wait_in_line(loaded: Service) -> None:
    first, second, third = (ask(loaded, LONG), ask(loaded, LONG), ask(loaded, SHORT, 4))
    read_until_text(first)
    assert loaded.jobs_ahead(first) == ()
    assert loaded.jobs_ahead(second) == (first,)
    assert loaded.jobs_ahead(third) == (first, second)
    loaded.stop(second.conversation_id)
    assert second.peek().state is JobState.CANCELLED
    assert loaded.jobs_ahead(third) == (first,)
    assert third.peek().state is JobState.WAITING
    loaded.stop(first.conversation_id)
    finished(third)
    assert third.peek().state is JobState.DONE
    assert answer_of(loaded, second) == ""


def test_stop_keeps_the_part_and_the_next_question_finds_the_cache_warm(loaded: Service) -> None:
    run = ask(loaded, LONG)
    read_until_text(run, 30)
    loaded.stop(run.conversation_id)
    finished(run)
    stopped = run.peek()
    assert stopped.finish_reason is FinishReason.CANCELLED
    assert not stopped.is_abandoned
    assert answer_of(loaded, run) == stopped.text
    following = loaded.ask(run.conversation_id, "Thank you.", settings(8))
    finished(following)
    assert metrics_of(following).reused_tokens >= metrics_of(run).prompt_tokens


def test_retry_answers_the_last_question_again(loaded: Service) -> None:
    run = ask(loaded, SHORT, 6)
    finished(run)
    again = loaded.retry(run.conversation_id, settings(3))
    finished(again)
    assert [turn.question for turn in turns_of(loaded, run.conversation_id)] == [SHORT]
    assert run.peek().text.startswith(answer_of(loaded, again))
    assert metrics_of(again).emitted == 3


def test_what_cannot_be_asked_is_refused_at_once(loaded: Service) -> None:
    conversation_id = loaded.conversations.create().id
    with pytest.raises(PromptError, match="empty"):
        loaded.ask(conversation_id, "  \n", settings())
    with pytest.raises(NotReady, match="no question"):
        loaded.retry(conversation_id, settings())
    with pytest.raises(NotReady, match="new chat"):
        loaded.ask("unknown", SHORT, settings())
    run = loaded.ask(conversation_id, LONG, settings())
    with pytest.raises(NotReady, match="still being answered"):
        loaded.ask(conversation_id, SHORT, settings())
    loaded.stop(conversation_id)
    finished(run)


def test_without_a_model_nothing_is_asked(service: Service) -> None:
    conversation_id = service.conversations.create().id
    with pytest.raises(NotReady, match="no model is loaded"):
        service.ask(conversation_id, SHORT, settings())
    assert turns_of(service, conversation_id) == ()


def test_a_question_can_be_asked_while_the_model_loads(service: Service, set_config: SetConfig) -> None:
    go = threading.Event()

    def prepare(_report: PhaseReport, _cancel: threading.Event) -> SetConfig:
        assert go.wait(PATIENCE_S)
        return set_config

    load = service.load(prepare)
    run = ask(service, SHORT, 4)
    assert service.jobs_ahead(run) == (load,)
    go.set()
    finished(run)
    assert run.peek().state is JobState.DONE


def test_a_question_too_long_fails_with_both_numbers_and_is_left_out_afterwards(loaded: Service) -> None:
    run = ask(loaded, "word " * 3000)
    finished(run)
    snapshot = run.peek()
    assert snapshot.state is JobState.FAILED
    assert "1024" in snapshot.error
    following = loaded.ask(run.conversation_id, SHORT, settings(4))
    finished(following)
    assert following.peek().state is JobState.DONE


def test_a_full_context_ends_the_answer_with_its_reason(service: Service, set_config: SetConfig) -> None:
    finished(service.load(loading(replace(set_config, context_tokens=256))))
    run = ask(service, LONG)
    finished(run)
    assert run.peek().finish_reason is FinishReason.CONTEXT
    assert "256 tokens is full" in turns_of(service, run.conversation_id)[0].note


def test_a_file_that_cannot_be_used_leaves_the_loaded_set_untouched(
    loaded: Service, starter: Path, tmp_path: Path
) -> None:
    before = loaded.loaded
    truncated = tmp_path / "cut.gguf"
    with open(starter, "rb") as whole:
        truncated.write_bytes(whole.read(20_000_000))
    for target, says in ((truncated, "cut.gguf"), (tmp_path / "none.gguf", "none.gguf"), (tmp_path, "folder")):
        load = loaded.load(loading(SetConfig(target)))
        finished(load)
        assert load.peek().state is JobState.FAILED
        assert says in load.peek().error
        assert loaded.loaded is before
    assert finished(ask(loaded, SHORT, 4)).peek().state is JobState.DONE


def test_a_load_that_fails_half_way_brings_the_old_set_back(loaded: Service, set_config: SetConfig) -> None:
    run = ask(loaded, SHORT, 8)
    finished(run)
    before = loaded.loaded
    load = loaded.load(loading(replace(set_config, context_tokens=2_000_000_000)))
    finished(load)
    assert load.peek().state is JobState.FAILED
    assert "GB" in load.peek().error
    assert loaded.loaded == before
    assert loaded.loaded is not before
    following = loaded.ask(run.conversation_id, "Another one?", settings(4))
    finished(following)
    assert following.peek().state is JobState.DONE


def test_loading_again_keeps_conversations(loaded: Service, set_config: SetConfig) -> None:
    run = ask(loaded, SHORT, 8)
    finished(run)
    finished(loaded.load(loading(replace(set_config, drafters=("ngram",)))))
    assert loaded.loaded is not None
    assert loaded.loaded.drafters == ("ngram",)
    following = loaded.ask(run.conversation_id, "Another one?", settings(4))
    finished(following)
    assert len(turns_of(loaded, run.conversation_id)) == 2


def test_a_newer_load_replaces_one_under_way(service: Service, set_config: SetConfig) -> None:
    started = threading.Event()

    def prepare(_report: PhaseReport, cancel: threading.Event) -> SetConfig:
        started.set()
        assert cancel.wait(PATIENCE_S)
        return set_config

    first = service.load(prepare)
    assert started.wait(PATIENCE_S)
    second = service.load(loading(set_config))
    finished(second)
    assert first.peek().state is JobState.CANCELLED
    assert second.peek().state is JobState.DONE


def test_a_mistake_of_ours_fails_one_job_and_no_more(service: Service, set_config: SetConfig) -> None:
    def prepare(_report: PhaseReport, _cancel: threading.Event) -> SetConfig:
        raise RuntimeError("wires crossed")

    load = service.load(prepare)
    finished(load)
    assert "wires crossed" in load.peek().error
    finished(service.load(loading(set_config)))
    assert service.loaded is not None


def test_more_conversations_than_sessions_share_one_small_cache(service: Service, set_config: SetConfig) -> None:
    finished(service.load(loading(replace(set_config, context_tokens=320))))
    runs = [ask(service, f"Tell me about the number {number}.", 60) for number in range(MOST_SESSIONS + 2)]
    for run in runs:
        finished(run)
        assert run.peek().state is JobState.DONE
    again = service.ask(runs[0].conversation_id, "And the next?", settings(60))
    finished(again)
    assert again.peek().state is JobState.DONE


def test_forgetting_a_conversation_ends_its_answer(loaded: Service) -> None:
    run = ask(loaded, LONG)
    read_until_text(run)
    loaded.forget(run.conversation_id)
    finished(run)
    assert loaded.conversations.get(run.conversation_id) is None
    assert loaded.run_of(run.conversation_id) is None


def test_an_answer_is_continued_as_if_it_had_never_stopped(loaded: Service) -> None:
    whole = finished(ask(loaded, LONG, 24))
    half = finished(ask(loaded, LONG, 10))
    rest = finished(loaded.resume(half.conversation_id, settings(14)))
    (turn,) = turns_of(loaded, half.conversation_id)
    assert turn.answer == whole.peek().text == rest.peek().text
    assert [token.id for token in turn.tokens] == [token.id for token in whole.peek().tokens]
    assert "".join(token.text for token in turn.tokens) == turn.answer
    assert metrics_of(rest).reused_tokens >= metrics_of(rest).prompt_tokens - 1


def test_an_edited_question_takes_the_place_of_what_came_after(loaded: Service) -> None:
    run = finished(ask(loaded, SHORT, 4))
    finished(loaded.ask(run.conversation_id, "Another?", settings(4)))
    finished(loaded.edit(run.conversation_id, 0, "Name a river.", settings(4)))
    assert [turn.question for turn in turns_of(loaded, run.conversation_id)] == ["Name a river."]
    with pytest.raises(PromptError, match="empty"):
        loaded.edit(run.conversation_id, 0, " ", settings(4))


def test_after_a_restart_a_conversation_goes_on_with_the_tokens_it_had(set_config: SetConfig, tmp_path: Path) -> None:
    path = tmp_path / "conversations.sqlite3"
    answers: list[list[int]] = []
    conversation_id = ""
    for _ in range(2):
        store = Conversations(path)
        service = Service(store)
        finished(service.load(loading(set_config)))
        conversation_id = conversation_id or store.create().id
        run = finished(service.ask(conversation_id, SHORT, settings(12)))
        answers.append([token.id for token in run.peek().tokens])
        pieces = store.pieces(conversation_id, str(set_config.target))
        service.close()
        store.close()
    assert [list(piece.tokens) for piece in pieces if piece.is_answer] == answers


def test_the_set_can_be_looked_into_and_checked(loaded: Service) -> None:
    assert loaded.insight is not None
    assert loaded.insight.context_tokens == 1024
    finished(ask(loaded, SHORT, 6))
    assert loaded.insight.used_tokens > 6
    assert sum(len(step.emitted) for step in loaded.trace) == 6
    assert loaded.exactness is None
    check = finished(loaded.check())
    assert check.peek().state is JobState.DONE
    report = loaded.exactness
    assert report is not None
    assert report.is_exact


def test_answers_are_verified_as_a_job_that_can_be_stopped(loaded: Service) -> None:
    assert loaded.last_verification is None
    stopped = loaded.verify()
    assert loaded.verify() is stopped, "one at a time"
    while stopped.peek().state in (JobState.WAITING, JobState.RUNNING) and stopped.peek().share < 0.1:
        time.sleep(0.01)
    stopped.cancel()
    finished(stopped)
    assert stopped.peek().state is JobState.CANCELLED
    assert stopped.is_identical is True, "what was compared until then was"
    phases = set()
    job = loaded.verify()
    while not job.is_over:
        phases.add(job.peek().phase)
        time.sleep(0.01)
    assert (job.peek().state, job.is_identical) == (JobState.DONE, True)
    assert job.outcome[0] == "Identical: 24 drafted answers are the plain ones, token for token."
    assert {phase.rpartition(" ")[2] for phase in phases} >= {"plainly", "fixed:3"}
    assert finished(ask(loaded, SHORT, 6)).peek().state is JobState.DONE


def test_nothing_outlives_close(set_config: SetConfig) -> None:
    threads = set(threading.enumerate())
    service = Service(Conversations())
    finished(service.load(loading(set_config)))
    running, waiting = ask(service, LONG), ask(service, LONG)
    read_until_text(running)
    service.close()
    assert running.is_over
    assert waiting.is_over
    assert service.loaded is None
    assert set(threading.enumerate()) <= threads
    with pytest.raises(NotReady, match="shutting down"):
        service.load(loading(set_config))


def test_old_turns_that_had_no_room_are_told(loaded: Service) -> None:
    conversation_id = loaded.conversations.create().id
    loaded.conversations.add_turn(conversation_id, "word " * 600, "")
    loaded.conversations.set_turn(conversation_id, 0, Turn("word " * 600, "Indeed.", FinishReason.STOP))
    finished(loaded.ask(conversation_id, "word " * 400, settings(4)))
    _, second = turns_of(loaded, conversation_id)
    assert second.note.endswith("the 2 oldest messages had no room in the context and were left out")


def test_thinking_that_was_set_for_another_model_is_left_to_this_one(loaded: Service) -> None:
    assert loaded.loaded is not None
    assert not loaded.loaded.has_thinking_switch
    conversation_id = loaded.conversations.create().id
    run = finished(loaded.ask(conversation_id, SHORT, replace(settings(4), thinking=True)))
    assert run.peek().error == ""
    assert run.peek().text
