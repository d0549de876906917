"""The real pipeline on a scripted target and scripted drafters: every turn a step can take, and what it counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import LookAhead, VoteMode, WeightRule
from engine.drafters.base import Threads
from engine.errors import DecodeError
from engine.length import LONGEST_DRAFT, FixedLength
from engine.plan import CATCH_UP_SLICE_TOKENS, READY_BEHIND_TOKENS
from engine.types import EmittedToken, Provenance, TokenTree, VotedDraft
from tests.engine.scripted import END, PROMPT, Bench, ScriptedDrafter, ScriptedTarget, check_sums, knows, silent

ANSWER = (10, 11, 12, 13, 14, 15, 16, 17, END)
ALWAYS_WRONG = range(len(ANSWER))


def bench(*drafters: ScriptedDrafter, policy: str = "fixed:3", **options: object) -> Bench:
    return Bench(ScriptedTarget(ANSWER), drafters, policy, **options)  # type: ignore[arg-type]


def drafter(name: str, *mistakes: int) -> ScriptedDrafter:
    return ScriptedDrafter(name, knows(ANSWER, *mistakes))


def origins(tokens: tuple[EmittedToken, ...]) -> list[str]:
    return [token.provenance.value for token in tokens]


# One step


def test_a_mismatch_at_the_first_position_costs_nothing_but_the_draft() -> None:
    one = bench(drafter("a", 0))
    result = one.step()
    assert result is not None
    assert one.target.passes == [(3, 50, 11, 12)]
    assert result.tokens == (EmittedToken(10, Provenance.CORRECTED),)
    assert (result.record.verified, result.record.accepted) == (3, 0)


def test_a_draft_accepted_whole_brings_a_bonus() -> None:
    result = bench(drafter("a")).step()
    assert result is not None
    assert [token.id for token in result.tokens] == [10, 11, 12, 13]
    assert origins(result.tokens) == ["accepted", "accepted", "accepted", "bonus"]
    assert result.tokens[0].proposers == ("a",)
    assert result.tokens[0].probability == 0.9
    assert result.tokens[3] == EmittedToken(13, Provenance.BONUS)


def test_a_mismatch_in_the_middle_is_corrected_and_rolled_back() -> None:
    one = bench(drafter("a", 1))
    result = one.step()
    assert result is not None
    assert origins(result.tokens) == ["accepted", "corrected"]
    assert one.target.cells == [*PROMPT, 10]


def test_an_empty_draft_is_a_plain_step() -> None:
    one = bench(ScriptedDrafter("a", silent))
    result = one.step()
    assert result is not None
    assert result.tokens == (EmittedToken(10, Provenance.PLAIN),)
    assert one.target.passes == [(3,)]
    assert (one.metrics.plain_steps, one.metrics.verify_steps, one.metrics.acceptance_rate) == (1, 0, None)


def test_an_end_token_inside_a_draft_ends_the_answer_there() -> None:
    # After the end the drafter goes on; the target, asked beyond it, would even agree.
    target = ScriptedTarget((10, END, 12, 13))
    one = Bench(target, [ScriptedDrafter("a", knows((10, END, 12, 13)))])
    result = one.step()
    assert result is not None
    assert result.ended
    assert [token.id for token in result.tokens] == [10]
    assert target.cells == [*PROMPT, 10]
    check_sums(one.metrics)
    assert (one.metrics.emitted, one.metrics.accepted, one.metrics.verified) == (1, 1, 3)


def test_an_answer_that_ends_at_once_is_empty() -> None:
    for guess in (silent, knows((END,))):
        one = Bench(ScriptedTarget((END,)), [ScriptedDrafter("a", guess)])
        result = one.step()
        assert result is not None
        assert (result.ended, result.tokens, one.answer) == (True, (), ())
        assert one.target.cells == list(PROMPT)


def test_who_abstains_neither_votes_nor_is_counted() -> None:
    one = bench(ScriptedDrafter("a", silent), drafter("b", 1))
    result = one.step()
    assert result is not None
    assert result.record.proposals == {"b": 3}
    assert result.record.agreement == (1.0, 1.0, 1.0)
    assert one.pipeline.active == {"b"}


def test_a_tie_goes_to_who_was_named_first() -> None:
    for names in (("a", "b"), ("b", "a")):
        one = bench(*(drafter(name, 0 if name == "a" else 1) for name in names))
        result = one.step()
        assert result is not None
        assert result.record.winner == names[0]
        assert result.record.agreement[0] == 0.5


def test_what_is_trimmed_is_not_sent() -> None:
    class OneOnly(FixedLength):
        def cut(self, voted: VotedDraft, *_others: object) -> TokenTree:
            return TokenTree(voted.trimmed(1))

    one = bench(drafter("a"))
    one.pipeline._rule = OneOnly(3)
    result = one.step()
    assert result is not None
    assert one.target.passes == [(3, 10)]
    assert origins(result.tokens) == ["accepted", "bonus"]
    assert (one.metrics.drafted, one.metrics.verified, one.metrics.trimmed) == (3, 1, 2)


# Whole answers, counted by hand


def test_the_counters_of_an_answer_with_two_drafters() -> None:
    # Weights stay equal, so that ties go to "a".
    #   a: 10 11 52 | b: 10 51 12 → sent 10 11 52, two accepted, 12 corrected
    #   a: 13 54 15 | b: 13 14 15 → sent 13 54 15, one accepted, 14 corrected
    #   a: 15 16 17 | b: 15 16 17 → sent 15 16 17, all accepted, then the end
    one = bench(drafter("a", 2, 4), drafter("b", 1))
    results = one.run()
    assert one.target.passes == [(3, 10, 11, 52), (12, 13, 54, 15), (14, 15, 16, 17)]
    assert [result.record.emitted for result in results] == [3, 2, 3]
    metrics = one.metrics
    check_sums(metrics)
    assert (metrics.proposed, metrics.drafted, metrics.verified, metrics.trimmed) == (18, 9, 9, 0)
    assert (metrics.accepted, metrics.rejected, metrics.corrected, metrics.bonus, metrics.plain) == (6, 3, 2, 0, 0)
    assert (metrics.emitted, metrics.verify_steps, metrics.plain_steps) == (8, 3, 0)
    assert metrics.accepted_by_position == (3, 2, 1)
    assert metrics.verified_by_position == (3, 3, 3)
    assert metrics.lengths == {3: 3}
    assert metrics.acceptance_rate == 6 / 9
    assert metrics.mean_accepted_length == 3.0
    assert metrics.mean_agreement == pytest.approx(7 / 9)
    a, b = metrics.drafters
    assert (a.proposed, a.agreement, a.scored, a.hits) == (9, 1.0, 8, 8)
    assert b.proposed == 9
    assert b.agreement == pytest.approx(5 / 9)


def test_the_counters_of_an_answer_with_look_ahead() -> None:
    # Sent 10 11, ahead 12 13 14 55 16 17 end: the target says 12, a hit.
    # Sent 13 14, ahead 55 16 17 end: the target says 15, a miss of four tokens.
    # Sent 16 17, ahead end: a hit, and the end.
    one = bench(drafter("a", 5), policy="fixed:2", look_ahead=LookAhead.ON)
    results = one.run()
    assert [result.record.look_ahead for result in results] == ["hit", "miss", "hit"]
    metrics = one.metrics
    check_sums(metrics)
    assert (metrics.proposed, metrics.drafted, metrics.verified) == (12, 10, 6)
    assert (metrics.trimmed, metrics.unused_look_ahead) == (0, 4)
    assert (metrics.look_ahead_hits, metrics.look_ahead_misses) == (2, 1)
    assert (metrics.accepted, metrics.bonus, metrics.corrected, metrics.emitted) == (6, 2, 0, 8)


def test_look_ahead_after_a_rejected_draft_is_a_miss_even_if_its_guess_comes_true() -> None:
    one = bench(drafter("a", 1), policy="fixed:2", look_ahead=LookAhead.ON)
    result = one.step()
    assert result is not None
    # Ahead of 10 51 it guessed 12; the target corrected to 11.
    assert (result.record.look_ahead, result.record.unused_look_ahead) == ("miss", 7)


def test_no_look_ahead_where_nothing_is_sent() -> None:
    ahead = ScriptedDrafter("a", silent)
    result = bench(ahead, look_ahead=LookAhead.ON).step()
    assert result is not None
    assert (ahead.look_aheads, result.record.look_ahead) == (0, "")


def test_free_drafters_do_not_run_ahead() -> None:
    free = ScriptedDrafter("n", knows(ANSWER), is_free=True)
    result = bench(free, look_ahead=LookAhead.ON).step()
    assert result is not None
    assert (result.record.look_ahead, result.record.verified) == ("", 3)


mistakes = st.sets(st.integers(0, 8), max_size=6)


@given(
    st.lists(mistakes, min_size=1, max_size=3),
    st.sampled_from(["auto", "minions", "adaedl", "fixed:1", "fixed:3", "fixed:7", "off"]),
    st.sampled_from(LookAhead),
    st.sampled_from(VoteMode),
    st.sampled_from(WeightRule),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(4, 16),
)
def test_whatever_is_chosen_the_answer_is_the_targets_and_the_counters_add_up(
    mistakes_by_drafter: list[set[int]],
    policy: str,
    look_ahead: LookAhead,
    vote: VoteMode,
    weights: WeightRule,
    max_tokens: int | None,
    context_tokens: int,
) -> None:
    drafters = [
        ScriptedDrafter(name, knows(ANSWER, *places), is_free=name == "n")
        for name, places in zip("anb", mistakes_by_drafter, strict=False)
    ]
    target = ScriptedTarget(ANSWER, context_tokens)
    one = Bench(target, drafters, policy, look_ahead=look_ahead, vote=vote, weights=weights)
    wanted = min(len(ANSWER) - 1, max_tokens or 99, context_tokens - len(PROMPT))
    ended = False
    while not ended and len(one.answer) < min(max_tokens or 99, context_tokens - len(PROMPT)):
        result = one.step(None if max_tokens is None else max_tokens - len(one.answer))
        assert result is not None
        ended = result.ended
    assert one.answer == ANSWER[:wanted]
    assert len(one.tokens) <= context_tokens
    check_sums(one.metrics)
    assert one.metrics.emitted == wanted


# Limits


@pytest.mark.parametrize("max_tokens", range(1, 9))
@pytest.mark.parametrize("vote", list(VoteMode))
def test_the_limit_of_tokens_is_met_exactly(max_tokens: int, vote: VoteMode) -> None:
    one = bench(drafter("a"), policy="fixed:7", vote=vote)
    one.run(max_tokens)
    assert one.answer == ANSWER[:max_tokens]


def test_the_last_token_allowed_is_not_drafted_for() -> None:
    model, free = drafter("a"), ScriptedDrafter("n", knows(ANSWER), is_free=True)
    one = bench(model, free)
    result = one.step(remaining_tokens=1)
    assert result is not None
    assert (origins(result.tokens), model.drafts, free.drafts) == (["plain"], 0, 0)


@pytest.mark.parametrize("policy", ["off", "fixed:1", "fixed:7"])
def test_the_end_of_the_context_comes_after_the_same_token_whatever_the_draft(policy: str) -> None:
    target = ScriptedTarget(ANSWER, context_tokens=9)
    one = Bench(target, [drafter("a")], policy)
    while len(one.tokens) < target.context_tokens:
        one.step()
    assert one.answer == ANSWER[:6]


# Cancelling and failing


def test_cancelled_before_a_step_nothing_happens() -> None:
    one = bench(drafter("a"))
    one.cancel.set()
    assert one.step() is None
    assert (one.target.passes, one.answer) == ([], ())


def test_cancelled_while_drafting_nothing_is_sent_and_the_answer_can_go_on() -> None:
    for vote in VoteMode:
        asked = drafter("a")
        one = bench(asked, vote=vote, look_ahead=LookAhead.ON)
        asked.while_drafting = one.cancel.set
        assert one.step() is None
        assert (one.target.passes, one.answer, asked.look_aheads) == ([], (), 0)
        assert asked.drafts == 1
        asked.while_drafting = lambda: None
        one.cancel.clear()
        one.run()
        assert one.answer == ANSWER[:-1]


def test_cancelled_while_verifying_the_step_is_completed() -> None:
    one = bench(drafter("a"))
    one.target.while_decoding = one.cancel.set
    result = one.step()
    assert result is not None
    assert one.answer == (10, 11, 12, 13)
    assert one.step() is None


def test_who_runs_ahead_is_stopped_when_the_pass_is_over_and_hears_no_verdict_before() -> None:
    ahead = drafter("a")
    stopped: list[bool] = []
    ahead.pending_look_ahead = lambda stop: stopped.append(stop.wait(60))
    result = bench(ahead, look_ahead=LookAhead.ON).step()
    assert result is not None
    assert stopped == [True]
    assert result.record.look_ahead == "hit"


def test_a_pass_that_fails_commits_nothing_and_leaves_nobody_at_work() -> None:
    ahead = drafter("a")
    stopped: list[bool] = []
    ahead.pending_look_ahead = lambda stop: stopped.append(stop.wait(60))
    one = bench(ahead, look_ahead=LookAhead.ON)
    one.target.fails = True
    with pytest.raises(DecodeError):
        one.step()
    assert stopped == [True]
    assert not one.answer
    assert one.target.cells == list(PROMPT[:-1])
    one.target.fails = False
    one.run()
    assert one.answer == ANSWER[:-1]


@pytest.mark.parametrize("vote", list(VoteMode))
def test_a_drafter_that_fails_leaves_the_panel_with_a_note_and_is_not_asked_again(vote: VoteMode) -> None:
    bad, good = drafter("bad"), drafter("good")
    bad.fails_while = "drafting"
    one = bench(bad, good, vote=vote)
    one.run()
    assert one.answer == ANSWER[:-1]
    assert bad.drafts == 1
    notes = {report.name: report.note for report in one.metrics.drafters}
    assert notes == {"bad": "scripted", "good": ""}
    assert one.metrics.accepted == 6


def test_a_drafter_that_fails_while_it_runs_ahead_costs_no_token() -> None:
    bad = drafter("bad")
    bad.fails_while = "ahead"
    one = bench(bad, drafter("good"), look_ahead=LookAhead.ON)
    results = one.run()
    assert one.answer == ANSWER[:-1]
    assert bad.look_aheads == 1
    assert results[0].record.look_ahead == "hit"
    assert one.panel.failures == {"bad": "scripted"}


def test_when_the_only_drafter_fails_decoding_is_plain() -> None:
    for moment in ("drafting", "ahead"):
        bad = drafter("bad")
        bad.fails_while = moment
        one = bench(bad, look_ahead=LookAhead.ON)
        results = one.run()
        assert one.answer == ANSWER[:-1]
        assert results[-1].record.verified == 0
        check_sums(one.metrics)


# Catching up


def test_a_late_drafter_reads_in_slices_and_only_after_the_first_token() -> None:
    late = drafter("a")
    late.behind = CATCH_UP_SLICE_TOKENS + 100
    one = bench(late, policy="fixed:1")
    one.step()
    assert (late.read, late.drafts) == ([], 0)
    one.step()
    assert (late.read, late.drafts) == ([CATCH_UP_SLICE_TOKENS], 0)
    one.step()
    assert (late.read, late.drafts) == ([CATCH_UP_SLICE_TOKENS, 100], 0)
    one.step()
    assert late.drafts == 1
    assert late.behind <= READY_BEHIND_TOKENS


def test_a_drafter_that_fails_to_read_leaves_the_panel() -> None:
    bad = drafter("bad")
    bad.behind = 1000
    bad.fails_while = "reading"
    one = bench(bad)
    one.run()
    assert one.answer == ANSWER[:-1]
    assert one.panel.failures == {"bad": "scripted"}


# Lock-step


def test_in_lock_step_a_drafter_that_differed_once_goes_on_from_the_voted_token() -> None:
    # Apart, "b" would be lost after its first token; together its later tokens still agree.
    one = bench(drafter("a", 2), drafter("b", 0), drafter("c", 0, 1), vote=VoteMode.COLLECTIVE)
    one.panel.failures["c"] = "rested"
    result = one.step()
    assert result is not None
    assert result.record.agreement == (0.5, 1.0, 0.5)
    assert result.record.proposals == {"a": 3, "b": 3}
    assert one.target.passes == [(3, 10, 11, 52)]
    check_sums(one.metrics)


def test_in_lock_step_the_draft_ends_when_nobody_goes_on() -> None:
    one = bench(
        ScriptedDrafter("a", lambda tokens: (10,) if len(tokens) == len(PROMPT) else ()), vote=VoteMode.COLLECTIVE
    )
    result = one.step()
    assert result is not None
    assert one.target.passes == [(3, 10)]
    assert result.record.drafted == 1


def test_auto_never_drafts_longer_than_is_calibrated() -> None:
    answer = tuple(range(10, 120))
    one = Bench(ScriptedTarget(answer), [ScriptedDrafter("n", knows(answer), is_free=True)], "auto")
    while len(one.answer) < 60:
        one.step()
    assert max(map(len, one.target.passes)) <= LONGEST_DRAFT + 1


def test_two_look_ups_of_one_mind_do_not_silence_a_model_that_is_surer() -> None:
    answer = tuple(range(10, 200))
    wrong = [ScriptedDrafter(name, lambda _tokens: (999,) * 6, is_free=True, probability=0.5) for name in ("n", "s")]
    model = ScriptedDrafter("m", knows(answer), probability=0.98)
    one = Bench(ScriptedTarget(answer), [*wrong, model], "auto")
    while len(one.answer) < 120:
        one.step()
    assert one.metrics.accepted > 80


# Threads


def test_drafters_that_draft_at_the_same_time_share_the_threads() -> None:
    drafters = [drafter("a"), drafter("b", 1), drafter("c", 2)]
    for own in drafters:
        own.threads_given = 4
    one = bench(*drafters)
    cost = one.learning.cost
    cost.set_drafter("a", {1: 6.0, 2: 4.0, 4: 3.0})
    cost.set_drafter("b", {1: 3.0, 2: 4.0, 4: 9.0})
    a, b, c = drafters
    assert [one.panel.threads(a, sharers, cost).one_token for sharers in (1, 2, 3, 8)] == [4, 2, 1, 1]
    assert [one.panel.threads(b, sharers, cost) for sharers in (1, 2)] == [Threads(1, 4), Threads(1, 2)]
    assert one.panel.threads(c, 1, cost) == Threads(4, 4), "not yet measured"
    one.step()
    assert [own.threads_used for own in drafters] == [Threads(1, 1)] * 3
