"""The first promise, on real models: with drafters on, every token is the one the target alone would have said.

Settings are combined so that every two values of any two of them meet at least once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine.config import LookAhead, Policy, Sampling, Speculation, VoteMode, WeightRule
from engine.loader import LoadedSet
from engine.runtime.context import FloatRows
from engine.runtime.template import Message
from engine.session import Session
from engine.types import Finished
from tests.engine.conftest import GREEDY, PLAIN, answer, never, settings, tokens_of
from tests.engine.scripted import check_sums

ALL = ("ngram", "suffix", "few-bits", "no-layer-14", "hostile")
DRAFTER_SETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "ngram": ("ngram",),
    "suffix": ("suffix",),
    "one model": ("few-bits",),
    "two models": ("few-bits", "no-layer-14"),
    "all": ALL,
    "hostile": ("hostile",),
}
PRICES = "".join(f"{number}. A lamp of kind {number} costs {number * 7 % 31} coins.\n" for number in range(1, 41))
PROMPTS = {
    "story": "Write the first lines of a story about a lighthouse keeper who finds a letter.",
    "code": "Write a Python function that returns the sum of the even numbers in a list.",
    "repeat": "Repeat this list and add a colour to each word: apple, plum, pear, apple, plum, pear, apple, plum.",
    "long": f"Here is a price list.\n{PRICES}Repeat the first lines of it, then say which lamp is the dearest.",
}
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy with penalties": Sampling(temperature=0, repeat_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2),
    "seed 1": Sampling(temperature=0.8, seed=1),
    "seed 2": Sampling(temperature=0.8, seed=2),
    "seed 3": Sampling(temperature=0.8, seed=3, repeat_penalty=1.1),
}
MAX_TOKENS = 32


class Row(NamedTuple):
    """One combination of settings."""

    policy: str
    drafters: str
    prompt: str
    sampling: str
    look_ahead: LookAhead
    vote: VoteMode
    weights: WeightRule

    @property
    def speculation(self) -> Speculation:
        return Speculation(Policy.parse(self.policy), self.weights, self.vote, self.look_ahead)


VALUES: tuple[Sequence[Any], ...] = (
    ("auto", "minions", "adaedl", "fixed:1", "fixed:3", "fixed:7"),
    tuple(DRAFTER_SETS),
    tuple(PROMPTS),
    tuple(SAMPLINGS),
    tuple(LookAhead),
    tuple(VoteMode),
    tuple(WeightRule),
)


def pairwise() -> list[Row]:
    """Few rows in which every value of a setting meets every value of every other; those of one prompt together."""
    places = range(len(VALUES))
    missing = {
        (left, a, right, b)
        for left, right in itertools.combinations(places, 2)
        for a in VALUES[left]
        for b in VALUES[right]
    }

    def news(row: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
        return {(left, row[left], right, row[right]) for left, right in itertools.combinations(places, 2)} & missing

    everything = list(itertools.product(*VALUES))
    rows: list[Row] = []
    while missing:
        sample = everything[len(rows) % 7 :: 7]  # enough to choose from, and quick
        uses = Counter(row.prompt for row in rows)
        best = max(sample, key=lambda row: (len(news(row)), -uses[row[2]]))
        if not news(best):
            best = max(everything, key=lambda row: len(news(row)))
        missing -= news(best)
        rows.append(Row(*best))
    return sorted(rows, key=lambda row: list(PROMPTS).index(row.prompt))


ROWS = pairwise()


class Asker:
    """One session for each prompt, so that a long one is read once; and what plain decoding said."""

    def __init__(self, loaded: LoadedSet) -> None:
        self.loaded = loaded
        self._subsets = {name: loaded.with_drafters(names) for name, names in DRAFTER_SETS.items()}
        self._sessions = {name: Session(loaded) for name in PROMPTS}
        self._plain: dict[tuple[str, str], Finished] = {}

    def prompt(self, name: str) -> list[int]:
        rendered = self.loaded.template.render([Message("user", PROMPTS[name])])
        return tokens_of(self.loaded, rendered)

    def plain(self, prompt: str, sampling: str) -> Finished:
        """What the target alone says, in a session of its own."""
        key = (prompt, sampling)
        if key not in self._plain:
            self._plain[key] = fresh(self.loaded, self.prompt(prompt), SAMPLINGS[sampling], MAX_TOKENS)
        return self._plain[key]

    def drafted(self, row: Row) -> Finished:
        session = self._sessions[row.prompt]
        session._set = self._subsets[row.drafters]  # a session has one set, but here the prompt's cache is to be kept
        given = settings(row.speculation, SAMPLINGS[row.sampling], MAX_TOKENS)
        return answer(session.generate(self.prompt(row.prompt), given, never()))

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()


def fresh(
    loaded: LoadedSet, prompt: Sequence[int], sampling: Sampling = GREEDY, max_tokens: int = MAX_TOKENS
) -> Finished:
    """Plain decoding in a new session."""
    session = Session(loaded)
    try:
        return answer(session.generate(prompt, settings(PLAIN, sampling, max_tokens), never()))
    finally:
        session.close()


@pytest.fixture(scope="module")
def asker(everything: LoadedSet) -> Iterator[Asker]:
    """Drafters remember what they read from row to row, as they do from answer to answer."""
    asker = Asker(everything)
    yield asker
    asker.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(getattr(value, "value", value) for value in row))
def test_the_answer_is_the_plain_one_token_for_token(asker: Asker, row: Row) -> None:
    plain = asker.plain(row.prompt, row.sampling)
    drafted = asker.drafted(row)
    assert drafted.token_ids == plain.token_ids
    assert (drafted.text, drafted.reason) == (plain.text, plain.reason)
    check_sums(drafted.metrics)
    assert drafted.metrics.emitted == len(drafted.token_ids)
    assert [report.note for report in drafted.metrics.drafters] == [""] * len(DRAFTER_SETS[row.drafters])
    if row.policy != "auto" and row.drafters not in ("none", "ngram", "suffix"):
        assert drafted.metrics.verified > 0


def test_what_is_compared_is_worth_comparing(asker: Asker) -> None:
    """The long prompt runs past 600 positions, and seeds, penalties and temperature do change the answer."""
    assert len(asker.prompt("long")) > 600
    answers = {asker.plain("story", sampling).token_ids for sampling in SAMPLINGS}
    assert len(answers) == len(SAMPLINGS)
    assert all(len(tokens) == MAX_TOKENS for tokens in answers)


# Conversations

SPECULATIONS = {
    "auto": Speculation(),
    "run ahead": Speculation(Policy.parse("fixed:3"), look_ahead=LookAhead.ON),
    "lock-step": Speculation(Policy.parse("fixed:7"), WeightRule.MINIONS, VoteMode.COLLECTIVE),
}
SAMPLED = Sampling(temperature=0.8, seed=11)
FIRST = Message("user", "Name three fruits.")
SECOND = Message("user", "Which of them is the largest?")
TURN_TOKENS = 20


def ask(
    session: Session, *messages: Message, speculation: Speculation = PLAIN, sampling: Sampling = SAMPLED
) -> Finished:
    return answer(session.chat(messages, settings(speculation, sampling, TURN_TOKENS), never()))


def own_prompt(session: Session, finished: Finished) -> tuple[int, ...]:
    """The tokens that the last answer continued."""
    return session.tokens[: len(session.tokens) - len(finished.token_ids)]


@pytest.mark.parametrize("speculation", SPECULATIONS.values(), ids=SPECULATIONS)
def test_a_follow_up_equals_a_fresh_run_over_the_same_tokens(
    everything: LoadedSet, session: Session, speculation: Speculation
) -> None:
    first = ask(session, FIRST, speculation=speculation)
    beginning = session.tokens
    second = ask(session, FIRST, Message("assistant", first.text), SECOND, speculation=speculation)
    prompt = own_prompt(session, second)
    assert prompt[: len(beginning)] == beginning, "the first answer's ids are kept verbatim"
    assert second.metrics.reused_tokens == len(beginning) - (first.reason.value != "stop")
    assert second.token_ids == fresh(everything, prompt, SAMPLED, TURN_TOKENS).token_ids


def test_regenerating_gives_the_same_answer_for_the_same_seed(everything: LoadedSet, session: Session) -> None:
    speculation = SPECULATIONS["run ahead"]
    first = ask(session, FIRST, speculation=speculation)
    prompt = own_prompt(session, first)
    again = ask(session, FIRST, speculation=speculation)
    assert again.token_ids == first.token_ids
    assert again.metrics.reused_tokens == len(prompt) - 1
    other_seed = Sampling(temperature=0.8, seed=12)
    other = ask(session, FIRST, speculation=speculation, sampling=other_seed)
    assert other.token_ids == fresh(everything, prompt, other_seed, TURN_TOKENS).token_ids != first.token_ids


@pytest.mark.parametrize(
    "edited",
    [
        (Message("user", "Name three frogs."),),
        (FIRST, Message("assistant", "Apple, pear and melon."), SECOND),
        (FIRST, Message("assistant", "Apple"), SECOND),
        (Message("system", "Answer in one word."), FIRST),
    ],
    ids=["question", "answer", "shorter answer", "system prompt"],
)
def test_after_an_edit_the_answer_is_that_of_a_new_conversation(
    everything: LoadedSet, session: Session, edited: tuple[Message, ...]
) -> None:
    speculation = SPECULATIONS["run ahead"]
    first = ask(session, FIRST, speculation=speculation)
    ask(session, FIRST, Message("assistant", first.text), SECOND, speculation=speculation)
    changed = ask(session, *edited, speculation=speculation)
    other = Session(everything)
    assert changed.token_ids == ask(other, *edited).token_ids
    assert own_prompt(session, changed) == own_prompt(other, changed)
    other.close()


def test_a_stop_string_ends_drafted_and_plain_answers_alike_and_the_follow_up_reads_as_it_should(
    everything: LoadedSet, session: Session
) -> None:
    whole = ask(session, FIRST).text
    stop = whole[20:23]
    cut = whole[: whole.index(stop)]
    texts, ids = set(), set()
    for speculation in (PLAIN, *SPECULATIONS.values()):
        given = settings(speculation, SAMPLED, TURN_TOKENS, [stop])
        finished = answer(session.chat([FIRST], given, never()))
        assert finished.reason.value == "stop"
        texts.add(finished.text)
        ids.add(finished.token_ids)
    assert texts == {cut}
    assert len(ids) == 1
    messages = (FIRST, Message("assistant", cut), SECOND)
    second = ask(session, *messages)
    assert second.metrics.reused_tokens > 0
    rendered = everything.template.render(messages)
    assert shown(everything, own_prompt(session, second)) == shown(everything, tokens_of(everything, rendered))


def shown(loaded: LoadedSet, tokens: Sequence[int]) -> str:
    return loaded.model.vocabulary.text(tokens)


def test_two_conversations_on_one_set_do_not_disturb_each_other(everything: LoadedSet, session: Session) -> None:
    other = Session(everything)
    speculation = SPECULATIONS["run ahead"]
    texts = ("Once upon a", "def main(")
    plain = {text: fresh(everything, tokens_of(everything, text), GREEDY, 16).token_ids for text in texts}
    given = settings(speculation, GREEDY, 16)
    # By turns, and then step by step: the drafters hear both, the target must not care.
    for text, one in zip(plain, (session, other), strict=True):
        assert answer(one.generate(tokens_of(everything, text), given, never())).token_ids == plain[text]
    running = [
        one.generate(tokens_of(everything, text), given, never())
        for text, one in zip(plain, (session, other), strict=True)
    ]
    last: dict[int, Finished] = {}
    for events in itertools.zip_longest(*running):
        for place, event in enumerate(events):
            if isinstance(event, Finished):
                last[place] = event
    assert [last[place].token_ids for place in range(2)] == list(plain.values())
    other.close()


def test_what_other_conversations_leave_in_the_cache_changes_no_bit(everything: LoadedSet, session: Session) -> None:
    """The rows of the last pass are compared: a difference in them changes a token only now and then."""
    prompt = tokens_of(everything, PRICES)[:300]
    given = settings(SPECULATIONS["run ahead"], GREEDY, 8)
    before, after = Session(everything), Session(everything)
    answer(before.generate(prompt[50:250], given, never()))
    answer(session.generate(prompt[:100], given, never()))
    answer(after.generate(prompt[20:150], given, never()))
    before.close()
    row = last_row(everything, session, prompt)
    after.close()
    alone = Session(everything)
    assert np.array_equal(row, last_row(everything, alone, prompt))
    alone.close()


def last_row(loaded: LoadedSet, session: Session, prompt: Sequence[int]) -> FloatRows:
    """The logits from which the first token after the prompt is chosen."""
    answer(session.generate(prompt, settings(PLAIN, GREEDY, 1), never()))
    row: FloatRows = loaded.context.logits()[-1].copy()
    return row
