"""The vote and its weights, against small trees worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import WeightRule
from engine.drafters.base import Score
from engine.types import Draft, VotedDraft
from engine.vote import HEDGE_RATE, HEDGE_SHARE, MINIONS_PENALTY, WEIGHT_FLOOR, losers, make_weights, vote


def draft(source: str, *tokens: int, probability: float = 0.5, match_length: int = 0) -> Draft:
    return Draft(source, tokens, (probability,) * len(tokens), match_length)


EQUAL = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}


def test_the_heaviest_child_wins_at_every_node() -> None:
    voted = vote([draft("a", 1, 2, 3), draft("b", 1, 5, 6), draft("c", 1, 5, 7), draft("d", 9)], EQUAL)
    assert voted.tokens == (1, 5, 6)
    assert voted.agreement == (3 / 4, 2 / 3, 1 / 3)
    assert voted.proposers == (("a", "b", "c"), ("b", "c"), ("b",))
    assert voted.winner == "b"


def test_losers_are_described_as_if_they_had_won() -> None:
    drafts = [draft("a", 1, 2, 3), draft("b", 1, 5, 6), draft("c", 1, 5), draft("d", 9, 9)]
    voted = vote(drafts, EQUAL)
    first, last = losers(voted, drafts, EQUAL)
    assert (first.winner, first.tokens, last.winner, last.tokens) == ("a", (1, 2, 3), "d", (9, 9))
    assert first.agreement == (3 / 4, 1 / 4, 1 / 2)
    assert first.proposers == (("a", "b", "c"), ("a",), ("a",))
    assert losers(voted, drafts[1:3], EQUAL) == ()


def test_two_light_drafters_outvote_a_heavy_one() -> None:
    weights = {"a": 1.0, "b": 0.6, "c": 0.6}
    assert vote([draft("a", 1), draft("b", 2), draft("c", 2)], weights).tokens == (2,)
    assert vote([draft("a", 1), draft("b", 2)], weights).tokens == (1,)


def test_equal_nodes_are_told_apart_by_their_heaviest_drafter() -> None:
    weights = {"a": 0.5, "b": 0.5, "c": 1.0}
    assert vote([draft("a", 1), draft("b", 1), draft("c", 2)], weights).tokens == (2,)


def test_then_by_the_order_of_the_drafts() -> None:
    assert vote([draft("a", 1), draft("b", 2)], EQUAL).tokens == (1,)
    assert vote([draft("b", 2), draft("a", 1)], EQUAL).tokens == (2,)


def test_the_winner_is_a_drafter_whose_whole_sequence_it_is() -> None:
    weights = {"a": 1.0, "b": 0.2}
    voted = vote([draft("a", 1, probability=0.9), draft("b", 1, 2, probability=0.3, match_length=4)], weights)
    assert (voted.tokens, voted.winner, voted.match_length) == ((1, 2), "b", 4)
    assert voted.probabilities == (0.3, 0.3)
    assert voted.agreement == (1.0, 1.0)


def test_empty_drafts_abstain() -> None:
    voted = vote([draft("a"), draft("b", 7)], EQUAL)
    assert (voted.tokens, voted.agreement, voted.proposers) == ((7,), (1.0,), (("b",),))
    assert vote([draft("a"), draft("b")], EQUAL) == VotedDraft()
    assert vote([], EQUAL) == VotedDraft()


chains = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=4)
some_weights = st.lists(st.sampled_from([0.05, 0.3, 0.7, 1.0]), min_size=4, max_size=4)


@given(chains, some_weights)
def test_the_outcome_is_one_drafters_own_sequence_and_no_sibling_is_heavier(
    tokens: list[list[int]], weight_list: list[float]
) -> None:
    weights = dict(zip("abcd", weight_list, strict=True))
    drafts = [draft(name, *chain) for name, chain in zip("abcd", tokens, strict=False)]
    voted = vote(drafts, weights)
    assert voted.tokens == next((one.tokens for one in drafts if one.source == voted.winner), ())
    for position, token in enumerate(voted.tokens):
        through = [one for one in drafts if one.tokens[:position] == voted.tokens[:position] and len(one) > position]
        by_token = dict.fromkeys(range(3), 0.0)
        for one in through:
            by_token[one.tokens[position]] += weights[one.source]
        assert by_token[token] == pytest.approx(max(by_token.values()))
        reached = sum(weights[one.source] for one in drafts if len(one) > position)
        assert voted.agreement[position] == pytest.approx(by_token[token] / reached)
        assert 0 < voted.agreement[position] <= 1


def sent(winner: str, length: int) -> VotedDraft:
    return VotedDraft((1,) * length, (0.5,) * length, (1.0,) * length, ((winner,),) * length, winner)


def test_minions_judges_the_winner_alone() -> None:
    weights = make_weights(WeightRule.MINIONS, ["a", "b"])
    weights.learn(sent("a", 4), 4, 2, {"b": Score(0, 9)})
    assert dict(weights.current) == {"a": MINIONS_PENALTY, "b": 1.0}
    weights.learn(sent("a", 4), 4, 3, {})
    assert weights.current["a"] > MINIONS_PENALTY
    assert weights.current["b"] == 1.0


def test_minions_learns_nothing_from_a_step_without_a_draft() -> None:
    weights = make_weights(WeightRule.MINIONS, ["a"])
    weights.learn(VotedDraft(), 0, 0, {"a": Score(0, 1)})
    weights.learn(sent("a", 3), 0, 0, {})
    assert weights.current["a"] == 1.0


def test_hedge_judges_losers_too_and_leaves_those_without_an_opinion_alone() -> None:
    weights = make_weights(WeightRule.HEDGE, ["a", "b", "c"])
    weights.learn(VotedDraft(), 0, 0, {"a": Score(1, 1), "b": Score(0, 1), "c": Score(0, 0)})
    raw = {"a": math.exp(HEDGE_RATE / 2), "b": math.exp(-HEDGE_RATE / 2), "c": 1.0}
    mean = sum(raw.values()) / 3
    shared = {name: (1 - HEDGE_SHARE) * weight + HEDGE_SHARE * mean for name, weight in raw.items()}
    assert dict(weights.current) == pytest.approx({name: weight / shared["a"] for name, weight in shared.items()})
    assert weights.current["b"] < weights.current["c"] < weights.current["a"]


def test_hedge_has_nothing_to_learn_when_one_drafter_alone_had_an_opinion() -> None:
    weights = make_weights(WeightRule.HEDGE, ["a", "b"])
    weights.learn(sent("a", 1), 1, 0, {"a": Score(0, 5), "b": Score()})
    assert dict(weights.current) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("rule", list(WeightRule))
def test_no_weight_falls_below_the_floor_and_a_drafter_comes_back(rule: WeightRule) -> None:
    weights = make_weights(rule, ["a", "b"])
    for _ in range(300):
        weights.learn(sent("b", 2), 2, 0, {"a": Score(2, 2), "b": Score(0, 2)})
    assert weights.current["a"] == 1.0
    assert WEIGHT_FLOOR <= weights.current["b"] < 0.2
    for _ in range(300):
        weights.learn(sent("b", 2), 2, 2, {"a": Score(0, 2), "b": Score(2, 2)})
    assert weights.current["b"] == 1.0
