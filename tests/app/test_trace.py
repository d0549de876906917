"""Steps with token trees, as they are taken away and as the page shows them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from app import inside_view
from app.conversations import AnswerToken, Turn
from app.token_view import token_view
from app.trace import traced
from engine.types import (
    Branch,
    Draft,
    EmittedToken,
    Metrics,
    Provenance,
    SpeculationState,
    StepDone,
    StepRecord,
    StepTimes,
    Timings,
    TokenTree,
    VotedDraft,
)

VOTED = VotedDraft((1, 2, 3, 4), (0.9,) * 4, (1.0, 0.6, 0.6, 0.6), (("a", "b"), ("a",), ("a",), ("a",)), "a")
BRANCHES = (Branch(1, (12, 13), (0.4, 0.3), "b"), Branch(0, (11,), (0.2,), "a", is_second=True))


def text_of(tokens: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def step(emitted: Sequence[EmittedToken], tree: TokenTree) -> StepDone:
    accepted = sum(token.provenance is Provenance.ACCEPTED for token in emitted)
    record = StepRecord(
        proposed=7,
        drafted=7,
        accepted=accepted,
        emitted=len(emitted),
        context_tokens=50,
        planned_length=4,
        proposals={"a": 4, "b": 3},
        look_ahead="",
        unused_look_ahead=0,
        times=StepTimes(),
        reason="it pays",
        drafts=(Draft("a", VOTED.tokens, VOTED.probabilities), Draft("b", (1, 12, 13), (0.5, 0.4, 0.3))),
        voted=VOTED,
        sent=tree,
    )
    return StepDone(tuple(emitted), "", record, Metrics(), Timings(), SpeculationState(True, "on"))


def accepted(token: int, proposer: str, agreement: float) -> EmittedToken:
    return EmittedToken(token, Provenance.ACCEPTED, (proposer,), agreement, 0.5)


def states(html: str, row: str) -> list[str]:
    """What became of each token in a row of the trace."""
    match = re.search(rf"<th scope=.row.>{row}.*?</th><td>(.*?)</td>", html)
    assert match is not None, html
    return re.findall(r'data-o="(\w*)"', match[1])


def test_an_accepted_side_branch_leaves_the_vote_where_it_forked() -> None:
    emitted = [accepted(1, "a", 1.0), accepted(12, "b", 0.0), EmittedToken(9, Provenance.CORRECTED)]
    seen = traced(step(emitted, TokenTree(VOTED.trimmed(3), BRANCHES)), text_of)
    assert (seen.sent, seen.sent_of_voted) == (6, 3)
    assert (seen.accepted, seen.accepted_of_voted) == (2, 1)
    assert [(branch.fork, branch.drafter, branch.accepted) for branch in seen.branches] == [(1, "b", 1), (0, "a", 0)]
    html = inside_view.trace([seen])
    assert "2 of 6 accepted" in html
    assert states(html, "voted") == ["accepted", "rejected", "rejected", "trimmed"]
    assert states(html, "b<br><small>side branch after 1 voted, lost the vote") == ["accepted", "rejected"]
    assert states(html, "a<br><small>side branch from the start, second choice") == ["rejected"]


def test_an_accepted_trunk_leaves_its_branches_rejected() -> None:
    emitted = [accepted(1, "a", 1.0), accepted(2, "a", 0.6), EmittedToken(9, Provenance.CORRECTED)]
    seen = traced(step(emitted, TokenTree(VOTED, BRANCHES)), text_of)
    assert (seen.accepted, seen.accepted_of_voted) == (2, 2)
    assert [branch.accepted for branch in seen.branches] == [0, 0]
    assert states(inside_view.trace([seen]), "voted") == ["accepted", "accepted", "rejected", "rejected"]


def test_a_branch_that_is_taken_at_the_start_leaves_no_voted_token_accepted() -> None:
    emitted = [accepted(11, "a", 0.0), EmittedToken(9, Provenance.BONUS)]
    seen = traced(step(emitted, TokenTree(VOTED, BRANCHES)), text_of)
    assert seen.accepted_of_voted == 0
    assert [branch.accepted for branch in seen.branches] == [0, 1]


def test_a_token_of_a_side_branch_has_a_proposer_and_no_agreement() -> None:
    tokens = (
        AnswerToken(1, "one", Provenance.ACCEPTED, ("a", "b"), 0.75, 0.9),
        AnswerToken(12, "twelve", Provenance.ACCEPTED, ("b",), 0.0, 0.4),
    )
    html = token_view([Turn("Count.", "onetwelve", tokens=tokens)], None)
    voted, side = re.findall(r'title="([^"]*)">(?:one|twelve)', html)
    assert "proposed by a, b\nagreement 75 %" in voted
    assert "proposed by b\non a side branch" in side
    assert "agreement" not in side
