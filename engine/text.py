"""Tokens to readable text as they come: no broken characters, nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """Assembles the text of one answer.

    Bytes that end inside a character wait for the rest of it; text that may be the start of a stop string waits until
    it is known not to be one.
    """

    def __init__(self, piece: Callable[[int], bytes], stop_strings: Sequence[str]) -> None:
        self._piece = piece
        self._stop_strings = tuple(stop_strings)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._shown = 0
        self._ends: list[int] = []
        """For each token, the length of the readable text with it."""
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All text shown so far."""
        return self._text[: self._shown]

    @property
    def token_count(self) -> int:
        """Tokens that have a part in the shown text."""
        if not self.is_stopped:
            return len(self._ends)
        return sum(1 for end in self._ends if end <= self._shown)

    def push(self, token: int) -> str:
        """Add a token; returns the text that became readable by it. Sets `is_stopped` at a stop string."""
        searched = len(self._text)
        self._text += self._decoder.decode(self._piece(token))
        self._ends.append(len(self._text))
        found = (self._text.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stop_strings)
        starts = [start for start in found if start >= 0]
        if starts:
            self.is_stopped = True
            self._text = self._text[: min(starts)]
        return self._show(len(self._text) if self.is_stopped else len(self._text) - self._held_back())

    def finish(self) -> str:
        """The text still held back; an incomplete character at the very end becomes a replacement mark."""
        if not self.is_stopped:
            self._text += self._decoder.decode(b"", final=True)
        return self._show(len(self._text))

    def _held_back(self) -> int:
        longest = 0
        for stop in self._stop_strings:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _show(self, end: int) -> str:
        fresh = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return fresh
