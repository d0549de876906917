"""One engine session per conversation, a few at a time, so that a follow-up question finds its cache warm.

The session at work has the target's cache for itself; the others wait in main memory. The pool closes those that were
used longest ago, when there are too many and when those that wait would take more memory than the cache does. A new
session is told what an earlier one knew of its conversation's tokens, so that it never tokenises an answer anew. Only
the worker touches it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from engine.loader import LoadedSet
from engine.session import Session
from engine.transcript import Piece

MOST_SESSIONS = 4

Recall = Callable[[str], tuple[Piece, ...]]
"""What is known of a conversation's tokens."""


class SessionPool:
    """Owns the sessions of a loaded set."""

    def __init__(self, loaded: LoadedSet, recall: Recall) -> None:
        """Args:
        loaded: The set that answers.
        recall: Asked whenever a session is made.
        """
        self._loaded = loaded
        self._recall = recall
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def session(self, conversation_id: str) -> Session:
        """The conversation's session, made when there is none."""
        if conversation_id not in self._sessions:
            while len(self._sessions) >= MOST_SESSIONS:
                self._close_oldest()
            self._sessions[conversation_id] = Session(self._loaded, self._recall(conversation_id))
        self._sessions.move_to_end(conversation_id)
        while self._waiting_tokens() > self.context_tokens:
            self._close_oldest()
        return self._sessions[conversation_id]

    def drop(self, conversation_id: str) -> None:
        """Close a conversation's session, if it has one."""
        if conversation_id in self._sessions:
            self._sessions.pop(conversation_id).close()

    def close(self) -> None:
        while self._sessions:
            self._close_oldest()

    @property
    def context_tokens(self) -> int:
        """What one conversation can hold."""
        return self._loaded.context.context_tokens

    @property
    def target(self) -> Path:
        """The file of the model that answers."""
        return self._loaded.config.target

    @property
    def conversation_ids(self) -> tuple[str, ...]:
        """Longest unused first."""
        return tuple(self._sessions)

    def _waiting_tokens(self) -> int:
        return sum(len(session.tokens) for session in list(self._sessions.values())[:-1])

    def _close_oldest(self) -> None:
        _, session = self._sessions.popitem(last=False)
        session.close()
