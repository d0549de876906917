"""Suffix drafting: propose what most often followed the longest context that was seen before, in any conversation.

The index is a suffix automaton (Blumer et al. 1985) over everything read so far, grown online in amortised constant
time per token; counts of what followed are kept for the few longest contexts at each position. It follows the idea of
SuffixDecoding (arXiv 2411.04975) with an automaton in place of its trees.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.drafters.lookup import LookupDrafter, Match

SHORTEST_MATCH = 2
COUNTED_CONTEXTS = 3
"""At each position, the followers of this many contexts (the longest and its suffixes) are counted."""
MAX_INDEXED_TOKENS = 40_000
CARRIED_CONTEXT = 32
"""Tokens of context repeated in the index when a text continues after a break."""
_BREAK = -1
_ROOT = 0


class SuffixAutomaton:
    """All substrings of a growing text, with the longest earlier occurrence of its end and counted followers."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._counts: list[dict[int, int] | None] = [None]
        self._last = _ROOT
        self.state = _ROOT
        """The longest suffix of the text that also occurs earlier."""
        self.match_length = 0
        self.size = 0

    def append(self, token: int) -> None:
        """Add one token to the end of the text; amortised constant time."""
        self._count(token)
        state, match_length = self.step(self.state, self.match_length, token)
        self._extend(token)
        # Growing may have split the matched state; the shorter half is the one that holds the match.
        while state != _ROOT and match_length <= self._length[self._link[state]]:
            state = self._link[state]
        self.state, self.match_length = state, match_length
        self.size += 1

    def step(self, state: int, match_length: int, token: int) -> tuple[int, int]:
        """The longest suffix of (matched context + token) that occurs in the text, without adding it."""
        while state != _ROOT and token not in self._next[state]:
            state = self._link[state]
            match_length = self._length[state]
        if token in self._next[state]:
            return self._next[state][token], match_length + 1
        return _ROOT, 0

    def followers(self, state: int) -> dict[int, int]:
        """Tokens seen after this context, with how often; a context not yet counted has seen each once."""
        counts = self._counts[state]
        return counts if counts is not None else dict.fromkeys(self._next[state], 1)

    def target(self, state: int, token: int) -> int | None:
        return self._next[state].get(token)

    def _count(self, token: int) -> None:
        state = self.state
        for _ in range(COUNTED_CONTEXTS):
            if state == _ROOT:
                return
            counts = self._counts[state]
            if counts is None:
                counts = self._counts[state] = dict.fromkeys(self._next[state], 1)
            counts[token] = counts.get(token, 0) + 1
            state = self._link[state]

    def _add_state(self, length: int, link: int, transitions: dict[int, int], counts: dict[int, int] | None) -> int:
        self._next.append(transitions)
        self._link.append(link)
        self._length.append(length)
        self._counts.append(counts)
        return len(self._next) - 1

    def _extend(self, token: int) -> None:
        current = self._add_state(self._length[self._last] + 1, _ROOT, {}, None)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        if state != -1:
            known = self._next[state][token]
            if self._length[state] + 1 == self._length[known]:
                self._link[current] = known
            else:
                counts = self._counts[known]
                clone = self._add_state(
                    self._length[state] + 1,
                    self._link[known],
                    dict(self._next[known]),
                    None if counts is None else dict(counts),
                )
                while state != -1 and self._next[state].get(token) == known:
                    self._next[state][token] = clone
                    state = self._link[state]
                self._link[known] = self._link[current] = clone
        self._last = current


class SuffixDrafter(LookupDrafter):
    """Looks in everything it has read since it was loaded: prompts, this conversation, earlier answers."""

    name = "suffix"

    def __init__(self) -> None:
        super().__init__()
        self._index = SuffixAutomaton()

    def _restart(self, tokens: list[int], kept: int) -> None:
        if self._index.size + len(tokens) - kept > MAX_INDEXED_TOKENS:
            self._index = SuffixAutomaton()
            kept = 0
        self._index.append(_BREAK)
        for token in tokens[max(0, kept - CARRIED_CONTEXT) :]:
            self._index.append(token)

    def _clear(self) -> None:
        self._index = SuffixAutomaton()

    def _append(self, token: int) -> None:
        if self._index.size >= MAX_INDEXED_TOKENS:
            # Start over from the newest half; the oldest text is the least likely to return.
            self._index = SuffixAutomaton()
            for recent in self._committed[-MAX_INDEXED_TOKENS // 2 :]:
                self._index.append(recent)
            return
        self._index.append(token)

    def _find(self, path: Sequence[int], max_tokens: int) -> Match | None:
        index = self._index
        state, length = index.state, index.match_length
        for token in path:
            state, length = index.step(state, length, token)
        if length < SHORTEST_MATCH:
            return None
        tokens: list[int] = []
        shares: list[float] = []
        while len(tokens) < max_tokens:
            followers = index.followers(state)
            total = sum(followers.values())
            best = max(followers, key=followers.__getitem__, default=_BREAK)
            following = index.target(state, best)
            if best == _BREAK or following is None:
                break
            tokens.append(best)
            shares.append(followers[best] / total)
            state = following
        return Match(length, tuple(tokens), tuple(shares)) if tokens else None
