"""Acceptance of drafts that were *sampled* from known distributions: the answer's distribution is the target's exactly.

Token matching, which the pipeline uses, keeps the very tokens; the rules here keep their distribution and accept more.
Each needs the distribution q that a draft token was really drawn from. A voted token was drawn from none of the
drafters' distributions, so it is a point mass: q is one for the token and zero for all others, and speculative sampling
then accepts it as often as token matching does. Feeding a drafter's own q for a voted token is not lossless.

Rows are probabilities, shape (vocabulary,), and sum to one. Nothing here computes with models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float64]


class Chance(Protocol):
    """Where randomness comes from."""

    def happens(self, probability: float) -> bool:
        """True with this probability."""

    def pick(self, weights: Row) -> int:
        """A place, with probability in proportion to its weight."""


class Generator:
    """Chance by a random generator."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def happens(self, probability: float) -> bool:
        return bool(self._random.random() < probability)

    def pick(self, weights: Row) -> int:
        return int(self._random.choice(len(weights), p=weights / weights.sum()))


@dataclass(frozen=True, slots=True)
class Accepted:
    """How much of a draft stands, and the token after it."""

    accepted: int
    final: int


def speculative_sampling(p: Sequence[Row], q: Sequence[Row], draft: Sequence[int], chance: Chance) -> Accepted:
    """Accept each token with probability min(1, p/q); after the first rejection draw from what p has more than q.

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.

    Args:
        p: The target's row for each draft token, and one more for the token after the draft.
        q: The drafter's row for each draft token, from which that token was drawn.
        draft: The drafted tokens.
        chance: Randomness.
    """
    _check(p, q, draft)
    for place, token in enumerate(draft):
        if not chance.happens(min(1.0, p[place][token] / q[place][token])):
            return Accepted(place, chance.pick(residual(p[place], q[place])))
    return Accepted(len(draft), chance.pick(p[len(draft)]))


def block_verification(p: Sequence[Row], q: Sequence[Row], draft: Sequence[int], chance: Chance) -> Accepted:
    """Judge the draft as a whole; accepts at least as much as speculative sampling, on average. Arguments as there.

    Sun et al., arXiv 2403.10444, algorithm 2.
    """
    _check(p, q, draft)
    kept = [1.0]
    for place, token in enumerate(draft):
        kept.append(min(1.0, kept[-1] * p[place][token] / q[place][token]))
    if chance.happens(kept[-1]):
        return Accepted(len(draft), chance.pick(p[len(draft)]))
    for length in range(len(draft) - 1, 0, -1):
        gained = _excess(kept[length] * p[length], q[length])
        lost = 1.0 - kept[length]
        if chance.happens(gained.sum() / (gained.sum() + lost) if gained.sum() else 0.0):
            return Accepted(length, chance.pick(gained))
    return Accepted(0, chance.pick(residual(p[0], q[0])))


def recursive_rejection(p: Row, q: Sequence[Row], candidates: Sequence[int], chance: Chance) -> tuple[int | None, int]:
    """Choose one token when several drafters each drew a candidate for it, independently of each other.

    Each rejection takes the drafter's distribution out of what is left of the target's. SpecInfer, arXiv 2305.09781.

    Args:
        p: The target's row.
        q: For each candidate the row it was drawn from.
        candidates: One token of each drafter, in an order that does not depend on the tokens.
        chance: Randomness.

    Returns:
        The place of the accepted candidate, or None, and the chosen token.
    """
    left = p
    for place, (row, token) in enumerate(zip(q, candidates, strict=True)):
        if chance.happens(min(1.0, left[token] / row[token])):
            return place, token
        left = residual(left, row)
    return None, chance.pick(left)


def residual(p: Row, q: Row) -> Row:
    """What p has more than q, as a distribution; p itself where it has nothing more (then no token is rejected)."""
    excess = _excess(p, q)
    total = excess.sum()
    return excess / total if total > 0 else p


def point_mass(token: int, size: int) -> Row:
    """The distribution of a token that was chosen by any means but drawing: a vote, a look-up, the most probable."""
    row = np.zeros(size)
    row[token] = 1.0
    return row


def _excess(p: Row, q: Row) -> Row:
    return np.maximum(p - q, 0.0)


def _check(p: Sequence[Row], q: Sequence[Row], draft: Sequence[int]) -> None:
    if not len(p) - 1 == len(q) == len(draft):
        raise ValueError(f"{len(draft)} draft tokens with {len(q)} rows of q and {len(p)} of p; needs one more of p")
