"""The jobs themselves: loading a set and answering with it. One thread makes, uses and closes everything here."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from app.conversations import Conversations
from app.jobs import JobState, Load, PhaseReport
from app.run import Run, RunSnapshot
from app.sessions import SessionPool
from engine.config import SetConfig
from engine.errors import IncompatibleDrafter, QuorumError
from engine.loader import FREE_DRAFTERS, LoadedSet
from engine.runtime.model import LoadCancelled
from engine.runtime.template import Message
from engine.transcript import Piece
from engine.types import FinishReason
from models.gguf_file import read_header
from models.pairing import explain


class NotReady(QuorumError):
    """What was asked for cannot be done now; the message says what has to come first."""


@dataclass(frozen=True, slots=True)
class LoadedFacts:
    """What is loaded, as plain data."""

    config: SetConfig
    context_tokens: int
    drafters: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.config.target.stem


class Worker:
    """Owns the loaded set and the sessions on it."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._loaded: LoadedSet | None = None
        self._sessions: SessionPool | None = None
        self._remembered: tuple[Path | None, Mapping[str, tuple[Piece, ...]]] = (None, {})
        """A target, and the tokens it knew of conversations when its set was closed."""
        self._has_learnt = False
        self.facts: LoadedFacts | None = None
        """What is loaded; may be read from any thread."""

    def load(self, job: Load) -> None:
        """Exchange the loaded set. When that fails, the set before it is loaded again.

        Raises:
            QuorumError: the new set cannot be loaded.
            LoadCancelled: the job was cancelled.
        """
        config = job.prepare(job.report, job.cancelled)
        check(config)
        previous = self._loaded.config if self._loaded else None
        self.close()
        try:
            self._open(config, job.report, job.cancelled)
        except (QuorumError, LoadCancelled) as error:
            if previous is not None:
                self._go_back(previous, job.report, error)
            raise

    def answer(self, run: Run) -> JobState:
        """Answer the question of a run, and keep the answer in its conversation.

        Raises:
            QuorumError: no set is loaded, or the engine could not answer; what there is of an answer is kept.
        """
        conversation = self._conversations.get(run.conversation_id)
        if conversation is None:
            return JobState.CANCELLED
        turn = conversation.turns[run.turn]
        note = "the answer broke off; the terminal has details"
        try:
            if self._sessions is None:
                raise NotReady("no model is loaded; choose one and load it, then try again")
            self._close_gone(self._sessions)
            self._generate(self._sessions, run, conversation.messages(run.turn))
            note = note_on(run.peek(), self._sessions.context_tokens)
        except QuorumError as error:
            note = str(error)
            raise
        finally:
            answer = run.peek()
            kept = replace(turn, answer=answer.text, finish_reason=answer.finish_reason, note=note)
            self._conversations.set_turn(run.conversation_id, run.turn, kept)
        return JobState.CANCELLED if answer.finish_reason is FinishReason.CANCELLED else JobState.DONE

    def rest(self) -> None:
        """Nothing to do for now: keep what was learnt about this machine."""
        if self._loaded is not None and self._has_learnt:
            self._has_learnt = False
            self._loaded.save_costs()

    def close(self) -> None:
        """Free sessions and set."""
        self.facts = None
        if self._loaded is not None and self._sessions is not None:
            self._sessions.close()
            self._remembered = (self._loaded.config.target, self._sessions.remembered)
            self._sessions = None
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def _open(self, config: SetConfig, report: PhaseReport, cancel: threading.Event | None) -> None:
        self._loaded = LoadedSet.load(config, report, cancel)
        target, remembered = self._remembered
        self._sessions = SessionPool(self._loaded, remembered if target == config.target else {})
        self.facts = LoadedFacts(config, self._loaded.context.context_tokens, self._loaded.panel.names)

    def _go_back(self, config: SetConfig, report: PhaseReport, error: Exception) -> None:
        def report_return(phase: str, share: float) -> None:
            report(f"Going back. {phase}", share)

        try:
            self._open(config, report_return, None)
        except QuorumError as second:
            raise NotReady(f"{error}; and the set before it could not be loaded again: {second}") from second

    def _generate(self, sessions: SessionPool, run: Run, messages: tuple[Message, ...]) -> None:
        session = sessions.session(run.conversation_id)
        try:
            for event in session.chat(messages, run.settings, run.cancelled):
                run.record(event)
                self._has_learnt = True
                if not run.is_read:
                    run.abandon()
        except QuorumError:
            raise
        except Exception:
            # Its state is unknown now; the next question makes a new one.
            sessions.drop(run.conversation_id)
            raise

    def _close_gone(self, sessions: SessionPool) -> None:
        for conversation_id in sessions.conversation_ids:
            if self._conversations.get(conversation_id) is None:
                sessions.drop(conversation_id)


def check(config: SetConfig) -> None:
    """Find what is wrong with a set without loading weights, so that the loaded set can stay when there is something.

    Raises:
        QuorumError: a file cannot be used, or a drafter does not fit the target.
    """
    read_header(config.target)
    for drafter in config.drafters:
        if drafter in FREE_DRAFTERS:
            continue
        verdict = explain(config.target, Path(drafter))
        if not verdict.is_compatible:
            raise IncompatibleDrafter(f"{verdict.reason}. {verdict.suggestion}".rstrip(". ") + ".")


def note_on(answer: RunSnapshot, context_tokens: int) -> str:
    """Why an answer ended, where that is worth a word."""
    if answer.finish_reason is FinishReason.CANCELLED:
        return "stopped, since no page was reading" if answer.is_abandoned else "stopped"
    if answer.finish_reason is FinishReason.LENGTH:
        return "ended at the limit of tokens that was set"
    if answer.finish_reason is FinishReason.CONTEXT:
        return (
            f"ended because the context of {context_tokens} tokens is full; "
            "start a new chat, or load the model with a larger context"
        )
    return "" if answer.text else "the model ended its turn without a word"
