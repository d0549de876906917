"""Conversations: what was asked and answered. This is the boundary behind which they are kept.

A conversation is an immutable value; a change makes a new one. The store here lives in memory. Another store needs
the same six methods; all of them may be called from any thread.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass, replace

from engine.runtime.template import Message
from engine.types import FinishReason


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and, as far as there is one, its answer."""

    question: str
    answer: str = ""
    finish_reason: FinishReason | None = None
    """None while it is being answered, and where no answer came about."""
    note: str = ""
    """Why the answer ended early, or why there is none."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, under an identity."""

    id: str
    turns: tuple[Turn, ...] = ()
    system_prompt: str = ""

    def messages(self, turn: int) -> tuple[Message, ...]:
        """What the target is to read for the answer of a turn. Earlier turns without an answer are left out."""
        system = [Message("system", self.system_prompt)] if self.system_prompt.strip() else []
        earlier = [
            message
            for past in self.turns[:turn]
            if past.answer
            for message in (Message("user", past.question), Message("assistant", past.answer))
        ]
        return (*system, *earlier, Message("user", self.turns[turn].question))


class Conversations:
    """Keeps conversations until the program ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._conversations: dict[str, Conversation] = {}

    def create(self) -> Conversation:
        conversation = Conversation(uuid.uuid4().hex)
        with self._lock:
            self._conversations[conversation.id] = conversation
        return conversation

    def get(self, conversation_id: str) -> Conversation | None:
        with self._lock:
            return self._conversations.get(conversation_id)

    def add_turn(self, conversation_id: str, question: str, system_prompt: str) -> int | None:
        """Append a question; returns the turn's index, or None when the conversation is gone."""
        with self._lock:
            conversation = self._conversations.get(conversation_id)
            if conversation is None:
                return None
            self._conversations[conversation_id] = replace(
                conversation, turns=(*conversation.turns, Turn(question)), system_prompt=system_prompt
            )
            return len(conversation.turns)

    def set_turn(self, conversation_id: str, index: int, turn: Turn) -> None:
        """Replace a turn; nothing happens when it is gone."""
        with self._lock:
            conversation = self._conversations.get(conversation_id)
            if conversation is not None and index < len(conversation.turns):
                turns = (*conversation.turns[:index], turn, *conversation.turns[index + 1 :])
                self._conversations[conversation_id] = replace(conversation, turns=turns)

    def drop_last_turn(self, conversation_id: str) -> Turn | None:
        """Take the last turn away and return it."""
        with self._lock:
            conversation = self._conversations.get(conversation_id)
            if conversation is None or not conversation.turns:
                return None
            self._conversations[conversation_id] = replace(conversation, turns=conversation.turns[:-1])
            return conversation.turns[-1]

    def delete(self, conversation_id: str) -> None:
        with self._lock:
            self._conversations.pop(conversation_id, None)
