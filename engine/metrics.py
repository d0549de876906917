"""Counts of one answer, and the state of speculation in words. Rates are derived where they are read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from engine.drafters.base import Score
from engine.types import DrafterReport, EmittedToken, Metrics, Provenance, SpeculationState, StepRecord

RECENT_STEPS_MEMORY = 0.9
ON_SHARE = 0.1
"""Speculation counts as on while at least this share of recent steps carried a draft."""
MEASURED_STEPS = 8
DEVIATIONS_OF_95_PERCENT = 1.96


class Pace:
    """Tokens per millisecond over the last steps, and how sure that is."""

    MEMORY = 0.95

    def __init__(self) -> None:
        self._tokens = 0.0
        self._time_ms = 0.0
        self._squares = (0.0, 0.0, 0.0)
        """Sums of tokens², tokens · time and time², by the squares of the steps' weights."""

    def learn(self, tokens: int, elapsed_ms: float) -> None:
        self._tokens = self._tokens * self.MEMORY + tokens
        self._time_ms = self._time_ms * self.MEMORY + elapsed_ms
        new = (tokens**2, tokens * elapsed_ms, elapsed_ms**2)
        both, mixed, times = (old * self.MEMORY**2 + own for old, own in zip(self._squares, new, strict=True))
        self._squares = (both, mixed, times)

    @property
    def tokens_per_ms(self) -> float | None:
        return self._tokens / self._time_ms if self._time_ms else None

    @property
    def uncertainty(self) -> float | None:
        """Half the width of the 95 % interval of `tokens_per_ms`, as a share of it: from how much the steps differ."""
        pace = self.tokens_per_ms
        if not pace:
            return None
        tokens, mixed, times = self._squares
        # What is left of each step when the common pace is taken off; below zero only by rounding.
        spread = max(0.0, tokens - 2 * pace * mixed + pace**2 * times)
        return DEVIATIONS_OF_95_PERCENT * math.sqrt(spread) / self._tokens


class Ledger:
    """Adds up step records; `metrics` is a snapshot at any time."""

    def __init__(self, prompt_tokens: int, reused_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._reused_tokens = reused_tokens
        self._counts: Counter[str] = Counter()
        self._provenance: Counter[Provenance] = Counter()
        self._lengths: Counter[int] = Counter()
        self._verified_by_position: list[int] = []
        self._accepted_by_position: list[int] = []
        self._agreement_sum = 0.0
        self._agreement_count = 0
        self._proposed_by: Counter[str] = Counter()
        self._joined_by: Counter[str] = Counter()
        self._voted_with: Counter[str] = Counter()
        self._scores: dict[str, Score] = {}
        self._recent_drafted = 0.0

    def record(
        self,
        step: StepRecord,
        tokens: Sequence[EmittedToken],
        proposers: Sequence[Sequence[str]],
        scores: Mapping[str, Score],
    ) -> None:
        """Add one step.

        Args:
            step: Its record.
            tokens: What it emitted.
            proposers: For each voted token, the drafters that proposed it.
            scores: How drafters' own guesses fared on newly committed tokens.
        """
        counts = self._counts
        counts["verify_steps" if step.verified else "plain_steps"] += 1
        counts["proposed"] += step.proposed
        counts["drafted"] += step.drafted
        counts["verified"] += step.verified
        counts["trimmed"] += step.drafted - step.verified - step.unused_look_ahead
        counts["unused_look_ahead"] += step.unused_look_ahead
        counts["look_ahead_hits"] += step.look_ahead == "hit"
        counts["look_ahead_misses"] += step.look_ahead == "miss"
        self._provenance.update(token.provenance for token in tokens)
        self._lengths[step.verified] += 1
        sent_by_position = step.sent.by_depth()
        missing = len(sent_by_position) - len(self._verified_by_position)
        if missing > 0:
            self._verified_by_position.extend([0] * missing)
            self._accepted_by_position.extend([0] * missing)
        for position, count in enumerate(sent_by_position):
            self._verified_by_position[position] += count
            self._accepted_by_position[position] += position < step.accepted
        self._agreement_sum += sum(step.agreement)
        self._agreement_count += len(step.agreement)
        self._proposed_by.update(step.proposals)
        for name, proposed in step.proposals.items():
            self._joined_by[name] += min(proposed, len(proposers))
        for names in proposers:
            self._voted_with.update(names)
        for name, score in scores.items():
            self._scores[name] = self._scores.get(name, Score()) + score
        self._recent_drafted = self._recent_drafted * RECENT_STEPS_MEMORY + (1 - RECENT_STEPS_MEMORY) * bool(
            step.verified
        )

    def metrics(
        self,
        weights: Mapping[str, float],
        draft_ms: Mapping[str, float],
        active: frozenset[str],
        notes: Mapping[str, str],
    ) -> Metrics:
        """A snapshot; the arguments are what others own about each drafter."""
        reports = tuple(
            DrafterReport(
                name=name,
                weight=weight,
                proposed=self._proposed_by[name],
                scored=self._scores.get(name, Score()).scored,
                hits=self._scores.get(name, Score()).hits,
                agreement=self._voted_with[name] / self._joined_by[name] if self._joined_by[name] else 0.0,
                cost_ms=draft_ms.get(name, 0.0),
                is_active=name in active,
                note=notes.get(name, ""),
            )
            for name, weight in weights.items()
        )
        counts = self._counts
        return Metrics(
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            verify_steps=counts["verify_steps"],
            plain_steps=counts["plain_steps"],
            proposed=counts["proposed"],
            drafted=counts["drafted"],
            verified=counts["verified"],
            accepted=self._provenance[Provenance.ACCEPTED],
            corrected=self._provenance[Provenance.CORRECTED],
            bonus=self._provenance[Provenance.BONUS],
            plain=self._provenance[Provenance.PLAIN],
            trimmed=counts["trimmed"],
            unused_look_ahead=counts["unused_look_ahead"],
            look_ahead_hits=counts["look_ahead_hits"],
            look_ahead_misses=counts["look_ahead_misses"],
            accepted_by_position=tuple(self._accepted_by_position),
            verified_by_position=tuple(self._verified_by_position),
            agreement_sum=self._agreement_sum,
            agreement_count=self._agreement_count,
            lengths=dict(sorted(self._lengths.items())),
            drafters=reports,
        )

    def state(self, why_off: str, speedup: float | None, uncertainty: float | None = None) -> SpeculationState:
        """Whether speculation is on, and why.

        Args:
            why_off: A standing reason that rules drafting out, or empty.
            speedup: Measured speed against plain decoding, where known.
            uncertainty: Half the width of its 95 % interval.
        """
        if why_off:
            return SpeculationState(False, f"off: {why_off}", None)
        steps = self._counts["verify_steps"] + self._counts["plain_steps"]
        if steps < MEASURED_STEPS or speedup is None:
            return SpeculationState(True, "on: measuring", None)
        if self._recent_drafted < ON_SHARE:
            return SpeculationState(False, "off: drafters cost more than they save here", speedup, uncertainty)
        return SpeculationState(True, f"on: {speedup:.1f}× plain", speedup, uncertainty)
