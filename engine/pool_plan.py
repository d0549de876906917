"""Which draft models draft for a batch of requests: those that brought the most tokens for their time, or none.

As `engine.plan` does for one conversation, it keeps what rounds with each choice brought and took, apart for batches of
different sizes, believes in what was not tried only as far as a trial goes, and spends a fixed share of its time on
trials. Free drafters always draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.acceptance import AcceptanceModel
from engine.config import LookAhead
from engine.cost import CostModel, Mean
from engine.length import LONGEST_DRAFT
from engine.plan import (
    EXPECTED_ANSWER_TOKENS,
    LEAST_LOSS_MS,
    Arm,
    best_or_usual,
    next_on_trial,
    trial_budget,
)

Drafters = tuple[str, ...]
OVERLAP_FACTOR = 1.5
"""What drafting beside the target's passes is believed to cost where they share their cores, until it was tried."""
HIDDEN_SHARE = 0.3
"""What of it is believed to be left where they do not."""
ARM_PRIOR_STEPS = 2.0
"""What a way is foreseen to bring counts as so many rounds with it."""
SINGLE_SIZES = 4
"""Batches of up to so many requests are told apart by their number; larger ones by its power of two."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft."""

    drafters: Drafters = ()
    overlaps: bool = False
    """Whether they draft for some requests while the target verifies others."""

    def __str__(self) -> str:
        names = ", ".join(self.drafters) or "text look-up drafts alone"
        return f"{names}, beside the target's passes" if self.overlaps else names


NO_MODEL = Way()


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What one round drafts with."""

    way: Way
    reason: str
    size_class: int
    pace: float
    """What a millisecond is worth, in tokens of all requests."""
    charged_ms: float | None = None
    """What a trial was believed to cost; None for what is no trial."""


class PoolPlanner:
    """Chooses draft models for batches by measured value. Serves one pool."""

    def __init__(
        self,
        names: Sequence[str],
        cost: CostModel,
        acceptance: AcceptanceModel,
        overlap: LookAhead,
        *,
        runs_apart: bool,
    ) -> None:
        """Args:
        names: Draft models that can draft for several requests.
        overlap: Whether drafting beside the target's passes is a choice, the only one, or none.
        runs_apart: Whether drafters have a processor of their own.
        """
        self._cost = cost
        self._acceptance = acceptance
        self._runs_apart = runs_apart
        sets: list[Drafters] = [(name,) for name in names]
        if len(names) > 1:
            sets.append(tuple(names))
        self._ways = [NO_MODEL, *(Way(own, overlap is LookAhead.ON) for own in sets)]
        if overlap is LookAhead.AUTO:
            # On shared cores it seldom pays; one drafter is enough to find out whether it does.
            self._ways += [Way(own, overlaps=True) for own in (sets if runs_apart else sets[:1])]
        self._arms: dict[tuple[Way, int], Arm] = {}
        self._chosen: dict[int, Way] = {}
        self._passes: dict[tuple[Drafters, int], Mean] = {}
        """Time of a drafting pass, by drafters and size class."""
        self._overhead = Mean(0.3)
        """Time of a round, for each request, that is neither drafting nor the target's pass."""
        self._trials = trial_budget()
        self._rounds = 0

    def plan(self, requests: int, context_tokens: int, is_ready: Callable[[Drafters], bool]) -> PoolPlan:
        """Decide a round.

        Args:
            requests: Answers in it for which the choice is free.
            context_tokens: Of the mean request.
            is_ready: Whether drafters have read what they would draft for.
        """
        self._rounds += 1
        size = _size_class(requests)
        # Of a single request, no other is verified meanwhile.
        ways = [way for way in self._ways if is_ready(way.drafters) and not (way.overlaps and requests < 2)]
        arms = {way: self._arm(way, requests, context_tokens) for way in ways}
        usual = self._chosen.get(size, NO_MODEL)
        known = [way for way, arm in arms.items() if arm.last_tried or way == NO_MODEL]
        best = best_or_usual(arms, known, usual)
        self._chosen[size] = best
        pace = arms[best].tokens_per_ms
        trial = self._trial(arms, best)
        if trial is not None:
            charged_ms = arms[trial].loss_ms(arms[best])
            self._trials.charge(charged_ms)
            return PoolPlan(trial, f"on trial: {trial}", size, pace, charged_ms)
        return PoolPlan(best, _reason(best, len(self._ways)), size, pace)

    def _trial(self, arms: Mapping[Way, Arm], best: Way) -> Way | None:
        """Another way whose turn it is to be tried, when the saved-up time allows."""
        others = [way for way in arms if way != best]
        if not others:
            return None
        way = next_on_trial(arms, others)
        return way if self._trials.allows(arms[way].loss_ms(arms[best])) else None

    def worth_reading(
        self, requests: int, context_tokens: int, remaining_tokens: int | None, reads: Mapping[str, float]
    ) -> Drafters:
        """Draft models whose reading of one request is likely to be repaid by the rest of its answer.

        Args:
            requests: Answers that go on at the same time.
            context_tokens: Of the mean request.
            remaining_tokens: Of the request's answer; None without a limit.
            reads: Milliseconds that each would take to read it.
        """
        if remaining_tokens is None:
            remaining_tokens = EXPECTED_ANSWER_TOKENS
        plain = self._arm(NO_MODEL, requests, context_tokens).tokens_per_ms
        worth = []
        for name, reading_ms in reads.items():
            own = [way for way in self._ways if way.drafters == (name,)]
            arm = max((self._arm(way, requests, context_tokens) for way in own), key=lambda arm: arm.tokens_per_ms)
            saved_ms = remaining_tokens * (1 / plain - 1 / arm.tokens_per_ms)
            if saved_ms > reading_ms:
                worth.append((saved_ms - reading_ms, name))
            elif self._trials.allows(reading_ms + max(LEAST_LOSS_MS, -saved_ms / max(1, remaining_tokens))):
                # Otherwise one that was dear once would never be heard again.
                self._trials.charge(reading_ms)
                worth.append((0.0, name))
        return tuple(name for _, name in sorted(worth, reverse=True))

    def learn(self, plan: PoolPlan, tokens: int, elapsed_ms: float) -> None:
        """Hear what a round emitted and took, without reading."""
        self._trials.earn(elapsed_ms)
        if plan.charged_ms is not None:
            self._trials.settle(plan.charged_ms, elapsed_ms - tokens / plan.pace)
        arm = self._arms.get((plan.way, plan.size_class))
        if arm is not None and elapsed_ms > 0:
            arm.learn(tokens, elapsed_ms, self._rounds)

    def observe_draft(self, drafters: Drafters, requests: int, passes: int, elapsed_ms: float) -> None:
        """Learn what a drafting pass takes."""
        if passes:
            pass_ms = elapsed_ms / passes
            self._passes.setdefault((drafters, _size_class(requests)), Mean(pass_ms)).learn(pass_ms)

    def observe_overhead(self, requests: int, elapsed_ms: float) -> None:
        """Learn what a round takes besides its passes."""
        self._overhead.learn(elapsed_ms / requests)

    def overhead_ms(self, requests: int) -> float:
        """Expected time of a round that is neither drafting nor the target's pass."""
        return requests * self._overhead.value

    def draft_pass_ms(self, drafters: Drafters, requests: int) -> float:
        """Expected time of a pass in which draft models draft a token for each request."""
        if not drafters:
            return 0.0
        known = self._passes.get((drafters, _size_class(requests)))
        if known is not None:
            return known.value
        # As much dearer than for one request as the target's own pass is.
        return self._cost.draft_ms(drafters) * self._cost.verify_ms(requests, 0) / self._cost.verify_ms(1, 0)

    def _arm(self, way: Way, requests: int, context_tokens: int) -> Arm:
        key = (way, _size_class(requests))
        arm = self._arms.get(key)
        if arm is None:
            tokens, elapsed_ms = self._foresee(way, requests, context_tokens)
            arm = self._arms[key] = Arm(ARM_PRIOR_STEPS, ARM_PRIOR_STEPS * tokens, ARM_PRIOR_STEPS * elapsed_ms)
        return arm

    def _foresee(self, way: Way, requests: int, context_tokens: int) -> tuple[float, float]:
        """Tokens and time of a round nobody has tried yet, from cost curves and mean acceptance."""
        if way.overlaps:
            requests = max(1, requests // 2)
        pass_ms = self.draft_pass_ms(way.drafters, requests)
        if way.overlaps:
            pass_ms *= HIDDEN_SHARE if self._runs_apart else OVERLAP_FACTOR
        mean = self._acceptance.mean(way.drafters) if way.drafters else 0.0
        best = (0.0, 1.0)
        gained, survival = 0.0, 1.0
        for length in range(1, LONGEST_DRAFT + 1) if way.drafters else (0,):
            if length:
                survival *= mean
                gained += survival
            rows = requests * (1 + length)
            elapsed_ms = self._cost.verify_ms(rows, context_tokens, requests) + self.overhead_ms(requests)
            elapsed_ms += (length + 1) * pass_ms if length else 0.0
            tokens = requests * (1 + gained)
            if tokens / elapsed_ms > best[0] / best[1]:
                best = (tokens, elapsed_ms)
        return best


def _size_class(requests: int) -> int:
    return requests if requests <= SINGLE_SIZES else SINGLE_SIZES + (requests - 1).bit_length()


def _reason(way: Way, ways: int) -> str:
    if way.drafters:
        return f"most tokens per second: {way}"
    if ways == 1:
        return "only text look-up drafts: no draft model is loaded"
    return "only text look-up drafts: draft models cost more than they save for so many requests"
