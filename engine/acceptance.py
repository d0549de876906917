"""How likely the target is to accept a draft token, learnt online from verdicts.

Two questions are answered. *Token*: this token, with the confidence its drafter had and the agreement it found? And
*mean*: a token of this drafter set in general, for looking ahead before anything is drafted? Both are counts with
forgetting, so that a change of task (prose to code) is followed within some dozens of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.types import VotedDraft

CONFIDENCE_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
CELL_MEMORY = 0.985
MEAN_MEMORY = 0.97
PRIOR_WEIGHT = 3.0
MEAN_PRIOR = 0.7


@dataclass(slots=True)
class Share:
    """A share of successes that forgets."""

    hits: float
    tries: float

    @property
    def value(self) -> float:
        return self.hits / self.tries

    def learn(self, *, hit: bool, memory: float) -> None:
        self.hits = self.hits * memory + hit
        self.tries = self.tries * memory + 1


class AcceptanceModel:
    """Estimates of acceptance; one instance serves all answers of a loaded set."""

    def __init__(self, free_drafters: Iterable[str]) -> None:
        self._free = frozenset(free_drafters)
        self._cells: dict[tuple[bool, int, int], Share] = {}
        self._means: dict[tuple[str, ...], Share] = {}

    def token(self, source: str, probability: float, agreement: float, proposers: int) -> float:
        """Probability that a token is accepted, given that the ones before it were.

        Args:
            source: The drafter that leads the draft.
            probability: Its own probability of the token.
            agreement: Share of the participating weight that proposed it.
            proposers: How many drafters proposed it.
        """
        return self._cell(source, probability, agreement, proposers).value

    def _cell(self, source: str, probability: float, agreement: float, proposers: int) -> Share:
        is_free = source in self._free
        # 0: nobody else had an opinion; 1: some disagreed; 2: several, all of one mind.
        harmony = 1 if agreement < 0.999 else 2 if proposers > 1 else 0
        confidence = sum(probability >= edge for edge in CONFIDENCE_EDGES)
        key = (is_free, confidence, harmony)
        cell = self._cells.get(key)
        if cell is None:
            prior = 0.1 + 0.85 * probability
            prior = (prior, 0.75 * prior, 1 - 0.5 * (1 - prior))[harmony]
            cell = self._cells[key] = Share(PRIOR_WEIGHT * prior, PRIOR_WEIGHT)
        return cell

    def voted(self, draft: VotedDraft) -> list[float]:
        """The token estimates of a whole voted draft."""
        return [
            self.token(draft.winner, probability, agreement, len(proposers))
            for probability, agreement, proposers in zip(
                draft.probabilities, draft.agreement, draft.proposers, strict=True
            )
        ]

    def mean(self, names: Sequence[str]) -> float:
        """Acceptance of a token drafted by this set of model drafters, whatever else is known."""
        known = self._means.get(tuple(names))
        return known.value if known is not None else MEAN_PRIOR

    def learn(self, names: Sequence[str], draft: VotedDraft, verified: int, accepted: int) -> None:
        """Take in a verdict; tokens after the first rejected one were never judged and teach nothing.

        Args:
            names: The model drafters that took part.
            draft: The draft as voted.
            verified: How many of its tokens were sent.
            accepted: How many were accepted.
        """
        for position in range(min(verified, accepted + 1)):
            hit = position < accepted
            self._cell(
                draft.winner,
                draft.probabilities[position],
                draft.agreement[position],
                len(draft.proposers[position]),
            ).learn(hit=hit, memory=CELL_MEMORY)
            if names:
                mean = self._means.setdefault(tuple(names), Share(PRIOR_WEIGHT * MEAN_PRIOR, PRIOR_WEIGHT))
                mean.learn(hit=hit, memory=MEAN_MEMORY)
