"""Which tokens stand for which part of a conversation, so that an answer's ids are never made anew from its text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of rendered conversation and its tokens."""

    text: str
    tokens: tuple[int, ...]
    is_answer: bool = False


class Transcript:
    """The pieces of the conversation last rendered, in order."""

    def __init__(self, tokenize: Callable[[str, bool], list[int]], pieces: Sequence[Piece] = ()) -> None:
        """Args:
        tokenize: Text to tokens; the flag says whether the text begins the sequence.
        pieces: Of an earlier transcript that this one continues.
        """
        self._tokenize = tokenize
        self._pieces = list(pieces)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What another transcript with the same vocabulary needs to continue this one."""
        return tuple(self._pieces)

    def encode(self, rendered: str) -> list[int]:
        """Tokens of a rendered conversation; parts that were seen before keep the tokens they had."""
        kept: list[Piece] = []
        position = 0
        for piece in self._pieces:
            text = piece.text
            if not rendered.startswith(text, position):
                # Some templates strip the white space around an answer.
                text = text.strip() if piece.is_answer else ""
                if not text or not rendered.startswith(text, position):
                    break
            kept.append(piece)
            position += len(text)
        rest = rendered[position:]
        if rest:
            kept.append(Piece(rest, tuple(self._tokenize(rest, position == 0))))
        self._pieces = kept
        return [token for piece in kept for token in piece.tokens]

    @property
    def prompt_parts(self) -> list[tuple[int, int]]:
        """Where each piece that is no answer begins and ends, in tokens of what was last encoded."""
        ends = list(itertools.accumulate(len(piece.tokens) for piece in self._pieces))
        spans = zip(self._pieces, [0, *ends], ends, strict=False)
        return [(start, end) for piece, start, end in spans if not piece.is_answer]

    def record_answer(self, text: str, tokens: Sequence[int]) -> None:
        """Remember the tokens of the answer to what was last encoded, and the text that they read as."""
        if text:
            self._pieces.append(Piece(text, tuple(tokens), is_answer=True))
