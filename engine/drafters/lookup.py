"""What the drafters that look text up have in common: a committed text, and learnt trust in a match of some length."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from engine.drafters.base import Drafter, DraftRequest, Score, finished
from engine.prefix import shared_prefix
from engine.types import Draft


@dataclass(frozen=True, slots=True)
class Match:
    """A place in known text that continues like the present."""

    length: int
    """Tokens of context that agree."""
    tokens: tuple[int, ...]
    """What followed there."""
    shares: tuple[float, ...]
    """For each of them, its share among everything that followed the same context."""


class TrustByLength:
    """How often the token after a match of a given length was the right one; counts with a mild prior."""

    BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

    def __init__(self) -> None:
        # Priors: a short match is right a third of the time, a long one nearly always.
        self._hits = [1.0 + index * 0.5 for index in range(len(self.BUCKETS))]
        self._tries = [3.0 + index * 0.5 for index in range(len(self.BUCKETS))]

    def _bucket(self, length: int) -> int:
        return max(bisect_right(self.BUCKETS, length) - 1, 0)

    def learn(self, length: int, *, hit: bool) -> None:
        bucket = self._bucket(length)
        self._tries[bucket] = self._tries[bucket] * 0.98 + 1
        self._hits[bucket] = self._hits[bucket] * 0.98 + hit

    def probability(self, length: int) -> float:
        bucket = self._bucket(length)
        return self._hits[bucket] / self._tries[bucket]


class LookupDrafter(Drafter):
    """Drafts by finding the present context in known text. Costs microseconds, so it answers at once."""

    is_free = True

    def __init__(self) -> None:
        self._committed: list[int] = []
        self._trust = TrustByLength()
        self._score = Score()

    @abstractmethod
    def _restart(self, tokens: list[int], kept: int) -> None:
        """The committed text is now `tokens`, of which the first `kept` are as before."""

    @abstractmethod
    def _clear(self) -> None:
        """No text is known any more."""

    @abstractmethod
    def _append(self, token: int) -> None:
        """The committed text grew by one token."""

    @abstractmethod
    def _find(self, path: Sequence[int], max_tokens: int) -> Match | None:
        """The best match for the committed tokens followed by `path`."""

    def begin(self, tokens: Sequence[int]) -> None:
        tokens = list(tokens)
        kept = shared_prefix(self._committed, tokens)
        if kept == len(self._committed):
            for token in tokens[kept:]:
                self._push(token)
            return
        self._committed = tokens
        self._restart(tokens, kept)

    def _push(self, token: int) -> None:
        self._committed.append(token)
        self._append(token)

    def start(self, request: DraftRequest) -> Future[Draft]:
        match = self._find(request.path, request.max_tokens)
        if match is None:
            return finished(Draft(self.name))
        probabilities: list[float] = []
        for index, share in enumerate(match.shares):
            probabilities.append(share * self._trust.probability(match.length + index))
            if not request.keep_drafting(probabilities, 0.0):
                break
        drafted = len(probabilities)
        return finished(Draft(self.name, match.tokens[:drafted], tuple(probabilities), match.length))

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            match = self._find((), 1)
            if match is not None:
                hit = match.tokens[0] == token
                self._trust.learn(match.length, hit=hit)
                self._score += Score(int(hit), 1)
            self._push(token)

    def truncate(self, length: int) -> None:
        self.begin(self._committed[:length])

    def forget(self) -> None:
        self._committed = []
        self._clear()

    def take_score(self) -> Score:
        score, self._score = self._score, Score()
        return score
