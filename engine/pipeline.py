"""One step of speculative decoding: plan, draft, vote, trim, verify, commit, learn.

The pipeline changes the committed tokens, the target's sequence and the drafters together: after a step, and after a
step that raised, the target's cache holds all committed tokens but the last, which is *pending* and enters with the
next pass.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass

from engine.branches import side_branches
from engine.config import MAX_DRAFT_TOKENS, Speculation
from engine.drafters.base import Score
from engine.drafting import Ballot, LookAheadRun, Panel, make_drafting, make_drawing
from engine.learning import Learning
from engine.length import LONGEST_DRAFT
from engine.metrics import Ledger, Pace
from engine.plan import CATCH_UP_SLICE_TOKENS, Plan, Situation
from engine.runtime.context import Context
from engine.runtime.sampler import Sampler
from engine.types import (
    Branch,
    Draft,
    EmittedToken,
    Provenance,
    StepRecord,
    StepTimes,
    TokenTree,
    Verdict,
)
from engine.verify.sampled import Drawn, tree_of
from engine.verify.tree import Candidate, Verification, verify
from engine.vote import vote

MOST_BRANCHES = 6
"""Side branches in one pass: each takes a sequence of the target's context."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step committed."""

    tokens: tuple[EmittedToken, ...]
    record: StepRecord
    ended: bool
    """The target chose an end-of-generation token, which is not among the tokens."""


@dataclass(frozen=True, slots=True)
class LookAheadOutcome:
    """What became of the drafts made while the target verified."""

    kind: str = ""
    """`hit`, `miss`, or empty without look-ahead."""
    proposed: int = 0
    drafted: int = 0
    unused: int = 0


def emission(sent: TokenTree, verdict: Verdict, end_tokens: Container[int]) -> tuple[tuple[EmittedToken, ...], bool]:
    """What a verdict adds to the answer, up to an end token; and whether there was one."""
    chosen = verdict.chosen(sent.trunk.tokens)
    end = next((index for index, token in enumerate(chosen) if token in end_tokens), None)
    return tuple(_origin(index, token, sent, verdict) for index, token in enumerate(chosen[:end])), end is not None


def _origin(index: int, token: int, sent: TokenTree, verdict: Verdict) -> EmittedToken:
    trunk, branch = sent.trunk, verdict.branch
    if index < verdict.on_trunk:
        return EmittedToken(
            token, Provenance.ACCEPTED, trunk.proposers[index], trunk.agreement[index], trunk.probabilities[index]
        )
    if branch is not None and index < verdict.accepted:
        probability = branch.probabilities[index - branch.fork]
        return EmittedToken(token, Provenance.ACCEPTED, (branch.source,), 0.0, probability)
    if not len(sent):
        return EmittedToken(token, Provenance.PLAIN)
    end = len(trunk) if branch is None else branch.fork + len(branch)
    return EmittedToken(token, Provenance.BONUS if verdict.accepted == end else Provenance.CORRECTED)


class Pipeline:
    """Runs the steps of one answer. All methods are called by the thread that owns the target's context."""

    def __init__(
        self,
        context: Context,
        sequence: int,
        tokens: list[int],
        sampler: Sampler,
        panel: Panel,
        learning: Learning,
        ledger: Ledger,
        speculation: Speculation,
    ) -> None:
        """Args:
        tokens: The committed tokens, prompt included; grown in place.
        """
        self._context = context
        self._sequence = sequence
        self._tokens = tokens
        self._sampler = sampler
        self._panel = panel
        self._learning = learning
        self._ledger = ledger
        self._rule = learning.rule(speculation.policy)
        self._planner = learning.planner(speculation)
        self._weights = learning.weights(speculation.weights)
        self._drafting = make_drafting(speculation.vote, panel, learning.cost)
        self._drawing = make_drawing(speculation.acceptance, panel, learning.cost, sampler)
        self._end_tokens = context.model.vocabulary.end_tokens
        self._can_roll_back = context.model.can_roll_back
        self._setting = learning.setting
        self._may_branch = learning.may_branch(speculation)
        learning.acceptance.begin_text()
        self._emitted = 0
        self.pace = Pace()
        """Tokens per millisecond of this answer's last steps."""
        self.active: frozenset[str] = frozenset()
        """Drafters that took part in the last step."""

    def step(self, remaining_tokens: int | None, cancel: threading.Event) -> StepResult | None:
        """Commit at least one token, or the end of the answer.

        Args:
            remaining_tokens: Tokens the answer may still have; None for no limit.
            cancel: When set before the target's pass, the step does nothing.

        Returns:
            None when cancelled.

        Raises:
            DecodeError: the target's pass failed; nothing was committed.
        """
        clock = self._learning.cost.clock
        started = clock()
        room = self._room(remaining_tokens)
        hint = self._panel.hint(min(self._rule.limit(), room), cancel)
        plan = self._plan(hint, room, remaining_tokens)
        planned = clock()
        if len(plan.drafters) < 2 and not plan.look_ahead:
            self._panel.end_threads()
        self._panel.catch_up(plan.catch_up, CATCH_UP_SLICE_TOKENS, self._learning.cost, cancel)
        caught_up = clock()
        ballot = self._draft(plan, hint, cancel)
        if cancel.is_set():
            return None
        drafted = clock()
        branches = self._branches(ballot, room)
        sent = self._cut(ballot, branches, room, plan)
        ahead = self._start_look_ahead(plan, sent) if self._drawing is None else None
        trimmed = clock()
        verification = self._verify(sent, ahead, ballot.drawn)
        verified = clock()
        look_ahead = self._judge_look_ahead(ahead, sent, verification.verdicts[0])
        judged = clock()
        emitted, ended = self._commit(sent, verification.verdicts[0])
        step_ms = (clock() - started - (caught_up - planned)) * 1e3
        scores = self._learn(plan, ballot, branches, sent, emitted, verification, step_ms, overlapped=ahead is not None)
        times = StepTimes(
            plan_ms=(planned - started) * 1e3,
            draft_ms=(caught_up - planned + judged - verified) * 1e3 + ballot.draft_ms,
            vote_ms=ballot.vote_ms,
            verify_ms=verification.verify_ms,
            sample_ms=verification.sample_ms,
            other_ms=(trimmed - drafted + clock() - judged) * 1e3,
        )
        record = self._record(plan, ballot, sent, emitted, look_ahead, times)
        self._ledger.record(record, emitted, ballot.voted.proposers, scores)
        return StepResult(emitted, record, ended)

    def _room(self, remaining_tokens: int | None) -> int:
        """Most draft tokens that neither overrun the answer's limit nor the context."""
        if not self._can_roll_back:
            return 0
        room = self._context.context_tokens - len(self._tokens) - 1
        if self._context.parked_tokens > room - MAX_DRAFT_TOKENS:
            self._context.tidy(self._sequence)
        room = max(0, room if remaining_tokens is None else min(room, remaining_tokens - 1))
        return self._setting.fitting(room + 1) - 1

    def _plan(self, hint: Sequence[Draft], room: int, remaining_tokens: int | None) -> Plan:
        return self._planner.plan(
            Situation(
                context_tokens=len(self._tokens),
                room_tokens=room,
                emitted_tokens=self._emitted,
                remaining_tokens=remaining_tokens,
                hint=vote(hint, self._weights.current),
                behind_tokens={drafter.name: drafter.behind_tokens for drafter in self._panel.models},
            )
        )

    def _draft(self, plan: Plan, hint: Sequence[Draft], cancel: threading.Event) -> Ballot:
        def keep(name: str):  # type: ignore[no-untyped-def]
            return self._rule.keep_drafting(name, plan.drafters, len(self._tokens), plan.pace)

        if self._drawing is not None and plan.drafters and plan.length:
            return self._drawing.draft(plan.drafters, plan.length, keep, cancel)
        ballot = self._drafting.draft(plan.drafters, plan.length, hint, self._weights.current, keep, cancel)
        return ballot.led_by(self._rule.prefer(ballot.voted, ballot.losers, len(self._tokens), plan.pace))

    def _branches(self, ballot: Ballot, room: int) -> tuple[Branch, ...]:
        """Side branches that the drafts offer, to send or to learn from, where trees are allowed."""
        if ballot.drawn is not None or not self._may_branch or not self._has_cells_for_branches():
            return ()
        return tuple(
            branch.trimmed(room - branch.fork)
            for branch in side_branches(ballot.voted, ballot.drafts)
            if branch.fork < room
        )

    def _has_cells_for_branches(self) -> bool:
        """Whether a followed branch may leave a gap in the cache."""
        free_cells = self._context.context_tokens - len(self._tokens) - self._context.parked_tokens
        return free_cells >= 2 * MAX_DRAFT_TOKENS

    def _cut(self, ballot: Ballot, branches: Sequence[Branch], room: int, plan: Plan) -> TokenTree:
        if ballot.drawn is not None:
            # Cut by what its tokens are it would not be drawn any more.
            may_branch = self._setting.pass_sizes is None and self._has_cells_for_branches()
            return tree_of(ballot.drawn.drafts, min(MOST_BRANCHES, self._context.spare_sequences) * may_branch)
        voted = ballot.voted.trimmed(min(room, self._sampler.allowed_length(ballot.voted.tokens)))
        branches = [branch for branch in branches if branch.fork < len(voted)]
        most = min(MOST_BRANCHES, self._context.spare_sequences) if branches and plan.branches else 0
        tree = self._rule.cut(voted, branches, most, len(self._tokens), plan.pace)
        fitting = self._setting.fitting(len(tree) + 1) - 1
        return tree if fitting == len(tree) else TokenTree(tree.trunk.trimmed(fitting))

    def _start_look_ahead(self, plan: Plan, sent: TokenTree) -> LookAheadRun | None:
        if not plan.look_ahead or not sent.trunk.tokens:
            return None
        return self._panel.start_look_ahead(plan.drafters, sent.trunk.tokens, LONGEST_DRAFT + 1, self._learning.cost)

    def _verify(self, sent: TokenTree, ahead: LookAheadRun | None, drawn: Drawn | None) -> Verification:
        try:
            candidate = Candidate(
                self._sequence, self._tokens[-1], sent.trunk.tokens, self._sampler, sent.branches, drawn
            )
            return verify(self._context, [candidate], self._learning.cost.clock)
        except BaseException:
            if ahead is not None:
                # Whatever comes next must not meet a drafter at work.
                self._panel.finish_look_ahead(ahead)
            raise
        finally:
            if ahead is not None:
                ahead.stop.set()

    def _judge_look_ahead(self, ahead: LookAheadRun | None, sent: TokenTree, verdict: Verdict) -> LookAheadOutcome:
        """Whether the drafters guessed what the target said; they keep or drop their branches when they next draft."""
        if ahead is None:
            return LookAheadOutcome()
        drafts = self._panel.finish_look_ahead(ahead)
        guessed = vote(drafts, self._weights.current)
        if (
            verdict.path(sent.trunk.tokens) == sent.trunk.tokens
            and guessed.tokens
            and guessed.tokens[0] == verdict.final
        ):
            # What lies beyond the guess is counted when the next step drafts it.
            return LookAheadOutcome("hit", proposed=sum(1 for draft in drafts if draft.tokens))
        return LookAheadOutcome("miss", sum(map(len, drafts)), len(guessed), len(guessed))

    def _commit(self, sent: TokenTree, verdict: Verdict) -> tuple[tuple[EmittedToken, ...], bool]:
        """Append what the target chose, up to an end token; every cache follows."""
        emitted, ended = emission(sent, verdict, self._end_tokens)
        self._tokens.extend(token.id for token in emitted)
        if ended:
            # The end token itself belongs to the template's text, which a next turn brings along.
            self._context.truncate(self._sequence, min(self._context.length(self._sequence), len(self._tokens)))
        self._panel.accept([token.id for token in emitted])
        self._emitted += len(emitted)
        return emitted, ended

    def _learn(
        self,
        plan: Plan,
        ballot: Ballot,
        branches: Sequence[Branch],
        sent: TokenTree,
        emitted: Sequence[EmittedToken],
        verification: Verification,
        step_ms: float,
        *,
        overlapped: bool,
    ) -> dict[str, Score]:
        verdict = verification.verdicts[0]
        cost = self._learning.cost
        if not overlapped:
            cost.observe_verify(len(sent) + 1, len(self._tokens) - len(emitted), verification.verify_ms)
            cost.observe_overhead(max(0.0, step_ms - verification.verify_ms - ballot.draft_ms))
        acceptance = self._learning.acceptance
        trunk_tokens, on_trunk = len(sent.trunk), verdict.on_trunk
        chosen = verdict.chosen(sent.trunk.tokens)
        acceptance.learn_all(plan.drafters, (ballot.voted, *ballot.losers), chosen)
        if on_trunk < trunk_tokens:
            acceptance.learn_rescue(branches, on_trunk, chosen[on_trunk])
        scores = self._panel.take_scores()
        acceptance.hear(scores)
        self._weights.learn(ballot.voted, trunk_tokens, on_trunk, scores)
        self._rule.learn(len(sent), verdict.accepted, step_ms)
        self._planner.learn(plan, verdict.accepted + 1, step_ms)
        self.pace.learn(verdict.accepted + 1, step_ms)
        self.active = frozenset(ballot.proposals)
        return scores

    def _record(
        self,
        plan: Plan,
        ballot: Ballot,
        sent: TokenTree,
        emitted: Sequence[EmittedToken],
        look_ahead: LookAheadOutcome,
        times: StepTimes,
    ) -> StepRecord:
        second_choices = sum(branch.is_second for branch in sent.branches)
        return StepRecord(
            proposed=sum(ballot.proposals.values()) + second_choices + look_ahead.proposed,
            drafted=len(ballot.voted) + len(sent) - len(sent.trunk) + look_ahead.drafted,
            accepted=sum(token.provenance is Provenance.ACCEPTED for token in emitted),
            emitted=len(emitted),
            context_tokens=len(self._tokens),
            planned_length=plan.length,
            proposals=ballot.proposals,
            look_ahead=look_ahead.kind,
            unused_look_ahead=look_ahead.unused,
            times=times,
            reason=plan.reason,
            drafts=tuple(draft for draft in ballot.drafts if draft.tokens),
            voted=ballot.voted,
            sent=sent,
        )
