"""Cached beginnings of prompts: what requests that have ended leave behind until its room is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from engine.prefill import Stretch
from engine.runtime.shared import SharedContext


@dataclass(frozen=True, slots=True)
class Cached:
    """A sequence of the cache and what it holds."""

    sequence: int
    tokens: Sequence[int]
    """Those in the cache, and perhaps some after them."""
    held: frozenset[Stretch]
    """Stretches that were carried."""


class Shelf:
    """Owns the sequences of ended requests, the one used last at the end."""

    def __init__(self, context: SharedContext, most: int) -> None:
        self._context = context
        self._most = most
        self._kept: list[Cached] = []

    def __iter__(self) -> Iterator[Cached]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, new: Cached) -> None:
        """Keep a sequence; others that are no more than its beginning, and the oldest if there are too many, go."""
        tokens = list(new.tokens)
        for old in list(self._kept):
            if list(old.tokens) == tokens[: len(old.tokens)] and new.held >= old.held:
                self._drop(old)
        self._kept.append(new)
        while len(self._kept) > self._most:
            self.drop_oldest()

    def use(self, cached: Cached) -> None:
        """Note that a request went on from it."""
        if cached in self._kept:
            self._kept.remove(cached)
            self._kept.append(cached)

    def drop_oldest(self) -> None:
        self._drop(self._kept[0])

    def drop_all(self, sequences: Collection[int]) -> None:
        """Keep none of these sequences."""
        for cached in list(self._kept):
            if cached.sequence in sequences:
                self._drop(cached)

    def _drop(self, cached: Cached) -> None:
        self._kept.remove(cached)
        self._context.free(cached.sequence)
