"""Grammars, biases and log-probabilities with drafters on: the same as without, token for token."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.config import GenerationSettings, LookAhead, Policy, Sampling, Speculation, VoteMode
from engine.errors import SettingError
from engine.loader import LoadedSet
from engine.runtime.context import Run
from engine.runtime.grammar import Grammar, grammar_of_schema
from engine.runtime.template import Message
from engine.session import Session
from engine.types import EmittedToken, Finished, FinishReason, LogProbabilities, StepDone
from tests.engine.conftest import GREEDY, PLAIN, answer, never, tokens_of
from tests.engine.scripted import check_sums

SPECULATIONS = {
    "auto": Speculation(),
    "fixed:3 ahead": Speculation(Policy.parse("fixed:3"), look_ahead=LookAhead.ON),
    "fixed:7 together": Speculation(Policy.parse("fixed:7"), vote=VoteMode.COLLECTIVE),
}
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer"},
            "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 5},
        },
        "required": ["name", "age", "colours"],
        "additionalProperties": False,
    }
)
GRAMMARS = {
    "schema": grammar_of_schema(SCHEMA),
    "digits": 'root ::= "answer " [0-9]+ ( ", " [0-9]+ ){3,9} "."',
    "letters of a kind": "root ::= [a-m .,]{40,60}",
}
SAMPLINGS = {
    "greedy": GREEDY,
    "penalties": Sampling(temperature=0, repeat_penalty=1.3, presence_penalty=0.3),
    "seed 1": Sampling(temperature=0.8, seed=1),
    "seed 2": Sampling(temperature=1.2, seed=2, top_k=0, top_p=1, min_p=0, repeat_penalty=1.1),
}
MAX_TOKENS = 32
QUESTION = Message("user", "Describe a person: a name, an age, colours. Then count: one two three, one two three.")


@pytest.fixture
def session(small: LoadedSet) -> Iterator[Session]:
    session = Session(small)
    yield session
    session.close()


def ask(
    session: Session, speculation: Speculation, sampling: Sampling, top: int | None = None
) -> tuple[Finished, list[EmittedToken]]:
    settings = GenerationSettings(sampling, speculation, MAX_TOKENS, top_log_probabilities=top)
    *events, last = session.chat([QUESTION], settings, never())
    assert isinstance(last, Finished)
    check_sums(last.metrics)
    return last, [token for event in events if isinstance(event, StepDone) for token in event.tokens]


def ask_all(session: Session, sampling: Sampling, top: int | None = None) -> list[tuple[Finished, list[EmittedToken]]]:
    """Plainly, and in every way to draft."""
    return [ask(session, speculation, sampling, top) for speculation in (PLAIN, *SPECULATIONS.values())]


# Grammars


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_grammar_is_followed_and_drafts_change_nothing(session: Session, grammar: str, sampling: str) -> None:
    given = replace(SAMPLINGS[sampling], grammar=GRAMMARS[grammar])
    (plain, _), *drafted = ask_all(session, given)
    free, _ = ask(session, PLAIN, SAMPLINGS[sampling])
    assert free.token_ids != plain.token_ids, "the grammar forbids what would be said without it"
    for finished, _ in drafted:
        assert finished.token_ids == plain.token_ids
        assert (finished.text, finished.reason) == (plain.text, plain.reason)
    assert sum(finished.metrics.verified for finished, _ in drafted) > 0
    check_form(grammar, plain)


def check_form(grammar: str, finished: Finished) -> None:
    """The answer is whole and has the form, or is the beginning of one."""
    if finished.reason is FinishReason.LENGTH:
        beginnings = {"schema": r'\{ ?"name"', "digits": r"answer \d+", "letters of a kind": r"[a-m .,]+$"}
        assert re.match(beginnings[grammar], finished.text)
    elif grammar == "schema":
        person = json.loads(finished.text)
        assert set(person) == {"name", "age", "colours"}
        assert isinstance(person["age"], int)
        assert 2 <= len(person["colours"]) <= 5
    else:
        whole = {"digits": r"answer \d+(, \d+){3,9}\.", "letters of a kind": r"[a-m .,]{40,60}"}
        assert re.fullmatch(whole[grammar], finished.text)


def test_a_draft_is_cut_where_the_grammar_forbids_it_and_the_grammar_stays_where_it_is(small: LoadedSet) -> None:
    vocabulary = small.model.vocabulary
    grammar = Grammar('root ::= "one" (" two" | " three")+ "!"', vocabulary)
    tokens = vocabulary.tokenize("one two three four", adds_special=False)
    assert len(tokens) == 4
    for _ in range(2):
        assert grammar.allowed_length(tokens) == 3
        assert grammar.allowed_length(tokens[1:]) == 0
        assert grammar.allowed_length(()) == 0
    grammar.accept(tokens[0])
    assert grammar.allowed_length(tokens[1:]) == 2
    assert not grammar.allows(tokens[0])
    grammar.close()


def test_no_forbidden_token_reaches_the_target(small: LoadedSet, session: Session) -> None:
    """Drafters know nothing of the grammar: what they draft against it is trimmed, not verified and rejected."""
    text = "one two three four " * 12
    grammar = 'root ::= (" one" | " two" | " three"){30}'
    sampling = Sampling(temperature=0, grammar=grammar)
    given = GenerationSettings(sampling, Speculation(Policy.parse("fixed:7")), 24)
    allowed = {small.model.vocabulary.tokenize(word, adds_special=False)[0] for word in (" one", " two", " three")}
    sent: set[int] = set()
    decode = small.context.decode

    def heard(runs: Sequence[Run], cancel: threading.Event | None = None) -> None:
        # A prompt is no draft: it asks for no logits.
        sent.update(token for run in runs if run.outputs for token in run.tokens[1:])
        decode(runs, cancel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small.context, "decode", heard)
        finished = answer(session.generate(tokens_of(small, text), given, never()))
    plain = answer(session.generate(tokens_of(small, text), replace(given, speculation=PLAIN), never()))
    assert finished.token_ids == plain.token_ids
    assert finished.metrics.trimmed > 0
    assert finished.metrics.verified > 0
    assert sent <= allowed


def test_an_answer_ends_where_the_grammar_ends(session: Session) -> None:
    for finished, _ in ask_all(session, replace(GREEDY, grammar='root ::= "yes" | "no"')):
        assert finished.text in ("yes", "no")
        assert finished.reason is FinishReason.STOP


def test_an_answer_ends_where_bias_and_grammar_leave_nothing(small: LoadedSet, session: Session) -> None:
    """llama.cpp ends the process when a grammar is told of a token that it forbids."""
    vocabulary = small.model.vocabulary
    spelt = [token for token in range(vocabulary.size) if vocabulary.piece(token).startswith(b"Q")]
    sampling = Sampling(temperature=0, grammar='root ::= "Q"', logit_bias=tuple((token, -math.inf) for token in spelt))
    for finished, _ in ask_all(session, sampling):
        assert (finished.text, finished.reason) == ("", FinishReason.STOP)


@pytest.mark.parametrize(
    "grammar", ["root ::= (", "root ::= nowhere", 'start ::= "a"', 'root ::= root "a" | "b"'], ids=str
)
def test_what_is_no_grammar_is_refused_and_the_session_stays_usable(session: Session, grammar: str) -> None:
    with pytest.raises(SettingError, match="no GBNF grammar with a rule called root"):
        ask(session, PLAIN, replace(GREEDY, grammar=grammar))
    assert ask(session, PLAIN, GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "must be a JSON object"),
        ('{"$ref": "#/nowhere"}', "cannot be turned into a grammar"),
        ('{"type": "colour"}', "cannot be turned into a grammar"),
    ],
)
def test_what_is_no_schema_is_refused(schema: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        grammar_of_schema(schema)


# Biases


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_bias_changes_drafted_and_plain_answers_alike(session: Session, sampling: str) -> None:
    free, _ = ask(session, PLAIN, SAMPLINGS[sampling])
    banned = free.token_ids[2]
    wanted = free.token_ids[5]
    given = replace(SAMPLINGS[sampling], logit_bias=((banned, -math.inf), (wanted, 1.5)))
    (plain, _), *drafted = ask_all(session, given)
    assert banned not in plain.token_ids
    assert plain.token_ids != free.token_ids
    assert {finished.token_ids for finished, _ in drafted} == {plain.token_ids}


def test_a_bias_on_what_is_no_token_is_refused(small: LoadedSet, session: Session) -> None:
    size = small.model.vocabulary.size
    with pytest.raises(SettingError, match=f"token {size} cannot be biased"):
        ask(session, PLAIN, Sampling(logit_bias=((size, 1.0),)))
    for bias in (101.0, math.inf, math.nan):
        with pytest.raises(SettingError, match="a logit bias must be"):
            Sampling(logit_bias=((5, bias),))


# Log-probabilities


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_log_probabilities_are_the_targets_own_with_drafts_as_without(session: Session, sampling: str) -> None:
    given = replace(SAMPLINGS[sampling], logit_bias=((5, 1.0),))
    (plain, plain_tokens), *drafted = ask_all(session, given, top=3)
    expected = [token.log_probabilities for token in plain_tokens]
    assert len(expected) == len(plain.token_ids)
    for finished, tokens in drafted:
        assert finished.token_ids == plain.token_ids
        assert [token.log_probabilities for token in tokens] == expected, "bit for bit"
    check_log_probabilities([token.id for token in plain_tokens], expected)


def check_log_probabilities(ids: list[int], found: list[LogProbabilities | None]) -> None:
    for token, one in zip(ids, found, strict=True):
        assert one is not None
        assert len(one.top) == 3
        values = [value for _, value in one.top]
        assert values == sorted(values, reverse=True)
        assert math.exp(values[0]) + math.exp(values[1]) + math.exp(values[2]) <= 1 + 1e-9
        assert dict(one.top).get(token, one.chosen) == one.chosen <= values[0]


def test_a_log_probability_is_that_of_the_row_the_token_was_chosen_from(small: LoadedSet, session: Session) -> None:
    """Before temperature, penalties and bias; compared with a softmax of its own."""
    sampling = Sampling(temperature=2.0, seed=3, repeat_penalty=1.5)
    settings = GenerationSettings(sampling, PLAIN, 1, top_log_probabilities=0)
    prompt = tokens_of(small, "The harbour was quiet when")
    events = session.generate(prompt, settings, never())
    (token,) = next(event for event in events if isinstance(event, StepDone)).tokens
    row = small.context.logits()[-1].astype(np.float64)
    assert token.log_probabilities is not None
    assert token.log_probabilities.top == ()
    assert math.isclose(token.log_probabilities.chosen, row[token.id] - np.logaddexp.reduce(row), rel_tol=1e-12)


def test_nothing_is_measured_that_was_not_asked_for(session: Session) -> None:
    _, tokens = ask(session, SPECULATIONS["auto"], GREEDY)
    assert {token.log_probabilities for token in tokens} == {None}
    with pytest.raises(SettingError, match="from 0 to 20"):
        GenerationSettings(top_log_probabilities=21)
