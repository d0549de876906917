"""The drafters that look text up, against brute force over the same text."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters import suffix as suffix_module
from engine.drafters.base import DraftRequest, Score, always
from engine.drafters.lookup import LookupDrafter, TrustByLength
from engine.drafters.ngram import LONGEST, SHORTEST, NgramDrafter
from engine.drafters.suffix import SuffixAutomaton, SuffixDrafter
from engine.types import Draft

texts = st.lists(st.integers(0, 2), max_size=40)


def draft(drafter: LookupDrafter, max_tokens: int = 4, path: Sequence[int] = ()) -> Draft:
    return drafter.start(DraftRequest(tuple(path), max_tokens, always, threading.Event())).result()


# Suffix automaton


def longest_earlier_suffix(text: Sequence[int]) -> int:
    """Length of the longest end of the text that also occurs ending earlier."""
    return next(
        length
        for length in range(len(text) - 1, -1, -1)
        if any(text[end - length : end] == text[len(text) - length :] for end in range(length, len(text)))
    )


def followers_of(text: Sequence[int], context: Sequence[int]) -> Counter[int]:
    length = len(context)
    return Counter(text[end] for end in range(length, len(text)) if list(text[end - length : end]) == list(context))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_the_longest_match_is_what_brute_force_finds(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, start=1):
        automaton.append(token)
        assert automaton.match_length == longest_earlier_suffix(text[:count])
    assert automaton.size == len(text)


@given(texts, st.lists(st.integers(0, 3), max_size=6))
def test_a_step_without_adding_finds_the_longest_suffix_that_occurs(text: list[int], path: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    state, length = automaton.state, automaton.match_length
    goal = list(text)
    for token in path:
        state, length = automaton.step(state, length, token)
        goal.append(token)
        occurring = (
            size
            for size in range(len(goal), 0, -1)
            if any(text[at : at + size] == goal[-size:] for at in range(len(text) - size + 1))
        )
        assert length == next(occurring, 0)
    assert automaton.size == len(text)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60))
def test_followers_really_followed_and_are_never_counted_too_often(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    context = text[len(text) - automaton.match_length :]
    true = followers_of(text, context)
    if automaton.match_length == 0:
        return
    counted = automaton.followers(automaton.state)
    assert counted
    for token, count in counted.items():
        assert 1 <= count <= true[token]
        assert automaton.target(automaton.state, token) is not None


def test_counts_are_right_where_the_context_is_the_longest_each_time() -> None:
    automaton = SuffixAutomaton()
    for number, follower in enumerate([7, 7, 8, 7, 8, 7]):
        for token in (100 + number, 1, 2, follower):  # what comes before differs, so "1 2" is the longest match
            automaton.append(token)
    for token in (999, 1, 2):
        automaton.append(token)
    assert automaton.match_length == 2
    assert automaton.followers(automaton.state) == {7: 4, 8: 2}


def test_reading_takes_a_bounded_number_of_operations_a_token() -> None:
    """Amortised constant work: states and suffix-link steps, counted, for texts that repeat in nasty ways."""

    class Counting(SuffixAutomaton):
        steps = 0

        def step(self, state: int, match_length: int, token: int) -> tuple[int, int]:
            while state != 0 and token not in self._next[state]:
                state = self._link[state]
                match_length = self._length[state]
                Counting.steps += 1
            return super().step(state, match_length, token)

    texts = {
        "one token": [1] * 3000,
        "two in turn": [1, 2] * 1500,
        "Fibonacci word": fibonacci_word(3000),
        "squares": [token for size in range(1, 55) for token in [1] * size + [2]] * 2,
        "all different": list(range(3000)),
    }
    for name, text in texts.items():
        Counting.steps = 0
        automaton = Counting()
        for token in text:
            automaton.append(token)
        assert len(automaton._next) <= 2 * len(text) + 1, name
        assert sum(map(len, automaton._next)) <= 3 * len(text), name
        assert Counting.steps <= 2 * len(text), name


def fibonacci_word(length: int) -> list[int]:
    older, newer = [1], [1, 2]
    while len(newer) < length:
        older, newer = newer, newer + older
    return newer[:length]


# Suffix drafter


def test_suffix_proposes_what_most_often_followed_with_its_share() -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 7, 90, 1, 2, 7, 91, 1, 2, 8, 92, 1, 2])
    made = draft(drafter, 1)
    assert made.tokens == (7,)
    assert made.match_length == 2
    assert made.probabilities[0] == pytest.approx(TrustByLength().probability(2) * 2 / 3)


def test_suffix_remembers_earlier_conversations_and_ngram_does_not() -> None:
    earlier, later = [5, 6, 7, 8, 9], [40, 5, 6, 7]
    suffix, ngram = SuffixDrafter(), NgramDrafter()
    for drafter in (suffix, ngram):
        drafter.begin(earlier)
        drafter.begin(later)
    assert draft(suffix).tokens == (8, 9)
    assert draft(ngram).tokens == ()


def test_a_follow_up_is_not_indexed_twice() -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 3])
    drafter.accept([4])
    drafter.begin([1, 2, 3, 4, 5])
    assert drafter._index.size == 5


def test_the_index_starts_over_when_full_and_keeps_the_newest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_module, "MAX_INDEXED_TOKENS", 40)
    drafter = SuffixDrafter()
    drafter.begin(list(range(30)))
    for token in range(30, 100):
        drafter.accept([token])
        assert drafter._index.size <= 40
    drafter.accept([97, 98])
    assert draft(drafter).tokens[:1] == (99,)
    drafter.begin([*range(200, 250), 200, 201])
    assert draft(drafter).tokens[:2] == (202, 203)


# N-gram drafter


def brute_force_ngram(text: list[int], path: list[int], max_tokens: int) -> tuple[int, ...]:
    """What followed the latest earlier occurrence of the longest n-gram, of 5 down to 2 tokens."""
    goal = text + path
    for size in range(min(LONGEST, len(goal)), SHORTEST - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == goal[len(goal) - size :]:
                return tuple(text[end : end + max_tokens])
    return ()


@given(texts, st.lists(st.integers(0, 2), max_size=3), st.integers(1, 5), st.data())
def test_ngram_proposes_what_brute_force_finds(
    text: list[int], path: list[int], max_tokens: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(text)))
    drafter = NgramDrafter()
    drafter.begin(text[:cut])
    drafter.accept(text[cut:])
    made = draft(drafter, max_tokens, path)
    assert made.tokens == brute_force_ngram(text, path, max_tokens)


def test_ngram_reports_how_far_back_the_match_goes() -> None:
    drafter = NgramDrafter()
    drafter.begin([9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7])
    made = draft(drafter, 2)
    assert (made.tokens, made.match_length) == ((8, 1), 7)


# Both


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
class TestBoth:
    @given(first=texts, second=texts, kept=st.integers(0, 40))
    def test_however_a_text_came_about_the_committed_tokens_are_the_last_told(
        self, make: type[LookupDrafter], first: list[int], second: list[int], kept: int
    ) -> None:
        drafter = make()
        drafter.begin(first)
        drafter.truncate(min(kept, len(first)))
        drafter.accept(second)
        assert drafter._committed == first[:kept] + second
        drafter.begin(second)
        assert drafter._committed == second

    def test_no_match_abstains(self, make: type[LookupDrafter]) -> None:
        drafter = make()
        for tokens in ([], [1], [1, 2, 3, 4]):
            drafter.begin(tokens)
            made = draft(drafter)
            assert (made.tokens, made.probabilities, made.match_length) == ((), (), 0)

    def test_drafting_changes_nothing(self, make: type[LookupDrafter]) -> None:
        drafter = make()
        drafter.begin([1, 2, 3, 1, 2])
        first = draft(drafter, 3)
        draft(drafter, 2, (3, 1))
        assert draft(drafter, 3) == first

    def test_no_more_than_asked_and_no_further_than_told(self, make: type[LookupDrafter]) -> None:
        drafter = make()
        drafter.begin([1, 2, 3, 4, 5, 1, 2])
        assert draft(drafter, 2).tokens == (3, 4)
        request = DraftRequest((), 4, lambda probabilities, _entropy: len(probabilities) < 3, threading.Event())
        made = drafter.start(request).result()
        assert made.tokens == (3, 4, 5)
        assert len(made.probabilities) == 3

    def test_guesses_are_scored_on_what_was_committed(self, make: type[LookupDrafter]) -> None:
        drafter = make()
        drafter.begin([1, 2, 3, 4, 1, 2])
        drafter.accept([3, 9, 9])  # right, wrong, no opinion
        assert drafter.take_score() == Score(1, 2)
        assert drafter.take_score() == Score()

    def test_trust_follows_what_was_committed(self, make: type[LookupDrafter]) -> None:
        drafter = make()
        drafter.begin([1, 2, 3] * 40)
        before = draft(drafter, 1).probabilities[0]
        for _ in range(30):
            drafter.accept([1, 2, 3])
        assert draft(drafter, 1).probabilities[0] > max(before, 0.95)

    def test_forgetting_drops_the_text(self, make: type[LookupDrafter]) -> None:
        drafter = make()
        drafter.begin([1, 2, 3, 1, 2])
        drafter.forget()
        drafter.begin([1, 2])
        assert draft(drafter).tokens == ()


def test_trust_is_learnt_by_length() -> None:
    trust = TrustByLength()
    for _ in range(200):
        trust.learn(2, hit=False)
        trust.learn(10, hit=True)
    assert trust.probability(2) < 0.05
    assert trust.probability(10) == trust.probability(8) > 0.95
    assert trust.probability(16) == TrustByLength().probability(16)
