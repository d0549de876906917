"""Prompt lookup: propose what followed the last occurrence of the present n-gram in this conversation.

Source: prompt lookup decoding (Saxena 2023), with every n from 5 down to 2 indexed online.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.drafters.lookup import LookupDrafter, Match

LONGEST = 5
SHORTEST = 2
MAX_MATCH_LENGTH = 32


class NgramDrafter(LookupDrafter):
    """Looks in the committed tokens of the present conversation only."""

    name = "ngram"

    def __init__(self) -> None:
        super().__init__()
        self._followers: dict[tuple[int, ...], int] = {}
        """For each n-gram that has a successor, where its latest successor stands."""

    def _restart(self, tokens: list[int], kept: int) -> None:
        self._followers.clear()
        for end in range(SHORTEST, len(tokens)):
            self._index(end)

    def _clear(self) -> None:
        self._followers.clear()

    def _append(self, token: int) -> None:
        self._index(len(self._committed) - 1)

    def _index(self, end: int) -> None:
        for size in range(SHORTEST, min(LONGEST, end) + 1):
            self._followers[tuple(self._committed[end - size : end])] = end

    def _find(self, path: Sequence[int], max_tokens: int) -> Match | None:
        committed = self._committed
        recent = [*committed[-MAX_MATCH_LENGTH:], *path]
        for size in range(min(LONGEST, len(recent)), SHORTEST - 1, -1):
            follower = self._followers.get(tuple(recent[-size:]))
            if follower is not None:
                break
        else:
            return None
        length = size
        while length < len(recent) and length < follower and recent[-1 - length] == committed[follower - 1 - length]:
            length += 1
        tokens = tuple(committed[follower : follower + max_tokens])
        return Match(length, tokens, (1.0,) * len(tokens))
