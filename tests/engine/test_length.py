"""The length rules on curves and drafts made up for the purpose."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.acceptance import AcceptanceModel
from engine.branches import best_tree
from engine.config import Policy
from engine.cost import DRAFT_START_PASSES, CostModel
from engine.drafters.base import KeepDrafting
from engine.length import (
    ADAEDL_ENTROPY_FACTOR,
    LONGEST_DRAFT,
    MINIONS_CUT,
    MINIONS_DELAY,
    MINIONS_LONGEST,
    MINIONS_RAISE,
    MINIONS_START,
    MINIONS_WINDOW,
    AutoLength,
    LengthRule,
    make_rule,
)
from engine.types import TokenTree, VotedDraft

MEASURED = (10.0, 16.2, 22.3, 16.0, 23.0, 29.4, 28.0, 26.9)
"""A real curve's shape: a pass of 4 costs what a pass of 2 does, and one of 8 less than one of 6."""


PLAIN_PACE = 1 / MEASURED[0]
"""Tokens per millisecond of plain decoding on the measured curve."""


def best_length(acceptance: list[float], pass_ms: Sequence[float], pace: float) -> int:
    """Tokens of the best chain."""
    draft = draft_of("a", *acceptance)
    survivals = list(itertools.accumulate(acceptance, operator.mul))
    tree = best_tree(draft, survivals, [], pass_ms, pace, most_branches=0)
    assert tree.branches == ()
    return len(tree)


def rule_named(text: str, cost: CostModel | None = None, acceptance: AcceptanceModel | None = None) -> LengthRule:
    return make_rule(Policy.parse(text), cost or CostModel(), acceptance or AcceptanceModel(["ngram"]))


def test_three_drafts_beat_two_where_a_pass_of_four_is_cheaper_than_one_of_three() -> None:
    pace = 1 / MEASURED[0]
    assert best_length([0.8, 0.8, 0.8], MEASURED, pace) == 3
    assert best_length([0.8, 0.8, 0.1], MEASURED, pace) == 3
    assert best_length([0.8, 0.8], (10.0, 16.2, 24.0), pace) == 1


def test_nothing_is_sent_when_nothing_pays() -> None:
    assert best_length([0.1, 0.1, 0.1], MEASURED, 1 / MEASURED[0]) == 0
    assert best_length([], MEASURED[:1], 0.1) == 0


def test_everything_is_sent_when_time_is_worth_nothing() -> None:
    assert best_length([0.1] * 7, MEASURED, 0.0) == 7


probabilities = st.floats(0, 1)


@given(st.lists(probabilities, max_size=7), st.floats(0.001, 1))
def test_no_other_length_is_worth_more(acceptance: list[float], pace: float) -> None:
    def value(length: int) -> float:
        expected = sum(itertools.accumulate(acceptance[:length], lambda left, right: left * right))
        return expected - pace * MEASURED[length]

    best = best_length(acceptance, MEASURED, pace)
    assert value(best) == pytest.approx(max(map(value, range(len(acceptance) + 1))))


def test_fixed_is_fixed_and_off_is_none() -> None:
    assert rule_named("fixed:7").limit() == 7
    assert rule_named("off").limit() == rule_named("plain").limit() == 0
    draft = VotedDraft((1, 2), (0.1, 0.1), (1.0, 1.0), (("a",), ("a",)), "a")
    assert rule_named("fixed:7").cut(draft, (), 0, 0, PLAIN_PACE) == TokenTree(draft)


# Minions


def feed(rule: LengthRule, times_ms: list[float], accepted: int = 0) -> None:
    for step_ms in times_ms:
        rule.learn(4, accepted, step_ms)


def test_minions_raises_while_time_per_token_falls_and_cuts_deeper_when_it_rises() -> None:
    rule = rule_named("minions")
    falling = [float(20 - step) for step in range(MINIONS_WINDOW)]
    feed(rule, falling[:-1])
    assert rule.limit() == MINIONS_START
    feed(rule, falling[-1:])
    assert rule.limit() == MINIONS_START + MINIONS_RAISE
    feed(rule, [1000.0] * MINIONS_DELAY)  # not looked at
    feed(rule, falling[::-1])
    assert rule.limit() == MINIONS_START + MINIONS_RAISE - MINIONS_CUT


def test_minions_looks_at_time_per_token_not_per_step() -> None:
    rule = rule_named("minions")
    for step in range(MINIONS_WINDOW):
        rule.learn(4, step, 10.0 * (1 + step) - step)  # longer steps, each token cheaper
    assert rule.limit() == MINIONS_START + MINIONS_RAISE


def test_minions_stays_within_its_bounds() -> None:
    rule = rule_named("minions")
    for _ in range(20):
        feed(rule, [float(step) for step in range(MINIONS_WINDOW)] + [0.0] * MINIONS_DELAY)
    assert rule.limit() == 1
    for _ in range(40):
        feed(rule, [float(-step) for step in range(MINIONS_WINDOW)] + [0.0] * MINIONS_DELAY)
    assert rule.limit() == MINIONS_LONGEST


# AdaEDL


def stops_at(keep: KeepDrafting, entropies: list[float]) -> int:
    """Tokens drafted when each has the given entropy."""
    for count, entropy in enumerate(entropies, start=1):
        if not keep([0.5] * count, entropy):
            return count
    return len(entropies)


def test_adaedl_stops_where_the_entropy_bound_falls_below_the_threshold() -> None:
    keep = rule_named("adaedl").keep_drafting("a", ("a",), 0, PLAIN_PACE)
    # 1 − √(0.2 · 2.45) is just 0.3, the first threshold.
    edge = 0.49 / ADAEDL_ENTROPY_FACTOR
    assert stops_at(keep, [0.0, edge - 0.01, edge + 0.01, 0.0]) == 3


def test_adaedl_grows_stricter_while_too_little_is_accepted_and_milder_when_all_is() -> None:
    rule = rule_named("adaedl")
    entropy = 0.49 / ADAEDL_ENTROPY_FACTOR

    def keeps(entropy: float) -> bool:
        return rule.keep_drafting("a", ("a",), 0, PLAIN_PACE)([0.5], entropy)

    assert keeps(entropy - 0.01)
    for _ in range(30):
        rule.learn(4, 0, 10.0)
    assert not keeps(entropy - 0.01)
    for _ in range(60):
        rule.learn(4, 4, 10.0)
    assert keeps(entropy)


def test_adaedl_learns_nothing_from_a_step_without_a_draft() -> None:
    rule = rule_named("adaedl")
    entropy = 0.49 / ADAEDL_ENTROPY_FACTOR - 0.001
    for _ in range(50):
        rule.learn(0, 0, 10.0)
    assert rule.keep_drafting("a", (), 0, PLAIN_PACE)([0.5], entropy)


# Auto


def auto(draft_ms: float, mean_hits: list[bool] | None = None) -> AutoLength:
    cost = CostModel()
    for size, elapsed_ms in enumerate(MEASURED, start=1):
        cost.set_base(size, elapsed_ms)
    for size in range(len(MEASURED) + 1, LONGEST_DRAFT + 2):
        cost.set_base(size, MEASURED[-1] + 3.0 * (size - len(MEASURED)))
    cost.observe_draft(["a"], 1, (1 + DRAFT_START_PASSES) * draft_ms)
    acceptance = AcceptanceModel(["ngram"])
    for hit in mean_hits or []:
        acceptance.learn_mean(["a"], draft_of("a", 0.5), draft_of("a", 0.5).tokens if hit else (-1,))
    return AutoLength(cost, acceptance)


def draft_of(winner: str, *tokens: float) -> VotedDraft:
    count = len(tokens)
    return VotedDraft((1,) * count, tokens, (1.0,) * count, ((winner,),) * count, winner)


def test_auto_goes_on_with_a_loser_of_the_vote_that_is_worth_more() -> None:
    rule = auto(0.5)
    doubtful, sure = draft_of("a", 0.3, 0.3, 0.3), draft_of("b", 0.95, 0.95, 0.95)
    assert rule.prefer(doubtful, [sure], 0, PLAIN_PACE) is sure
    assert rule.prefer(sure, [doubtful], 0, PLAIN_PACE) is sure
    assert rule.prefer(sure, [draft_of("b", 0.95, 0.95, 0.95)], 0, PLAIN_PACE) is sure, (
        "the vote decides between equals"
    )
    assert rule_named("fixed:3").prefer(doubtful, [sure], 0, PLAIN_PACE) is doubtful


def test_auto_drafts_on_past_a_dear_size_towards_a_cheap_one() -> None:
    keep = auto(0.5, [True] * 30).keep_drafting("a", ("a",), 0, PLAIN_PACE)
    # Two drafts alone would be the dearest choice; the third makes the pass cheap again.
    assert keep([0.99], 0.0)
    assert keep([0.99, 0.99], 0.0)


def test_auto_stops_at_once_when_a_draft_token_costs_more_than_it_can_bring() -> None:
    keep = auto(40.0).keep_drafting("a", ("a",), 0, PLAIN_PACE)
    assert not keep([0.99], 0.0)


def test_auto_stops_after_a_token_that_will_hardly_be_accepted() -> None:
    rule = auto(3.0, [True] * 30)
    assert rule.keep_drafting("a", ("a",), 0, PLAIN_PACE)([0.95], 0.0)
    assert not rule.keep_drafting("a", ("a",), 0, PLAIN_PACE)([0.01], 0.0)


def test_auto_in_lock_step_weighs_the_tokens_before_a_new_leader_came_in() -> None:
    """A leader that takes over late is told of all tokens so far at once; the answer must be the same."""
    rule = auto(3.0, [True] * 30)
    chain = [0.9, 0.5, 0.3, 0.3, 0.3, 0.3]
    for length in range(1, len(chain) + 1):
        gradual = rule.keep_drafting("a", ("a",), 0, PLAIN_PACE)
        answers = [gradual(chain[:count], 0.0) for count in range(1, length + 1)]
        late = rule.keep_drafting("a", ("a",), 0, PLAIN_PACE)
        assert late(chain[:length], 0.0) == answers[-1]


def test_auto_trims_to_the_length_that_pays() -> None:
    rule = auto(1.0)
    assert len(rule.cut(draft_of("a", 0.99, 0.99, 0.99), (), 0, 0, PLAIN_PACE)) == 3
    assert len(rule.cut(draft_of("a", 0.01, 0.01), (), 0, 0, PLAIN_PACE)) == 0
    assert len(rule.cut(VotedDraft(), (), 0, 0, PLAIN_PACE)) == 0
