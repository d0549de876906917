"""Answers of the real starter: their events, their limits, and what a stop or a failure leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from engine.config import LookAhead, Policy, Sampling, Speculation, VoteMode
from engine.errors import DecodeError, PromptError, SettingError
from engine.loader import LoadedSet
from engine.runtime.context import Run
from engine.runtime.template import Message
from engine.session import Session
from engine.types import Finished, FinishReason, GenerationEvent, PrefillProgress, Provenance, StepDone
from tests.engine.conftest import GREEDY, PLAIN, SMALL_CONTEXT_TOKENS, answer, never, settings, tokens_of
from tests.engine.scripted import check_sums
from tests.engine.test_context import TripWire

DRAFTED = Speculation(Policy.parse("fixed:3"), look_ahead=LookAhead.ON)
TEXT = "The harbour was quiet when the first boats came in, and nobody counted the crates. "


@pytest.fixture
def session(small: LoadedSet) -> Iterator[Session]:
    session = Session(small)
    yield session
    session.close()


@pytest.fixture(scope="module")
def prompt(small: LoadedSet) -> list[int]:
    return tokens_of(small, TEXT)


@pytest.fixture(scope="module")
def long_prompt(small: LoadedSet) -> list[int]:
    """Four batches of prefill."""
    return tokens_of(small, TEXT * 30)[:400]


class Reference:
    """What the target alone says after some tokens, in a context of its own."""

    def __init__(self, loaded: LoadedSet) -> None:
        self._loaded = loaded

    def __call__(self, prompt: Sequence[int], max_tokens: int = 24) -> tuple[int, ...]:
        session = Session(self._loaded)
        try:
            return answer(session.generate(prompt, settings(PLAIN, GREEDY, max_tokens), never())).token_ids
        finally:
            session.close()


@pytest.fixture(scope="module")
def fresh(small: LoadedSet) -> Iterator[Reference]:
    loaded = LoadedSet.load(replace(small.config, drafters=()))
    yield Reference(loaded)
    loaded.close()


def check_usable(small: LoadedSet, session: Session, prompt: Sequence[int], fresh: Reference) -> None:
    """The session's cache and tokens agree, and its next answer is what a new one would say."""
    cached = small.context.length(session._sequence)
    assert cached <= len(session.tokens)
    finished = answer(session.generate(prompt, settings(DRAFTED), never()))
    assert finished.token_ids == fresh(prompt)
    assert finished.metrics.reused_tokens <= cached


# Events


def test_the_events_of_an_answer_tell_one_story(small: LoadedSet, session: Session, long_prompt: list[int]) -> None:
    events = list(session.generate(long_prompt, settings(DRAFTED), never()))
    reading = [event for event in events if isinstance(event, PrefillProgress)]
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [*reading, *steps, events[-1]] == events
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert [event.done_tokens for event in reading] == [128, 256, 384, 399]
    assert {event.total_tokens for event in reading} == {400}
    emitted = [token for step in steps for token in step.tokens]
    assert tuple(token.id for token in emitted) == finished.token_ids
    assert finished.text == small.model.vocabulary.text(finished.token_ids)
    assert finished.text.startswith("".join(step.text for step in steps))
    assert finished.reason is FinishReason.LENGTH
    metrics = finished.metrics
    check_sums(metrics)
    assert metrics == steps[-1].metrics
    assert sum(token.provenance is Provenance.ACCEPTED for token in emitted) == metrics.accepted > 0
    assert sum(step.step.proposed for step in steps) == metrics.proposed
    assert [step.step.context_tokens for step in steps][-1] == 400 + len(emitted)
    assert (metrics.prompt_tokens, metrics.reused_tokens) == (400, 0)
    assert {report.name for report in metrics.drafters} == {"ngram", "suffix", "few-bits"}
    for token in emitted:
        assert bool(token.proposers) == (token.provenance is Provenance.ACCEPTED)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_the_limit_of_tokens_is_exact(
    small: LoadedSet, session: Session, prompt: list[int], max_tokens: int, fresh: Reference
) -> None:
    for speculation in (PLAIN, DRAFTED, Speculation(Policy.parse("fixed:7"), vote=VoteMode.COLLECTIVE)):
        finished = answer(session.generate(prompt, settings(speculation, GREEDY, max_tokens), never()))
        assert finished.token_ids == fresh(prompt, max_tokens)
        assert len(finished.token_ids) == max_tokens
        assert finished.reason is FinishReason.LENGTH


def test_a_seed_is_drawn_and_reported_and_gives_the_same_answer_again(session: Session, prompt: list[int]) -> None:
    first = answer(session.generate(prompt, settings(DRAFTED, Sampling(temperature=1.5)), never()))
    again = answer(session.generate(prompt, settings(PLAIN, Sampling(temperature=1.5, seed=first.seed)), never()))
    assert again.token_ids == first.token_ids
    other = answer(session.generate(prompt, settings(DRAFTED, Sampling(temperature=1.5)), never()))
    assert other.seed != first.seed


def test_plain_decoding_asks_no_drafter(session: Session, prompt: list[int]) -> None:
    finished = answer(session.generate(prompt, settings(PLAIN), never()))
    metrics = finished.metrics
    assert (metrics.proposed, metrics.verify_steps, metrics.plain, metrics.drafters) == (0, 0, 24, ())
    assert (finished.state.is_on, finished.state.reason) == (False, "off: the policy is plain decoding")


def test_without_drafters_the_reason_says_so(small: LoadedSet, prompt: list[int]) -> None:
    session = Session(small.with_drafters(()))
    state = answer(session.generate(prompt, settings(Speculation()), never())).state
    session.close()
    assert (state.is_on, state.reason) == (False, "off: no drafter is loaded")


def test_an_answer_stopped_before_it_began_does_not_lack_drafters(session: Session, prompt: list[int]) -> None:
    stopped = threading.Event()
    stopped.set()
    state = answer(session.generate(prompt, settings(DRAFTED), stopped)).state
    assert (state.is_on, state.reason) == (True, "on: measuring")


@pytest.mark.parametrize("length", [16, 31])
def test_the_longest_drafts_that_can_be_asked_for_are_verified(
    small: LoadedSet, session: Session, length: int, fresh: Reference
) -> None:
    repeated = tokens_of(small, "one two three four five six seven eight nine ten, " * 8)
    given = settings(Speculation(Policy.parse(f"fixed:{length}")), GREEDY, 60)
    finished = answer(session.generate(repeated, given, never()))
    assert max(finished.metrics.lengths) == length
    assert finished.token_ids == fresh(repeated, 60)
    with pytest.raises(SettingError, match="from 1 to 31"):
        Policy.parse("fixed:32")


# The context's end


@pytest.mark.parametrize("left", [1, 2, 9])
def test_a_full_context_ends_the_answer_after_the_same_token_with_drafts_as_without(
    small: LoadedSet, session: Session, left: int
) -> None:
    # Text that goes on and on, so that nothing ends the answer earlier and drafts are accepted to the last token.
    endless = tokens_of(small, "one two three four five six seven eight nine ten, " * 60)[: SMALL_CONTEXT_TOKENS - left]
    ids = set()
    for speculation in (
        PLAIN,
        Speculation(),
        DRAFTED,
        Speculation(Policy.parse("fixed:15"), look_ahead=LookAhead.ON),
        Speculation(Policy.parse("fixed:7"), vote=VoteMode.COLLECTIVE, look_ahead=LookAhead.ON),
    ):
        finished = answer(session.generate(endless, settings(speculation, GREEDY, None), never()))
        assert finished.reason is FinishReason.CONTEXT
        assert [report.note for report in finished.metrics.drafters if report.note] == []
        ids.add(finished.token_ids)
        small.panel.forget()
    assert len(ids) == 1
    assert len(ids.pop()) == left


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(small: LoadedSet, session: Session) -> None:
    for length in (SMALL_CONTEXT_TOKENS, 3 * SMALL_CONTEXT_TOKENS):
        with pytest.raises(PromptError, match=rf"has {length} tokens and the context holds {SMALL_CONTEXT_TOKENS}"):
            answer(session.generate([5] * length, settings(), never()))
    with pytest.raises(PromptError, match=rf"has \d+ tokens and the context holds {SMALL_CONTEXT_TOKENS}"):
        answer(session.chat([Message("user", TEXT * 100)], settings(), never()))
    assert session.tokens == ()
    assert answer(session.chat([Message("user", "Hi")], settings(), never())).token_ids


def test_an_empty_prompt_is_refused(session: Session) -> None:
    for messages in ([], [Message("user", "")], [Message("user", " \n")]):
        with pytest.raises(PromptError, match="empty"):
            answer(session.chat(messages, settings(), never()))
    with pytest.raises(PromptError, match="empty"):
        answer(session.generate([], settings(), never()))


# Stopping


def test_a_stop_during_prefill_keeps_what_was_read(
    small: LoadedSet, session: Session, long_prompt: list[int], fresh: Reference
) -> None:
    cancel = threading.Event()
    events: list[GenerationEvent] = []
    for event in session.generate(long_prompt, settings(DRAFTED), cancel):
        events.append(event)
        cancel.set()
    assert [type(event) for event in events] == [PrefillProgress, Finished]
    finished = answer(iter(events))
    assert (finished.reason, finished.token_ids, finished.text) == (FinishReason.CANCELLED, (), "")
    assert session.tokens == tuple(long_prompt[:128])
    again = answer(session.generate(long_prompt, settings(DRAFTED), never()))
    assert again.metrics.reused_tokens == 128
    assert again.token_ids == fresh(long_prompt)


@pytest.mark.parametrize("calls", [0, 3, 600])
def test_a_stop_in_the_middle_of_a_pass_leaves_the_caches_true(
    small: LoadedSet, session: Session, long_prompt: list[int], calls: int, fresh: Reference
) -> None:
    finished = answer(session.generate(long_prompt, settings(DRAFTED), TripWire(calls)))
    assert finished.reason is FinishReason.CANCELLED
    assert small.context.length(session._sequence) == len(session.tokens) < len(long_prompt)
    check_usable(small, session, long_prompt, fresh)


def count_passes(small: LoadedSet, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the size of every pass of the target."""
    passes: list[int] = []
    decode = small.context.decode

    def counted(runs: Sequence[Run], cancel: threading.Event | None = None) -> None:
        passes.append(sum(len(run.tokens) for run in runs))
        decode(runs, cancel)

    monkeypatch.setattr(small.context, "decode", counted)
    return passes


def test_a_stop_takes_effect_before_the_next_pass(
    small: LoadedSet, session: Session, prompt: list[int], monkeypatch: pytest.MonkeyPatch, fresh: Reference
) -> None:
    passes = count_passes(small, monkeypatch)
    for speculation in (PLAIN, DRAFTED):
        cancel = threading.Event()
        partial: list[int] = []
        for event in session.generate(prompt, settings(speculation), cancel):
            if isinstance(event, StepDone):
                partial += [token.id for token in event.tokens]
                if len(partial) >= 5:
                    cancel.set()
                    done = len(passes)
        assert isinstance(event, Finished)
        assert (event.reason, list(event.token_ids)) == (FinishReason.CANCELLED, partial)
        assert len(passes) == done
        check_usable(small, session, prompt, fresh)


def test_a_stop_before_the_start_reads_nothing(
    small: LoadedSet, session: Session, prompt: list[int], monkeypatch: pytest.MonkeyPatch, fresh: Reference
) -> None:
    cancel = threading.Event()
    cancel.set()
    passes = count_passes(small, monkeypatch)
    finished = answer(session.generate(prompt, settings(DRAFTED), cancel))
    assert (finished.reason, finished.token_ids) == (FinishReason.CANCELLED, ())
    assert len(passes) <= 1
    monkeypatch.undo()
    check_usable(small, session, prompt, fresh)


def test_an_answer_nobody_listens_to_any_more_can_be_dropped_anywhere(
    small: LoadedSet, session: Session, long_prompt: list[int], fresh: Reference
) -> None:
    for events_heard in (2, 6):
        events = session.generate(long_prompt, settings(DRAFTED), never())
        for _ in range(events_heard):
            next(events)
        del events
        check_usable(small, session, long_prompt, fresh)
        answer(session.generate(long_prompt[:50], settings(PLAIN, GREEDY, 1), never()))


def test_a_prompt_that_fails_to_be_read_leaves_the_session_usable(
    small: LoadedSet, session: Session, long_prompt: list[int], monkeypatch: pytest.MonkeyPatch, fresh: Reference
) -> None:
    fail_in_pass(small, monkeypatch, 3)
    with pytest.raises(DecodeError, match="as told"):
        answer(session.generate(long_prompt, settings(DRAFTED), never()))
    assert session.tokens == tuple(long_prompt[:256])
    check_usable(small, session, long_prompt, fresh)


def test_a_step_that_fails_leaves_the_session_usable(
    small: LoadedSet, session: Session, prompt: list[int], monkeypatch: pytest.MonkeyPatch, fresh: Reference
) -> None:
    answer(session.generate(prompt, settings(DRAFTED), never()))
    fail_in_pass(small, monkeypatch, 4)
    heard: list[int] = []
    with pytest.raises(DecodeError, match="as told"):
        heard.extend(
            token.id
            for event in session.generate(prompt, settings(DRAFTED), never())
            if isinstance(event, StepDone)
            for token in event.tokens
        )
    assert session.tokens == (*prompt, *heard)
    check_usable(small, session, prompt, fresh)


def fail_in_pass(small: LoadedSet, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the target's n-th pass from now fail, and no other."""
    decode: Callable[..., None] = small.context.decode
    left = iter(range(number))

    def failing(runs: Sequence[Run], cancel: threading.Event | None = None) -> None:
        if next(left, None) == number - 1:
            raise DecodeError("as told")
        decode(runs, cancel)

    monkeypatch.setattr(small.context, "decode", failing)


# Text


def test_a_stop_string_is_never_shown_not_even_half(session: Session, prompt: list[int]) -> None:
    whole = answer(session.generate(prompt, settings(), never())).text
    stop = whole[15:22]
    for speculation in (PLAIN, DRAFTED):
        given = settings(speculation, stop_strings=[stop])
        *steps, finished = session.generate(prompt, given, never())
        shown = "".join(step.text for step in steps if isinstance(step, StepDone))
        assert isinstance(finished, Finished)
        assert finished.reason is FinishReason.STOP
        assert shown == finished.text == whole[: whole.index(stop)]


def test_what_a_broken_prompt_says_is_replaced_not_a_crash(session: Session) -> None:
    finished = answer(session.chat([Message("user", "half a character: \udcff")], settings(max_tokens=2), never()))
    assert len(finished.token_ids) == 2
