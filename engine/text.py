"""Tokens to readable text as they come: no broken characters, nothing of a stop string, thoughts apart."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

THINKING_OPENS = "<think>"
THINKING_CLOSES = "</think>"


class TextStream:
    """Assembles the text of one answer.

    Bytes that end inside a character wait for the rest of it; text that may be the start of a stop string or of a tag
    waits until it is known not to be one. An answer may begin with one thought between tags, which is no part of it.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        stop_strings: Sequence[str],
        *,
        starts_thinking: bool | None = None,
        stops_in_thinking: bool = False,
    ) -> None:
        """Args:
        piece: The bytes of a token.
        stop_strings: Texts that end the answer, and are no part of it.
        starts_thinking: Whether the prompt has opened the thought already; None where tags mean nothing.
        stops_in_thinking: Whether stop strings end a thought as well.
        """
        self._piece = piece
        self._stop_strings = tuple(stop_strings)
        self._stops_in_thinking = stops_in_thinking
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._said = ""
        self._shown = 0
        self._ends: list[int] = []
        """For each token, the length of what was said with it."""
        self._thought_start = 0 if starts_thinking else None
        self._thought_end = 0
        self._start = 0 if starts_thinking is None else None
        """Where the answer begins in what was said; None while that is open."""
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All of the answer shown so far."""
        return "" if self._start is None else self._said[self._start : self._shown]

    @property
    def thinking(self) -> str:
        """All of the thought shown so far."""
        if self._thought_start is None:
            return ""
        return self._said[self._thought_start : self._shown if self._start is None else self._thought_end]

    @property
    def said(self) -> str:
        """What was shown, with the thought and its tags: what the tokens read as."""
        return self._said[: self._shown]

    @property
    def token_count(self) -> int:
        """Tokens that have a part in what was shown."""
        if not self.is_stopped:
            return len(self._ends)
        return sum(1 for end in self._ends if end <= self._shown)

    def push(self, token: int) -> str:
        """Add a token; returns the answer's text that became readable by it. Sets `is_stopped` at a stop string."""
        searched = len(self._said)
        self._said += self._decoder.decode(self._piece(token))
        self._ends.append(len(self._said))
        if self._start is None or self._thought_start is not None:
            self._find_parts()
        first = 0 if self._stops_in_thinking else self._start
        if first is not None:
            self._stop_from(max(first, searched - max(map(len, self._stop_strings), default=1) + 1))
        return self._show(len(self._said) if self.is_stopped else len(self._said) - self._held_back(first is not None))

    def finish(self) -> str:
        """The text still held back; an incomplete character at the very end becomes a replacement mark."""
        if not self.is_stopped:
            self._said += self._decoder.decode(b"", final=True)
            if self._start is None and self._thought_start is None:
                self._start = 0
        return self._show(len(self._said))

    def _find_parts(self) -> None:
        """Where the thought and the answer begin; white space around them belongs to neither."""
        if self._thought_start is None:
            begun = self._said.lstrip()
            if begun.startswith(THINKING_OPENS):
                self._thought_start = len(self._said) - len(begun) + len(THINKING_OPENS)
            elif not THINKING_OPENS.startswith(begun):
                self._start = 0
        if self._thought_start is None:
            return
        if self._start is None:
            self._thought_start = self._skip_space(self._thought_start)
            end = self._said.find(THINKING_CLOSES, self._thought_start)
            if end >= 0:
                self._thought_end = end
                self._start = end + len(THINKING_CLOSES)
        if self._start is not None:
            self._start = self._skip_space(self._start)

    def _skip_space(self, position: int) -> int:
        while position < len(self._said) and self._said[position].isspace():
            position += 1
        return position

    def _stop_from(self, start: int) -> None:
        found = (self._said.find(stop, start) for stop in self._stop_strings)
        starts = [start for start in found if start >= 0]
        if starts:
            self.is_stopped = True
            self._said = self._said[: min(starts)]

    def _held_back(self, may_stop: bool) -> int:
        """Characters at the end that may be the beginning of something that is not to be shown."""
        if self._start is None and self._thought_start is None:
            return len(self._said)
        watched: Iterable[str] = self._stop_strings if may_stop else ()
        if self._start is None:
            watched = (*watched, THINKING_CLOSES)
        longest = 0
        for text in watched:
            for size in range(min(len(text) - 1, len(self._said)), longest, -1):
                if self._said.endswith(text[:size]):
                    longest = size
                    break
        return longest

    def _show(self, end: int) -> str:
        before = len(self.text)
        self._shown = max(self._shown, end)
        return self.text[before:]
