"""Which draft models draft for a batch of requests: those that brought the most tokens for their time, or none.

As `engine.plan` does for one conversation, it keeps what rounds with each choice brought and took, apart for batches of
different sizes, believes in what was not tried only as far as a trial goes, and spends a fixed share of its time on
trials. Free drafters always draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.acceptance import AcceptanceModel
from engine.cost import CostModel, Mean
from engine.length import LONGEST_DRAFT
from engine.plan import (
    ARM_PRIOR_STEPS,
    EXPECTED_ANSWER_TOKENS,
    FIRST_CREDIT_MS,
    LEAST_LOSS_MS,
    MOST_CREDIT_MS,
    PROBE_SHARE,
    SWITCH_MARGIN,
    Arm,
)

Drafters = tuple[str, ...]
SINGLE_SIZES = 4
"""Batches of up to so many requests are told apart by their number; larger ones by its power of two."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What one round drafts with."""

    drafters: Drafters
    reason: str
    size_class: int
    pace: float
    """What a millisecond is worth, in tokens of all requests."""


class PoolPlanner:
    """Chooses draft models for batches by measured value. Serves one pool."""

    def __init__(self, names: Sequence[str], cost: CostModel, acceptance: AcceptanceModel) -> None:
        """Args:
        names: Draft models that can draft for several requests.
        """
        self._cost = cost
        self._acceptance = acceptance
        self._choices: list[Drafters] = [(), *((name,) for name in names)]
        if len(names) > 1:
            self._choices.append(tuple(names))
        self._arms: dict[tuple[Drafters, int], Arm] = {}
        self._chosen: dict[int, Drafters] = {}
        self._passes: dict[tuple[Drafters, int], Mean] = {}
        """Time of a drafting pass, by drafters and size class."""
        self._overhead = Mean(0.3)
        """Time of a round, for each request, that is neither drafting nor the target's pass."""
        self._credit_ms = FIRST_CREDIT_MS
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
        arms = {choice: self._arm(choice, requests, context_tokens) for choice in self._choices if is_ready(choice)}
        usual = self._chosen.get(size, ())
        known = [choice for choice, arm in arms.items() if arm.last_tried or choice == ()]
        best = max(known, key=lambda choice: arms[choice].tokens_per_ms)
        if usual in arms and arms[best].tokens_per_ms < SWITCH_MARGIN * arms[usual].tokens_per_ms:
            best = usual
        self._chosen[size] = best
        pace = arms[best].tokens_per_ms
        trial = self._trial(arms, best)
        if trial is not None:
            return PoolPlan(trial, f"on trial: {', '.join(trial) or 'text look-up drafts alone'}", size, pace)
        return PoolPlan(best, _reason(best, len(self._choices)), size, pace)

    def _trial(self, arms: Mapping[Drafters, Arm], best: Drafters) -> Drafters | None:
        others = [choice for choice in arms if choice != best]
        if not others:
            return None
        choice = min(others, key=lambda other: (arms[other].last_tried, -arms[other].tokens_per_ms))
        loss_ms = arms[choice].loss_ms(arms[best])
        if loss_ms > self._credit_ms:
            return None
        self._credit_ms -= loss_ms
        return choice

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
        plain = self._arm((), requests, context_tokens).tokens_per_ms
        worth = []
        for name, reading_ms in reads.items():
            arm = self._arm((name,), requests, context_tokens)
            saved_ms = remaining_tokens * (1 / plain - 1 / arm.tokens_per_ms)
            if saved_ms > reading_ms:
                worth.append((saved_ms - reading_ms, name))
            elif reading_ms + max(LEAST_LOSS_MS, -saved_ms / max(1, remaining_tokens)) <= self._credit_ms:
                # Otherwise one that was dear once would never be heard again.
                self._credit_ms -= reading_ms
                worth.append((0.0, name))
        return tuple(name for _, name in sorted(worth, reverse=True))

    def learn(self, plan: PoolPlan, tokens: int, elapsed_ms: float) -> None:
        """Hear what a round emitted and took, without reading."""
        self._credit_ms = min(self._credit_ms + PROBE_SHARE * elapsed_ms, MOST_CREDIT_MS)
        arm = self._arms.get((plan.drafters, plan.size_class))
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

    def _arm(self, choice: Drafters, requests: int, context_tokens: int) -> Arm:
        key = (choice, _size_class(requests))
        arm = self._arms.get(key)
        if arm is None:
            tokens, elapsed_ms = self._foresee(choice, requests, context_tokens)
            arm = self._arms[key] = Arm(ARM_PRIOR_STEPS, ARM_PRIOR_STEPS * tokens, ARM_PRIOR_STEPS * elapsed_ms)
        return arm

    def _foresee(self, choice: Drafters, requests: int, context_tokens: int) -> tuple[float, float]:
        """Tokens and time of a round nobody has tried yet, from cost curves and mean acceptance."""
        pass_ms = self.draft_pass_ms(choice, requests)
        mean = self._acceptance.mean(choice) if choice else 0.0
        best = (0.0, 1.0)
        gained, survival = 0.0, 1.0
        for length in range(1, LONGEST_DRAFT + 1) if choice else (0,):
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


def _reason(drafters: Drafters, choices: int) -> str:
    if drafters:
        return f"most tokens per second: {', '.join(drafters)}"
    if choices == 1:
        return "only text look-up drafts: no draft model is loaded"
    return "only text look-up drafts: draft models cost more than they save for so many requests"
