"""Token trees: which branches are offered, which are sent, and that following one changes no token and no bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import plan
from engine.acceptance import AcceptanceModel
from engine.branches import TREE_MARGIN, best_tree, side_branches
from engine.config import ModelPlacement, Policy, Sampling, SetConfig, Shape, Speculation
from engine.cost import CALIBRATED_SIZES
from engine.length import FixedLength
from engine.loader import LoadedSet
from engine.runtime.context import Run
from engine.runtime.template import Message
from engine.session import Session
from engine.types import Branch, Draft, Finished, StepDone, TokenTree, Verdict, VotedDraft
from engine.vote import vote
from tests.engine.conftest import GREEDY, PLAIN, answer, never, tokens_of
from tests.engine.conftest import settings as generation
from tests.engine.scripted import END, PROMPT, Bench, ScriptedDrafter, ScriptedTarget, check_sums, knows

ANSWER = (*range(10, 40), END)


def draft(source: str, *tokens: int, seconds: Sequence[int] = ()) -> Draft:
    return Draft(source, tokens, (0.8,) * len(tokens), seconds=tuple((token, 0.1) for token in seconds))


def offered(*drafts: Draft) -> list[tuple[int, tuple[int, ...], str]]:
    voted = vote(drafts, dict.fromkeys((one.source for one in drafts), 1.0))
    return [(branch.fork, branch.tokens, branch.source) for branch in side_branches(voted, drafts)]


# What is offered


def test_a_losing_draft_is_a_branch_from_where_it_leaves_the_winner() -> None:
    assert offered(draft("a", 1, 2, 3), draft("b", 1, 2, 4), draft("c", 1, 9, 8)) == [(2, (4,), "b"), (1, (9, 8), "c")]


def test_a_draft_that_only_ends_earlier_is_no_branch() -> None:
    assert offered(draft("a", 1, 2, 3), draft("b", 1, 2)) == []


def test_the_winners_second_choices_are_branches_of_one_token() -> None:
    assert offered(draft("a", 1, 2, seconds=(7, 8))) == [(0, (7,), "a"), (1, (8,), "a")]


def test_no_two_branches_begin_alike() -> None:
    winners = [draft("a", 1, 2, 3, seconds=(9, 8, 7)), draft("d", 1), draft("e", 1)]
    found = offered(*winners, draft("b", 9, 5), draft("c", 9, 5, 6))
    assert found == [(0, (9, 5, 6), "c"), (1, (8,), "a"), (2, (7,), "a")]


# What is sent

shares = st.floats(0.0, 1.0)


@given(st.lists(shares, max_size=4), st.lists(st.tuples(shares, shares), max_size=3), st.floats(0.0, 0.2))
def test_no_tree_is_worth_more_or_hardly_so_where_a_chain_is_sent(
    trunk: list[float], sides: list[tuple[float, float]], pace: float
) -> None:
    pass_ms = (10.0, 16.0, 22.0, 16.0, 23.0, 29.0, 30.0, 27.0, 33.0, 34.0, 35.0)
    voted = VotedDraft((1,) * len(trunk), tuple(trunk), (1.0,) * len(trunk), (("a",),) * len(trunk), "a")
    survivals = list(itertools.accumulate(trunk, lambda left, right: left * right))
    branches = [
        (Branch(0, (number + 2, 5), side, "b"), (side[0], side[0] * side[1])) for number, side in enumerate(sides)
    ]
    tree = best_tree(voted, survivals, branches, pass_ms, pace, most_branches=len(branches))

    def value(lengths: Sequence[int]) -> float:
        gained: float = sum(survivals[: lengths[0]])
        gained += sum(sum(own[:length]) for (_, own), length in zip(branches, lengths[1:], strict=True))
        return gained - pace * pass_ms[sum(lengths)]

    sent = {branch.tokens[0]: len(branch) for branch in tree.branches}
    found = [len(tree.trunk), *(sent.get(branch.tokens[0], 0) for branch, _ in branches)]
    every = itertools.product(range(len(trunk) + 1), *(range(3) for _ in branches))
    best = max(map(value, every))
    chain = max(value((length, *(0 for _ in branches))) for length in range(len(trunk) + 1))
    if tree.branches:
        assert value(found) == pytest.approx(best)
        assert best > chain + TREE_MARGIN * pace * pass_ms[sum(found)]
    else:
        assert value(found) == pytest.approx(chain)
        assert best <= chain + TREE_MARGIN * pace * max(pass_ms) + 1e-9


def test_only_so_many_branches_are_sent_the_likeliest_first() -> None:
    branches = [(Branch(0, (number,), (0.1,), "b"), (number / 10,)) for number in range(1, 6)]
    tree = best_tree(VotedDraft(), [], branches, (1.0,) * 9, 0.1, most_branches=2)
    assert [branch.tokens for branch in tree.branches] == [(5,), (4,)]


def test_tokens_are_counted_by_their_place() -> None:
    voted = VotedDraft((1, 2), (0.5, 0.5), (1.0, 1.0), (("a",), ("a",)), "a")
    tree = TokenTree(voted, (Branch(1, (3, 4), (0.5, 0.5), "b"), Branch(0, (5,), (0.5,), "a")))
    assert (len(tree), tree.by_depth()) == (5, (2, 2, 1))
    assert Verdict(2, 9, tree.branches[0]).path(voted.tokens) == (1, 3)


def test_a_rescue_is_learnt_from_every_rejection_whether_the_branch_was_sent_or_not() -> None:
    model = AcceptanceModel([])
    branch = Branch(0, (7,), (0.2,), "a", is_second=True)
    first = model.branch(branch, [0.6])[0]
    for _ in range(30):
        model.learn_rescue([branch], 0, 7)
    assert first < 0.2 < model.branch(branch, [0.6])[0] <= 0.4
    for _ in range(300):
        model.learn_rescue([branch], 0, 8)
    assert model.branch(branch, [0.6])[0] < 0.05


# Steps on a scripted target


def flat(bench: Bench) -> Bench:
    """As on a machine where everything takes a millisecond, whatever its size: whatever may help is sent."""
    cost = bench.learning.cost
    cost.clock = itertools.count(0.0, 0.001).__next__
    for size in CALIBRATED_SIZES:
        cost.set_base(size, 1.0)
    return bench


def tree_bench(*drafters: ScriptedDrafter, context_tokens: int = 1000, spare_sequences: int = 8) -> Bench:
    target = ScriptedTarget(ANSWER, context_tokens, spare_sequences)
    return flat(Bench(target, drafters, "auto", shape=Shape.AUTO))


def test_the_second_choice_catches_what_the_first_missed() -> None:
    one = tree_bench(ScriptedDrafter("a", knows(ANSWER, 0), probability=0.4, second_guess=knows(ANSWER)))
    result = one.step()
    assert result is not None
    assert [token.id for token in result.tokens] == [10, 11]
    assert [token.provenance.value for token in result.tokens] == ["accepted", "bonus"]
    assert result.tokens[0].proposers == ("a",)
    assert result.record.accepted == 1 < result.record.verified
    assert one.target.parked_tokens > 0
    check_sums(one.metrics)


def test_an_answer_with_trees_is_the_targets_own_and_takes_fewer_passes() -> None:
    def passes(shape: Shape) -> int:
        mistakes = range(0, len(ANSWER), 3)
        one = flat(
            Bench(
                ScriptedTarget(ANSWER),
                [ScriptedDrafter("a", knows(ANSWER, *mistakes), probability=0.6, second_guess=knows(ANSWER))],
                "auto",
                shape=shape,
            )
        )
        one.run()
        assert one.answer == ANSWER[:-1]
        check_sums(one.metrics)
        assert (one.target.trees > 0) is (shape is Shape.AUTO)
        return len(one.target.passes)

    assert passes(Shape.AUTO) < passes(Shape.CHAIN)


def test_the_counters_of_steps_with_a_tree_with_nothing_sent_and_with_a_chain() -> None:
    # a: 50 11 12, then 10 as second choice → sent 50 11 | 10: the branch accepted, 11 a bonus, 12 trimmed
    # a: 12 13 14 → nothing sent: 12 plain, three trimmed
    # a: 13 14 15 → sent whole and accepted, 16 a bonus
    class Scripted(FixedLength):
        def cut(self, voted: VotedDraft, branches: Sequence[Branch], *_others: object) -> TokenTree:
            length = next(lengths)
            return TokenTree(voted.trimmed(length), tuple(branches) if length == 2 else ())

    lengths = iter((2, 0, 3))
    drafter = ScriptedDrafter("a", knows(ANSWER, 0), second_guess=knows(ANSWER))
    one = Bench(ScriptedTarget(ANSWER), [drafter], shape=Shape.AUTO)
    one.pipeline._rule = Scripted(3)
    for _ in range(3):
        one.step()
    assert one.target.passes == [(3, 50, 11, 10), (11,), (12, 13, 14, 15)]
    metrics = one.metrics
    check_sums(metrics)
    assert (metrics.proposed, metrics.drafted, metrics.verified, metrics.trimmed) == (10, 10, 6, 4)
    assert (metrics.accepted, metrics.rejected, metrics.corrected, metrics.bonus, metrics.plain) == (4, 2, 0, 2, 1)
    assert (metrics.emitted, metrics.verify_steps, metrics.plain_steps) == (7, 2, 1)
    assert metrics.verified_by_position == (3, 2, 1)
    assert metrics.accepted_by_position == (2, 1, 1)
    assert metrics.lengths == {0: 1, 3: 2}


def test_without_spare_sequences_a_chain_is_sent() -> None:
    one = tree_bench(ScriptedDrafter("a", knows(ANSWER, 0), second_guess=knows(ANSWER)), spare_sequences=0)
    one.run()
    assert one.answer == ANSWER[:-1]
    assert one.target.trees == 0


@settings(max_examples=60)
@given(st.data())
def test_whatever_drafters_say_the_answer_stands_and_the_counters_add_up(data: st.DataObject) -> None:
    places = st.lists(st.integers(0, len(ANSWER) - 1), max_size=12)
    drafters = [
        ScriptedDrafter(name, knows(ANSWER, *data.draw(places)), second_guess=knows(ANSWER, *data.draw(places)))
        for name in ("a", "b", "c")
    ]
    # Little room: cells out of use have to be brought back in time.
    one = tree_bench(*drafters, context_tokens=data.draw(st.integers(len(PROMPT) + len(ANSWER) + 2, 130)))
    one.run()
    assert one.answer == ANSWER[:-1]
    check_sums(one.metrics)


# The real thing


@pytest.fixture(scope="module")
def second_choices(starter: Path, draft_models: dict[str, Path], cost_file: Path) -> Iterator[LoadedSet]:
    """Two draft models, on a machine made to believe that large passes are cheap."""
    drafters = (str(draft_models["few-bits"]), str(draft_models["no-layer-14"]))
    loaded = LoadedSet.load(SetConfig(starter, drafters, 2048, ModelPlacement(threads=2), cost_file=cost_file))
    yield loaded
    loaded.close()


def test_side_branches_are_bit_equal_here(second_choices: LoadedSet) -> None:
    assert second_choices.setting.allows_branches


def test_after_branches_were_adopted_every_row_equals_the_chains(second_choices: LoadedSet) -> None:
    context = second_choices.context
    text = tokens_of(
        second_choices, "The harbour was quiet when the first boats came in, and nobody counted them. " * 4
    )
    chain, tree = context.allocate(), context.allocate()
    context.hold_alone(chain)
    expected = []
    for token in text:
        context.decode([Run(chain, (token,), 1)])
        expected.append(context.logits()[0].copy())
    context.hold_alone(tree)
    wrong = text[0]
    for start in range(0, len(text) - 1, 2):
        one, two = text[start : start + 2]
        early, late = context.copy(tree), context.copy(tree)
        context.decode(
            [
                Run(tree, (one,), 1, (early, late)),
                Run(tree, (wrong, wrong), 2),
                Run(early, (7,), 1),
                Run(late, (two,), 1),
            ]
        )
        rows = context.logits()
        assert np.array_equal(rows[0], expected[start])
        assert np.array_equal(rows[4], expected[start + 1])
        context.park(early, start + 1)
        context.adopt(tree, late, start + 1)
        context.free(early)
        assert context.length(tree) == start + 2
    assert context.parked_tokens == 3 * (len(text) // 2)
    context.tidy(tree)
    assert context.parked_tokens == 0
    context.truncate(tree, min(context.length(tree), len(text) - 1))
    context.decode([Run(tree, text[-1:], 1)])
    assert np.array_equal(context.logits()[0], expected[-1])
    context.free(chain)
    context.free(tree)


QUESTIONS = (
    "Write a short story about a lighthouse.",
    "Name three rivers and say where they end.",
    "Explain how a bicycle stays upright.",
    "Describe a walk through a market.",
    "What do bees do in winter?",
    "Write a letter to a neighbour about a tree.",
)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=5)], ids=["greedy", "seeded"])
def test_trees_change_no_token_of_real_answers(
    second_choices: LoadedSet, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who expects more of trees, and tries more, comes to send them soon.
    monkeypatch.setattr(plan, "TREE_MARGIN", 0.8)
    monkeypatch.setattr(plan, "PROBE_SHARE", 0.1)
    cost = second_choices.learning.cost
    cost.clock = itertools.count(0.0, 0.001).__next__
    for size in CALIBRATED_SIZES:
        cost.set_base(size, 1.0)
    for drafter in second_choices.panel.names:
        cost.set_drafter(drafter, {1: 0.1})
        for _ in range(100):
            cost.observe_read(drafter, 1, 0.01)
    compared = rescued = wide = 0
    for question in QUESTIONS:
        rendered = second_choices.template.render([Message("user", question)])
        prompt = tokens_of(second_choices, rendered)
        plain = ask(second_choices, prompt, PLAIN, sampling)[0]
        drafted, steps = ask(second_choices, prompt, Speculation(Policy.parse("auto")), sampling)
        assert drafted.token_ids == plain.token_ids
        check_sums(drafted.metrics)
        compared += len(plain.token_ids)
        wide += sum(max(step.step.sent.by_depth(), default=0) > 1 for step in steps)
        rescued += sum(token.agreement == 0 and token.probability > 0 for step in steps for token in step.tokens)
    assert compared > 60
    assert wide > 10, "trees were sent"
    assert rescued > 0, "and some branches accepted"


def ask(
    loaded: LoadedSet, prompt: Sequence[int], speculation: Speculation, sampling: Sampling
) -> tuple[Finished, list[StepDone]]:
    session = Session(loaded)
    try:
        events = list(session.generate(prompt, generation(speculation, sampling, 48), never()))
    finally:
        session.close()
    return answer(iter(events)), [event for event in events if isinstance(event, StepDone)]
