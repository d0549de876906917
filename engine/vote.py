"""The weighted vote: many drafts in, one drafter's real sequence out; and how weights learn.

Source of the vote and of the `minions` weights: Minions (arXiv 2402.15678), whose constants are not published; ours are
named below. Source of the `hedge` weights: Hedge for specialists that may abstain (Freund et al. 1997) with fixed share
(Herbster and Warmuth 1998), every drafter being scored on every committed token as in HedgeSpec (arXiv 2510.20064).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from engine.config import WeightRule
from engine.drafters.base import Score
from engine.prefix import shared_prefix
from engine.types import Draft, VotedDraft

MINIONS_THRESHOLD = 0.5
MINIONS_REWARD = 1.1
MINIONS_PENALTY = 0.9
HEDGE_RATE = 0.15
HEDGE_SHARE = 0.01
WEIGHT_FLOOR = 0.05
"""No weight falls below this share of the heaviest, so that a drafter can come back."""


def vote(drafts: Sequence[Draft], weights: Mapping[str, float]) -> VotedDraft:
    """Merge the drafts into a prefix tree and walk down the heaviest child.

    A node weighs the sum of the weights of the drafts that pass through it. Equal nodes are told apart by their
    heaviest drafter, then by the order of the drafts. Empty drafts abstain.
    """
    alive = [draft for draft in drafts if draft.tokens]
    if not alive:
        return VotedDraft()
    followed = alive
    position = 0
    while len(alive) > 1:
        children: dict[int, list[Draft]] = {}
        for draft in alive:
            children.setdefault(draft.tokens[position], []).append(draft)
        followed = alive if len(children) == 1 else max(children.values(), key=lambda child: _node_rank(child, weights))
        position += 1
        alive = [draft for draft in followed if len(draft) > position]
    leader = max(alive or followed, key=lambda draft: weights[draft.source])
    return _led_by(leader, drafts, weights)


def losers(voted: VotedDraft, drafts: Sequence[Draft], weights: Mapping[str, float]) -> tuple[VotedDraft, ...]:
    """The drafts that part from the voted one, each as if it had won."""
    return tuple(
        _led_by(draft, drafts, weights)
        for draft in drafts
        if shared_prefix(draft.tokens, voted.tokens) < min(len(draft), len(voted))
    )


def _led_by(leader: Draft, drafts: Sequence[Draft], weights: Mapping[str, float]) -> VotedDraft:
    """One of the drafts as the voted one, with what the others say about each of its tokens."""
    participants = alive = [draft for draft in drafts if draft.tokens]
    ends = set(map(len, participants))
    share = 0.0
    names: tuple[str, ...] = ()
    agreement: list[float] = []
    proposers: list[tuple[str, ...]] = []
    for position, token in enumerate(leader.tokens):
        before, alive = alive, [draft for draft in alive if len(draft) > position and draft.tokens[position] == token]
        # What has not changed since the token before is not added up again.
        if position == 0 or position in ends or len(alive) < len(before):
            reached = sum(weights[draft.source] for draft in participants if len(draft) > position)
            share = sum(weights[draft.source] for draft in alive) / reached
            names = tuple(draft.source for draft in alive)
        agreement.append(share)
        proposers.append(names)
    return VotedDraft(
        tokens=leader.tokens,
        probabilities=leader.probabilities,
        agreement=tuple(agreement),
        proposers=tuple(proposers),
        winner=leader.source,
        match_length=leader.match_length,
    )


def _node_rank(drafts: Sequence[Draft], weights: Mapping[str, float]) -> tuple[float, float]:
    own = [weights[draft.source] for draft in drafts]
    return sum(own), max(own)


class Weights(ABC):
    """A drafter's say in the vote; all begin equal."""

    def __init__(self, names: Iterable[str]) -> None:
        self._weights = dict.fromkeys(names, 1.0)

    @property
    def current(self) -> Mapping[str, float]:
        """Weights by name; the heaviest is 1."""
        return self._weights

    @abstractmethod
    def learn(self, voted: VotedDraft, verified: int, accepted: int, scores: Mapping[str, Score]) -> None:
        """Take in one verdict.

        Args:
            voted: The draft that was sent, trimmed to `verified` tokens.
            verified: Its length.
            accepted: How many of its tokens the target accepted.
            scores: How each drafter's own guesses fared on the tokens committed since the last call.
        """

    def _normalise(self) -> None:
        heaviest = max(self._weights.values(), default=1.0)
        for name, weight in self._weights.items():
            self._weights[name] = max(WEIGHT_FLOOR, weight / heaviest)


class MinionsWeights(Weights):
    """Only the winner is judged: rewarded when its acceptance was above the threshold, else punished."""

    def learn(self, voted: VotedDraft, verified: int, accepted: int, scores: Mapping[str, Score]) -> None:
        if not verified or voted.winner not in self._weights:
            return
        is_good = accepted / verified > MINIONS_THRESHOLD
        self._weights[voted.winner] *= MINIONS_REWARD if is_good else MINIONS_PENALTY
        self._normalise()


class HedgeWeights(Weights):
    """Everyone is judged on every committed token it had an opinion on, against the mean of those that had one."""

    def learn(self, voted: VotedDraft, verified: int, accepted: int, scores: Mapping[str, Score]) -> None:
        awake = {name: score for name, score in scores.items() if score.scored and name in self._weights}
        if not awake:
            return
        scored = sum(score.scored for score in awake.values())
        mean_loss = sum(score.scored - score.hits for score in awake.values()) / scored
        for name, score in awake.items():
            excess_loss = score.scored - score.hits - mean_loss * score.scored
            self._weights[name] *= math.exp(-HEDGE_RATE * excess_loss)
        mean = sum(self._weights.values()) / len(self._weights)
        for name, weight in self._weights.items():
            self._weights[name] = (1 - HEDGE_SHARE) * weight + HEDGE_SHARE * mean
        self._normalise()


def make_weights(rule: WeightRule, names: Iterable[str]) -> Weights:
    """Equal weights for the named drafters, learning by `rule`."""
    return HedgeWeights(names) if rule is WeightRule.HEDGE else MinionsWeights(names)
