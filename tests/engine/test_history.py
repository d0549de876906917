"""What becomes of a conversation's history: turns that no longer fit, and thoughts that a template takes out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGUFReader

from engine.config import GenerationSettings, ModelPlacement, Policy, Sampling, SetConfig, Speculation
from engine.drafters.base import DraftRequest, always
from engine.drafters.model import ModelDrafter
from engine.drafting import Panel
from engine.errors import PromptError, SettingError
from engine.loader import LoadedSet
from engine.runtime.template import Message
from engine.session import ANSWER_SHARE, KEPT_SHARE, Session
from engine.types import Finished, FinishReason, StepDone
from tests.engine.conftest import GREEDY, PLAIN, SMALL_CONTEXT_TOKENS, answer, never, settings, tokens_of
from tests.engine.making import TEMPLATE, patched_copy, value_of

DRAFTED = Speculation(Policy.parse("fixed:3"))
SYSTEM = Message("system", "Answer in few words.")
LIMIT = SMALL_CONTEXT_TOKENS


@pytest.fixture
def session(small: LoadedSet) -> Iterator[Session]:
    session = Session(small)
    yield session
    session.close()


def question(number: int) -> Message:
    """About 50 tokens."""
    return Message("user", f"Question {number}: " + "what is the harbour like when the boats come in, and why? " * 3)


def converse(
    session: Session, turns: int, speculation: Speculation, max_tokens: int | None = 16
) -> tuple[list[Message], list[Finished]]:
    messages = [SYSTEM]
    answers = []
    for number in range(turns):
        messages.append(question(number))
        answers.append(answer(session.chat(messages, settings(speculation, GREEDY, max_tokens), never())))
        messages.append(Message("assistant", answers[-1].text))
    return messages, answers


def shown(loaded: LoadedSet, tokens: tuple[int, ...]) -> str:
    return loaded.model.vocabulary.text(tokens)


def test_the_oldest_turns_make_room_and_the_system_prompt_stays(small: LoadedSet, session: Session) -> None:
    messages, answers = converse(session, 14, DRAFTED)
    dropped = [finished.dropped_messages for finished in answers]
    assert dropped[0] == 0
    assert len(set(dropped)) >= 3, "turns were dropped more than once"
    assert dropped == sorted(dropped)
    assert all(count % 2 == 0 for count in dropped), "whole turns"
    for place, finished in enumerate(answers):
        size = finished.metrics.prompt_tokens
        assert size <= LIMIT - 16
        if place and dropped[place] > dropped[place - 1]:
            assert size <= LIMIT // KEPT_SHARE
        elif place:
            assert finished.metrics.reused_tokens > size // 2, "the cache is used again while nothing is dropped"
        assert finished.reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert finished.rewritten_tokens == 0
    read = shown(small, session.tokens)
    assert SYSTEM.content in read
    assert messages[1].content not in read
    assert messages[1 + dropped[-1]].content in read


def test_after_turns_were_dropped_drafts_change_nothing_and_drafters_know_where_they_are(
    small: LoadedSet, session: Session
) -> None:
    _, drafted = converse(session, 9, DRAFTED)
    small.panel.forget()
    plain_session = Session(small)
    _, plain = converse(plain_session, 9, PLAIN)
    plain_session.close()
    assert [finished.token_ids for finished in drafted] == [finished.token_ids for finished in plain]
    assert drafted[-1].dropped_messages == plain[-1].dropped_messages > 0
    assert all(finished.metrics.verified > 0 for finished in drafted)
    assert not any(report.note for finished in drafted for report in finished.metrics.drafters)


def test_a_full_context_ends_an_answer_and_the_next_question_finds_room(small: LoadedSet, session: Session) -> None:
    sampling = replace(GREEDY, grammar="root ::= [a-z ]*")  # never ends by itself
    first = Message("user", "one two three four five six seven eight nine ten " * 42)
    given = GenerationSettings(sampling, DRAFTED)
    finished = answer(session.chat([SYSTEM, first], given, never()))
    assert finished.reason is FinishReason.CONTEXT
    assert finished.dropped_messages == 0, "a question that stands alone is never dropped"
    messages = [SYSTEM, first, Message("assistant", finished.text), Message("user", "Go on.")]
    second = answer(session.chat(messages, settings(DRAFTED, GREEDY, 8), never()))
    assert second.dropped_messages == 2
    assert len(second.token_ids) == 8
    read = shown(small, session.tokens)
    assert SYSTEM.content in read
    assert "ten one" not in read


def test_a_conversation_that_was_edited_begins_with_all_its_turns_again(session: Session) -> None:
    messages, answers = converse(session, 10, PLAIN, 4)
    assert answers[-1].dropped_messages > 0
    short = [SYSTEM, question(99), Message("assistant", "Quiet."), question(100)]
    assert answer(session.chat(short, settings(max_tokens=4), never())).dropped_messages == 0
    cut = messages[:4]
    assert answer(session.chat(cut, settings(max_tokens=4), never())).dropped_messages == 0


def test_a_question_that_does_not_fit_alone_is_refused(session: Session) -> None:
    messages = [SYSTEM, question(1), Message("assistant", "Quiet."), Message("user", "long " * LIMIT)]
    with pytest.raises(PromptError, match=f"the context holds {LIMIT}"):
        answer(session.chat(messages, settings(), never()))
    assert answer(session.chat([question(1)], settings(max_tokens=4), never())).dropped_messages == 0


def test_without_a_limit_an_answer_has_its_share_of_the_context(session: Session) -> None:
    _, answers = converse(session, 6, PLAIN, None)
    assert all(finished.metrics.prompt_tokens <= LIMIT - LIMIT // ANSWER_SHARE for finished in answers)


# A drafter with less room than the target


def test_a_drafter_with_a_smaller_context_abstains_beyond_its_end_and_comes_back(
    small: LoadedSet, draft_models: dict[str, Path]
) -> None:
    own_tokens = 128
    drafter = ModelDrafter.load(
        draft_models["few-bits"],
        "few-bits",
        small.model.vocabulary,
        placement=ModelPlacement(threads=1),
        context_tokens=own_tokens,
    )
    own_limit = drafter._context.context_tokens
    assert own_limit < LIMIT
    loaded = small.with_drafters(("few-bits",))
    loaded.panel = Panel([drafter])
    session = Session(loaded)
    try:
        text = "one two three four five six seven eight nine ten, "
        short, long = tokens_of(small, text * 2), tokens_of(small, text * 40)[: own_limit - 10]
        for prompt, drafts_all in ((short, True), (long, False), (short, True)):
            given = settings(DRAFTED, GREEDY, 40)
            finished = answer(session.generate(prompt, given, never()))
            plain = answer(session.generate(prompt, replace(given, speculation=PLAIN), never()))
            assert finished.token_ids == plain.token_ids
            assert finished.metrics.verified > 0
            assert [report.note for report in finished.metrics.drafters] == [""]
            assert (finished.metrics.plain_steps <= 1) == drafts_all
        drafter.begin(tokens_of(small, text * 40))
        request = DraftRequest((), 3, always, never())
        assert len(drafter.start(request).result()) == 0
    finally:
        session.close()
        drafter.close()


# Thoughts

SWITCHED = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content.split('</think>')[-1].lstrip()}}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
OPENING = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content.split('</think>')[-1]}}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)
THOUGHT = 'root ::= "<think>\\n" [a-z]{12} "\\n" [a-z ]{6} "</think>\\n\\n" [a-z]{10} "\\n" [a-z ]{10}'


def thinking_set(starter: Path, folder: Path, template: str, cost_file: Path) -> LoadedSet:
    # The room of the old template is filled with a comment: white space would be part of the prompt.
    room = len(value_of(GGUFReader(starter).fields[TEMPLATE])) - len(template)
    path = patched_copy(starter, folder / "thinking.gguf", TEMPLATE, template + "{#".ljust(room - 2) + "#}")
    return LoadedSet.load(
        SetConfig(path, ("ngram", "suffix"), SMALL_CONTEXT_TOKENS, ModelPlacement(threads=1), cost_file=cost_file)
    )


@pytest.fixture(scope="module")
def thinker(starter: Path, tmp_path_factory: pytest.TempPathFactory, cost_file: Path) -> Iterator[LoadedSet]:
    """The starter with a template that takes thoughts out of the history and has a switch."""
    loaded = thinking_set(starter, tmp_path_factory.mktemp("thinker"), SWITCHED, cost_file)
    yield loaded
    loaded.close()


FIRST = Message("user", "Where are the boats?")
SECOND = Message("user", "And where is the harbour?")


def test_a_thought_is_reported_apart_and_the_lost_cache_is_told(thinker: LoadedSet) -> None:
    session = Session(thinker)
    given = GenerationSettings(Sampling(temperature=0, grammar=THOUGHT), DRAFTED)
    *steps, last = session.chat([FIRST], given, never())
    assert isinstance(last, Finished)
    assert len(last.thinking) == 12 + 1 + 6
    assert len(last.text) == 10 + 1 + 10
    assert "think" not in last.text + last.thinking
    heard = [step for step in steps if isinstance(step, StepDone)]
    assert "".join(step.thinking for step in heard) == last.thinking
    assert last.text.startswith("".join(step.text for step in heard))
    assert last.rewritten_tokens == 0
    follow_up = [FIRST, Message("assistant", last.text), SECOND]
    second = answer(session.chat(follow_up, settings(DRAFTED, GREEDY, 8), never()))
    beginning = len(tokens_of(thinker, thinker.template.render([FIRST])))
    assert second.rewritten_tokens == len(last.token_ids)
    assert second.metrics.reused_tokens == beginning
    fresh = Session(thinker)
    assert answer(fresh.chat(follow_up, settings(PLAIN, GREEDY, 8), never())).token_ids == second.token_ids
    fresh.close()
    # An answer without a thought is read as it was said, and nothing is lost.
    third = [*follow_up, Message("assistant", second.text), FIRST]
    assert answer(session.chat(third, settings(max_tokens=2), never())).rewritten_tokens == 0
    # Neither is anything when it is the user who changes the past.
    edited = [FIRST, Message("assistant", "Gone."), SECOND]
    assert answer(session.chat(edited, settings(max_tokens=2), never())).rewritten_tokens == 0
    session.close()


def test_stop_strings_wait_for_the_end_of_the_thought_unless_asked(thinker: LoadedSet) -> None:
    session = Session(thinker)
    for speculation in (PLAIN, DRAFTED):
        given = GenerationSettings(Sampling(temperature=0, grammar=THOUGHT), speculation, stop_strings=("\n",))
        finished = answer(session.chat([FIRST], given, never()))
        assert (len(finished.thinking), len(finished.text), finished.reason.value) == (19, 10, "stop")
        inside = replace(given, stops_in_thinking=True, stop_strings=("\n",))
        assert answer(session.chat([FIRST], inside, never())).thinking == ""
    session.close()


def test_thinking_can_be_switched_where_the_template_has_a_switch(thinker: LoadedSet, small: LoadedSet) -> None:
    assert thinker.template.has_thinking_switch
    session = Session(thinker)
    answer(session.chat([FIRST], replace(settings(max_tokens=2), thinking=False), never()))
    assert shown(thinker, session.tokens).count("</think>") == 1
    answer(session.chat([FIRST], replace(settings(max_tokens=2), thinking=True), never()))
    assert "</think>" not in shown(thinker, session.tokens)
    session.close()
    assert not small.template.has_thinking_switch
    plain = Session(small)
    with pytest.raises(SettingError, match="no switch for thinking"):
        answer(plain.chat([FIRST], replace(settings(), thinking=True), never()))
    plain.close()


def test_a_template_may_open_the_thought_itself(starter: Path, tmp_path: Path, cost_file: Path) -> None:
    loaded = thinking_set(starter, tmp_path, OPENING, cost_file)
    session = Session(loaded)
    grammar = 'root ::= [a-z]{12} "</think>\\n\\n" [a-z]{10}'
    given = GenerationSettings(Sampling(temperature=0, grammar=grammar), DRAFTED)
    finished = answer(session.chat([FIRST], given, never()))
    assert (len(finished.thinking), len(finished.text)) == (12, 10)
    session.close()
    loaded.close()


def test_tags_are_text_where_the_model_does_not_think(small: LoadedSet, session: Session) -> None:
    assert not small.template.thinks
    given = GenerationSettings(Sampling(temperature=0, grammar='root ::= "<think>a</think>b"'))
    finished = answer(session.chat([FIRST], given, never()))
    assert (finished.text, finished.thinking) == ("<think>a</think>b", "")
