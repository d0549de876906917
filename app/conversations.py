"""Conversations: what was asked and answered, kept in one SQLite file.

A conversation is an immutable value; a change makes a new one. All methods may be called from any thread; there is one
connection, and one lock around it. An answer that is being written is appended token batch by token batch to a table
of its own, so that a process that is killed loses nothing it had shown; what it left is folded into its turn the next
time the file is opened. Token ids are kept as they were, so that no answer is ever tokenised anew.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock

from engine.errors import EnvironmentProblem
from engine.runtime.template import Message
from engine.transcript import Piece
from engine.types import FinishReason, Provenance

SCHEMA_VERSION = 1
CACHED = 32
LISTED_AT_FIRST = 200
"""Conversations that are listed before anybody asks for more."""
TITLE_CHARACTERS = 60
INTERRUPTED = "Quorum ended before this answer did"

_SCHEMA = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL DEFAULT '',
    system_prompt TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    changed_at REAL NOT NULL
);
CREATE TABLE turns (
    conversation TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    question TEXT NOT NULL,
    answer TEXT NOT NULL DEFAULT '',
    finish_reason TEXT,
    note TEXT NOT NULL DEFAULT '',
    thinking TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    tokens TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (conversation, number)
);
CREATE TABLE batches (
    conversation TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    text TEXT NOT NULL,
    tokens TEXT NOT NULL
);
CREATE TABLE pieces (
    conversation TEXT PRIMARY KEY REFERENCES conversations(id) ON DELETE CASCADE,
    target TEXT NOT NULL,
    pieces TEXT NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """One token of an answer: what it reads as and where it came from."""

    id: int
    text: str
    """What became readable by it, of the thought or the answer; empty inside a character of several tokens."""
    provenance: Provenance
    proposers: tuple[str, ...] = ()
    agreement: float = 0.0
    probability: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and, as far as there is one, its answer."""

    question: str
    answer: str = ""
    finish_reason: FinishReason | None = None
    """None while it is being answered, and where no answer came about."""
    note: str = ""
    """Why the answer ended early, or why there is none."""
    model: str = ""
    """What answered."""
    tokens: tuple[AnswerToken, ...] = ()
    thinking: str = ""
    """The thought that preceded the answer; no part of it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, under an identity."""

    id: str
    turns: tuple[Turn, ...] = ()
    system_prompt: str = ""
    title: str = ""
    """Given by the user; empty: the beginning of the first question."""

    @property
    def name(self) -> str:
        """What it is called."""
        return self.title or (title_of(self.turns[0].question) if self.turns else "New chat")

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


@dataclass(frozen=True, slots=True)
class Entry:
    """A conversation in the list."""

    id: str
    name: str
    changed_at: float


@dataclass(frozen=True, slots=True)
class Listing:
    """The newest of the conversations that were looked for."""

    entries: tuple[Entry, ...] = ()
    older: int = 0
    """How many more were found, all older than these."""


def title_of(question: str) -> str:
    """The beginning of a question, on one line."""
    line = " ".join(question.split())
    return line if len(line) <= TITLE_CHARACTERS else line[: TITLE_CHARACTERS - 1].rstrip() + "…"


class Conversations:
    """Keeps conversations in a file, or in memory as long as it lives."""

    def __init__(self, path: Path | None = None) -> None:
        """Args:
        path: The file; made when it is not there. None keeps everything in memory.

        Raises:
            EnvironmentProblem: the file cannot be used.
        """
        self._lock = threading.RLock()
        self._cache: OrderedDict[str, Conversation] = OrderedDict()
        self.revision = 0
        """Changes whenever the list may have."""
        try:
            self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, timeout=10)
            self._prepare()
        except sqlite3.Error as error:
            raise EnvironmentProblem(
                f"the conversations in {path} cannot be opened ({error}); move the file away to begin with none"
            ) from error
        self._claim = filelock.FileLock(f"{path}.lock", blocking=False) if path else None
        if self._claims_alone():
            self._recover()

    def create(self) -> Conversation:
        """A new conversation without turns; it is listed once it has one."""
        conversation = Conversation(uuid.uuid4().hex)
        now = time.time()
        with self._writing() as database:
            database.execute(
                "INSERT INTO conversations (id, created_at, changed_at) VALUES (?, ?, ?)", (conversation.id, now, now)
            )
        return self._remember(conversation)

    def get(self, conversation_id: str) -> Conversation | None:
        with self._lock:
            known = self._cache.get(conversation_id)
            if known is not None:
                self._cache.move_to_end(conversation_id)
                return known
            row = self._database.execute(
                "SELECT title, system_prompt FROM conversations WHERE id = ?", (conversation_id,)
            ).fetchone()
            if row is None:
                return None
            turns = self._database.execute(
                "SELECT question, answer, finish_reason, note, model, tokens, thinking FROM turns "
                "WHERE conversation = ? ORDER BY number",
                (conversation_id,),
            ).fetchall()
            return self._remember(Conversation(conversation_id, tuple(map(_turn_of, turns)), row[1], row[0]))

    def find(self, words: str = "", limit: int = LISTED_AT_FIRST) -> Listing:
        """Conversations that have a turn and whose title, questions or answers hold all the words; newest first."""
        condition = (
            "(c.title LIKE ? ESCAPE '\\' OR EXISTS (SELECT 1 FROM turns t WHERE t.conversation = c.id "
            "AND (t.question LIKE ? ESCAPE '\\' OR t.answer LIKE ? ESCAPE '\\')))"
        )
        patterns = [f"%{_escaped(word)}%" for word in words.split()]
        where = "".join(f" AND {condition}" for _ in patterns)
        with self._lock:
            rows = self._database.execute(
                "SELECT c.id, c.title, c.changed_at, first.question, COUNT(*) OVER () FROM conversations c "
                "JOIN turns first ON first.conversation = c.id AND first.number = 0 "
                f"WHERE 1{where} ORDER BY c.changed_at DESC LIMIT ?",
                (*(pattern for pattern in patterns for _ in range(3)), limit),
            ).fetchall()
        entries = tuple(Entry(row[0], row[1] or title_of(row[3]), row[2]) for row in rows)
        return Listing(entries, rows[0][4] - len(rows) if rows else 0)

    def rename(self, conversation_id: str, title: str) -> None:
        """Give it a title; an empty one leaves it to the first question."""
        with self._writing() as database:
            conversation = self.get(conversation_id)
            if conversation is not None:
                database.execute("UPDATE conversations SET title = ? WHERE id = ?", (title.strip(), conversation_id))
                self._remember(replace(conversation, title=title.strip()))

    def add_turn(
        self, conversation_id: str, question: str, system_prompt: str, replaced: int | None = None
    ) -> int | None:
        """Append a question; returns the turn's index, or None when the conversation is gone.

        Args:
            conversation_id: Of the conversation.
            question: What is asked.
            system_prompt: What the model is told before the conversation.
            replaced: Turns from this index on go, in the same transaction; None keeps all.
        """
        with self._writing() as database:
            conversation = self.get(conversation_id)
            if conversation is None:
                return None
            kept = conversation.turns[:replaced]
            number = len(kept)
            for table in ("turns", "batches"):
                database.execute(
                    f"DELETE FROM {table} WHERE conversation = ? AND number >= ?", (conversation_id, number)
                )
            database.execute(
                "INSERT INTO turns (conversation, number, question) VALUES (?, ?, ?)",
                (conversation_id, number, question),
            )
            database.execute(
                "UPDATE conversations SET system_prompt = ?, changed_at = ? WHERE id = ?",
                (system_prompt, time.time(), conversation_id),
            )
            turns = (*kept, Turn(question))
            self._remember(replace(conversation, turns=turns, system_prompt=system_prompt))
            return number

    def set_turn(self, conversation_id: str, index: int, turn: Turn) -> None:
        """Replace a turn, and what was appended to it; nothing happens when it is gone."""
        with self._writing() as database:
            conversation = self.get(conversation_id)
            if conversation is None or index >= len(conversation.turns):
                return
            _write_turn(database, conversation_id, index, turn)
            turns = (*conversation.turns[:index], turn, *conversation.turns[index + 1 :])
            self._remember(replace(conversation, turns=turns))

    def append(self, conversation_id: str, index: int, text: str, tokens: Sequence[AnswerToken]) -> None:
        """Keep one more batch of an answer that is not over."""
        with self._writing() as database, contextlib.suppress(sqlite3.IntegrityError):  # it was deleted meanwhile
            database.execute(
                "INSERT INTO batches (conversation, number, text, tokens) VALUES (?, ?, ?, ?)",
                (conversation_id, index, text, _tokens_text(tokens)),
            )

    def delete(self, conversation_id: str) -> None:
        with self._writing() as database:
            database.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
            self._cache.pop(conversation_id, None)
            self.revision += 1

    def pieces(self, conversation_id: str, target: str) -> tuple[Piece, ...]:
        """Which tokens stand for which text, as a target knew it; empty when it was another one."""
        with self._lock:
            row = self._database.execute(
                "SELECT pieces FROM pieces WHERE conversation = ? AND target = ?", (conversation_id, target)
            ).fetchone()
        return tuple(Piece(text, tuple(ids), bool(answer)) for text, ids, answer in json.loads(row[0])) if row else ()

    def keep_pieces(self, conversation_id: str, target: str, pieces: Sequence[Piece]) -> None:
        document = json.dumps([[piece.text, piece.tokens, piece.is_answer] for piece in pieces])
        with self._writing() as database, contextlib.suppress(sqlite3.IntegrityError):  # it was deleted meanwhile
            database.execute("REPLACE INTO pieces VALUES (?, ?, ?)", (conversation_id, target, document))

    def close(self) -> None:
        with self._lock:
            self._database.close()
        if self._claim is not None:
            self._claim.release()

    def _claims_alone(self) -> bool:
        """Whether no other Quorum has the file open, whose running answers must be left alone."""
        if self._claim is None:
            return True
        try:
            self._claim.acquire()
        except filelock.Timeout:
            return False
        return True

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL")
        # A killed process loses nothing; a power cut may lose the last moments, and never the file.
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute("PRAGMA foreign_keys = ON")
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"it was written by another version of Quorum, format {version}")

    def _recover(self) -> None:
        """Fold what a killed process left into its turns, and drop conversations that nobody began."""
        with self._writing() as database:
            left = database.execute("SELECT DISTINCT conversation, number FROM batches").fetchall()
            for conversation_id, number in left:
                conversation = self.get(conversation_id)
                if conversation is not None and number < len(conversation.turns):
                    self._fold(database, conversation, number)
            database.execute("DELETE FROM batches")
            database.execute("DELETE FROM conversations WHERE id NOT IN (SELECT conversation FROM turns)")

    def _fold(self, database: sqlite3.Connection, conversation: Conversation, number: int) -> None:
        batches = database.execute(
            "SELECT text, tokens FROM batches WHERE conversation = ? AND number = ? ORDER BY rowid",
            (conversation.id, number),
        ).fetchall()
        turn = conversation.turns[number]
        text = "".join(batch[0] for batch in batches)
        tokens = tuple(token for batch in batches for token in _tokens_of(batch[1]))
        said = "".join(token.text for token in tokens)
        self.set_turn(
            conversation.id,
            number,
            replace(
                turn,
                thinking=turn.thinking + said.removesuffix(text),
                answer=turn.answer + text,
                tokens=turn.tokens + tokens,
                note=INTERRUPTED,
            ),
        )
        row = database.execute(
            "SELECT target, pieces FROM pieces WHERE conversation = ?", (conversation.id,)
        ).fetchone()
        if row is not None:
            pieces = [*json.loads(row[1]), [text, [token.id for token in tokens], True]]
            database.execute("REPLACE INTO pieces VALUES (?, ?, ?)", (conversation.id, row[0], json.dumps(pieces)))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction; those inside it are part of it."""
        with self._lock:
            if self._database.in_transaction:
                yield self._database
                return
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database

    def _remember(self, conversation: Conversation) -> Conversation:
        with self._lock:
            self.revision += 1
            self._cache[conversation.id] = conversation
            self._cache.move_to_end(conversation.id)
            while len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        return conversation


def _write_turn(database: sqlite3.Connection, conversation_id: str, index: int, turn: Turn) -> None:
    database.execute(
        "UPDATE turns SET question = ?, answer = ?, finish_reason = ?, note = ?, model = ?, tokens = ?, thinking = ? "
        "WHERE conversation = ? AND number = ?",
        (
            turn.question,
            turn.answer,
            turn.finish_reason.value if turn.finish_reason else None,
            turn.note,
            turn.model,
            _tokens_text(turn.tokens),
            turn.thinking,
            conversation_id,
            index,
        ),
    )
    database.execute("DELETE FROM batches WHERE conversation = ? AND number = ?", (conversation_id, index))
    database.execute("UPDATE conversations SET changed_at = ? WHERE id = ?", (time.time(), conversation_id))


def _turn_of(row: tuple[Any, ...]) -> Turn:
    question, answer, reason, note, model, tokens, thinking = row
    return Turn(question, answer, FinishReason(reason) if reason else None, note, model, _tokens_of(tokens), thinking)


def _tokens_text(tokens: Sequence[AnswerToken]) -> str:
    return json.dumps(
        [
            [
                token.id,
                token.text,
                token.provenance.value,
                token.proposers,
                round(token.agreement, 4),
                round(token.probability, 4),
            ]
            for token in tokens
        ],
        ensure_ascii=False,
        separators=(",", ":"),
    )


def _tokens_of(text: str) -> tuple[AnswerToken, ...]:
    return tuple(
        AnswerToken(number, shown, Provenance(origin), tuple(proposers), agreement, probability)
        for number, shown, origin, proposers, agreement, probability in json.loads(text)
    )


def _escaped(word: str) -> str:
    """As a LIKE pattern that finds the word itself."""
    return word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
