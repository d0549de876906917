"""How likely the target is to accept a draft token, learnt online from what the target chose.

A token that was drafted and not sent teaches as well, as long as the target chose the ones before it: else a kind of
token that is thought unlikely, and therefore not sent, would be thought so forever.

Four questions are answered. *Token*: this token, with the confidence its drafter had and the agreement it found?
*Mean*: a token of this drafter set in general, for looking ahead before anything is drafted? *Heard*: how often does a
draft model guess the target's next token, told from all of its text that the model has read, drafting or not? And
*rescue*: given that the trunk's token is rejected, is it this branch's instead? All are counts with forgetting, so that
a change of task (prose to code) is followed within some dozens of tokens, what was heard within some hundreds.

Counts by kind of token follow a text slowly. That all kinds of a source fare better or worse in the present text than
they use to, a drift of the log-odds that they share, is followed faster: a logistic regression of one parameter, with
forgetting.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.drafters.base import Score
from engine.stored import StoredEntries
from engine.types import Branch, VotedDraft

CONFIDENCE_EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
CELL_MEMORY = 0.985
MEAN_MEMORY = 0.97
DRIFT_RATE = 0.2
DRIFT_MEMORY = 0.98
MOST_DRIFT = 3.0
FREE_CAUTION = 0.5
"""By so much, in log-odds, a look-up's token is believed less than was counted: what is sent is what was counted too
high."""
PRIOR_WEIGHT = 3.0
MEAN_PRIOR = 0.7
HEARD_MEMORY = 0.998
"""Which of two drafters is better is told by hundreds of tokens, and seldom changes."""
SET_GAIN = 0.02
"""What several drafters are believed to have over the best of them before it was seen; theirs is the vote of some."""
SUREST = 0.99
"""No drafter is believed to guess more often right."""
RESCUE_EDGES = (0.1, 0.25, 0.5)
RESCUE_PRIORS = (0.15, 0.3, 0.45, 0.6)
RESCUE_MEMORY = 0.99


@dataclass(slots=True)
class Share:
    """A share of successes that forgets."""

    hits: float
    tries: float

    @property
    def value(self) -> float:
        return self.hits / self.tries

    def learn(self, *, hit: bool, memory: float) -> None:
        self.learn_many(int(hit), 1, memory)

    def learn_many(self, hits: int, tries: int, memory: float) -> None:
        """Take in several at once."""
        self.hits = self.hits * memory**tries + hits
        self.tries = self.tries * memory**tries + tries


def _shifted(probability: float, log_odds: float) -> float:
    return probability / (probability + (1 - probability) * math.exp(-log_odds))


def _together(best: float, count: int) -> float:
    """What so many drafters are believed to guess right, of which the best does so often."""
    return min(SUREST, best + SET_GAIN * (count - 1))


def _unheard() -> Share:
    """What is believed of draft models before anything is known."""
    return Share(PRIOR_WEIGHT * MEAN_PRIOR, PRIOR_WEIGHT)


def _hits(draft: VotedDraft, chosen: Sequence[int]) -> Iterator[bool]:
    """For the tokens of a draft up to the first one that is wrong, whether the target chose them."""
    for token, own in zip(draft.tokens, chosen, strict=False):
        yield token == own
        if token != own:
            return


class AcceptanceModel:
    """Estimates of acceptance; one instance serves all answers of a loaded set."""

    def __init__(self, free_drafters: Iterable[str]) -> None:
        self._free = frozenset(free_drafters)
        self._cells: dict[tuple[str, int, int], Share] = {}
        self._drifts: dict[str, float] = {}
        """In log-odds, for each source whose confidence is trusted as one."""
        self._means: dict[tuple[str, ...], Share] = {}
        self._rescues: dict[tuple[bool, bool, int], Share] = {}
        self._heard: dict[str, Share] = {}

    def begin_text(self) -> None:
        """Take in that another answer begins: how often look-ups are right in it is its own text's affair."""
        self._drifts.pop("", None)

    def token(self, source: str, probability: float, agreement: float, proposers: int) -> float:
        """Probability that a token is accepted, given that the ones before it were.

        Args:
            source: The drafter that leads the draft.
            probability: Its own probability of the token.
            agreement: Share of the participating weight that proposed it.
            proposers: How many drafters proposed it.
        """
        trusted_as = self._trusted_as(source)
        drift = self._drifts.get(trusted_as, 0.0)
        counted = self._cell(trusted_as, probability, agreement, proposers).value
        return _shifted(counted, drift if trusted_as else drift - FREE_CAUTION)

    def _trusted_as(self, source: str) -> str:
        # Look-ups are sure of the same grounds; how far a model's confidence can be trusted is its own.
        return "" if source in self._free else source

    def _cell(self, trusted_as: str, probability: float, agreement: float, proposers: int) -> Share:
        # 0: nobody else had an opinion; 1: some disagreed; 2: several, all of one mind.
        harmony = 1 if agreement < 0.999 else 2 if proposers > 1 else 0
        confidence = bisect_right(CONFIDENCE_EDGES, probability)
        key = (trusted_as, confidence, harmony)
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

    def survivals(self, draft: VotedDraft) -> list[float]:
        """For each token of a voted draft, the probability that it and all before it are accepted."""
        return list(itertools.accumulate(self.voted(draft), operator.mul))

    def branch(self, branch: Branch, trunk: Sequence[float]) -> list[float]:
        """The same for a branch of a voted draft whose own survivals are `trunk`."""
        before = trunk[branch.fork - 1] if branch.fork else 1.0
        # It is the target's choice only where the trunk's token is not.
        survivals = [(before - trunk[branch.fork]) * self._rescue(branch).value]
        for probability in branch.probabilities[1:]:
            survivals.append(survivals[-1] * self.token(branch.source, probability, 1.0, 1))
        return survivals

    def _rescue(self, branch: Branch) -> Share:
        confidence = bisect_right(RESCUE_EDGES, branch.probabilities[0])
        key = (branch.source in self._free, branch.is_second, confidence)
        rescue = self._rescues.get(key)
        if rescue is None:
            rescue = self._rescues[key] = Share(PRIOR_WEIGHT * RESCUE_PRIORS[confidence], PRIOR_WEIGHT)
        return rescue

    def mean(self, names: Sequence[str]) -> float:
        """Acceptance of a token drafted by this set of model drafters, whatever else is known."""
        known = self._means.get(tuple(names))
        return known.value if known is not None else self.general(names)

    def general(self, names: Sequence[str]) -> float:
        """The same over the long run, told from what these drafters guessed each."""
        values = [self._heard[name].value for name in names if name in self._heard]
        return _together(max(values, default=MEAN_PRIOR), len(names))

    def at_best(self, names: Sequence[str]) -> float:
        """The most that `general` of these draft models may turn out to be, by two standard deviations of each."""
        values = []
        for name in names:
            heard = self._heard.get(name) or _unheard()
            values.append(heard.value + 2 * math.sqrt(heard.value * (1 - heard.value) / heard.tries))
        return _together(max(values), len(names))

    def heard_tokens(self, name: str) -> float:
        """On how many tokens it rests what is known of a draft model's guesses."""
        return self._heard[name].tries - PRIOR_WEIGHT if name in self._heard else 0.0

    def hear(self, scores: Mapping[str, Score]) -> None:
        """Take in how the guesses of draft models fared."""
        for name, score in scores.items():
            if score.scored and name not in self._free:
                self._heard.setdefault(name, _unheard()).learn_many(score.hits, score.scored, HEARD_MEMORY)

    def heard(self) -> dict[str, list[float]]:
        """What was heard of draft models, as plain data for `remember`."""
        return {name: [share.hits, share.tries] for name, share in self._heard.items()}

    def remember(self, heard: Mapping[str, Sequence[float]]) -> None:
        """Take over what was heard before.

        Raises:
            TypeError, ValueError: it is damaged.
        """
        for name, (hits, tries) in heard.items():
            if not 0 < float(hits) <= float(tries) < math.inf:
                raise ValueError(f"{hits} of {tries} guesses cannot have been right")
            self._heard[name] = Share(float(hits), float(tries))

    def learn(self, draft: VotedDraft, chosen: Sequence[int]) -> None:
        """Take in what the target chose; tokens after the first that it did not choose teach nothing.

        Args:
            draft: One that was voted on, sent or not.
            chosen: The target's tokens from where the draft begins.
        """
        trusted_as = self._trusted_as(draft.winner)
        drift = self._drifts.get(trusted_as, 0.0)
        for position, hit in enumerate(_hits(draft, chosen)):
            cell = self._cell(
                trusted_as,
                draft.probabilities[position],
                draft.agreement[position],
                len(draft.proposers[position]),
            )
            drift = DRIFT_MEMORY * drift + DRIFT_RATE * (hit - _shifted(cell.value, drift))
            cell.learn(hit=hit, memory=CELL_MEMORY)
        self._drifts[trusted_as] = min(max(drift, -MOST_DRIFT), MOST_DRIFT)

    def learn_all(self, names: Sequence[str], drafts: Sequence[VotedDraft], chosen: Sequence[int]) -> None:
        """Take in one verdict.

        Args:
            names: The model drafters that took part.
            drafts: The one that was gone on with, then those it parted from.
            chosen: The target's tokens from where they begin.
        """
        for draft in drafts:
            self.learn(draft, chosen)
        self.learn_mean(names, drafts[0], chosen)

    def learn_mean(self, names: Sequence[str], draft: VotedDraft, chosen: Sequence[int]) -> None:
        """The same for the mean of the model drafters that took part, where a draft of theirs was gone on with."""
        if draft.winner in names:
            mean = self._means.setdefault(tuple(names), _unheard())
            for hit in _hits(draft, chosen):
                mean.learn(hit=hit, memory=MEAN_MEMORY)

    def learn_rescue(self, branches: Iterable[Branch], fork: int, token: int) -> None:
        """Take in that the target chose `token` in place of the trunk's after `fork` of its tokens.

        Args:
            branches: All that the drafts offered, sent or not.
        """
        for branch in branches:
            if branch.fork == fork:
                self._rescue(branch).learn(hit=branch.tokens[0] == token, memory=RESCUE_MEMORY)


class HeardStore:
    """What was heard of draft models with one target and how it runs, on disk."""

    VERSION = 1

    def __init__(self, path: Path | None, key: str) -> None:
        self._entries = StoredEntries(path, self.VERSION)
        self._key = key
        self._at_start = self._entries.get(key)

    def recall(self, acceptance: AcceptanceModel) -> None:
        """Let a model remember what was stored at the start, if it can be read."""
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            acceptance.remember(self._at_start or {})

    def save(self, acceptance: AcceptanceModel) -> None:
        """Keep what was heard for the next start; of drafters that are not loaded now it stays as it is."""
        entry = self._entries.get(self._key)
        self._entries.put(self._key, {**(entry if isinstance(entry, dict) else {}), **acceptance.heard()})
