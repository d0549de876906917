"""Which tokens recent answers were made of, so that a conversation that a client sends back keeps them.

Clients send text alone. Tokenising an answer anew may give other tokens than the model had said, and then neither the
cache nor the next answer is what it would be in one conversation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from engine.transcript import Piece, Transcript

CONVERSATIONS = 64


class Recollection:
    """The last conversations of one loaded set. Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._conversations: deque[tuple[Piece, ...]] = deque(maxlen=CONVERSATIONS)

    def encode(self, rendered: str, tokenize: Callable[[str, bool], list[int]]) -> Transcript:
        """The transcript of a rendered conversation, on top of the one that is known best."""
        with self._lock:
            known = list(self._conversations)
        best = max(known, key=lambda pieces: _shared_characters(rendered, pieces), default=())
        transcript = Transcript(tokenize, best)
        transcript.encode(rendered)
        return transcript

    def record(self, pieces: Sequence[Piece]) -> None:
        """Remember a conversation with its answer, in place of what it goes on from."""
        kept = tuple(pieces)
        with self._lock:
            for earlier in list(self._conversations):
                if earlier == kept[: len(earlier)]:
                    self._conversations.remove(earlier)
            self._conversations.append(kept)


def _shared_characters(rendered: str, pieces: Sequence[Piece]) -> int:
    """How much of a rendered conversation begins as known pieces do; of the last one, all or nothing."""
    position = 0
    for piece in pieces:
        text = piece.text
        if not rendered.startswith(text, position):
            text = text.strip() if piece.is_answer else ""
            if not text or not rendered.startswith(text, position):
                break
        position += len(text)
    return position
