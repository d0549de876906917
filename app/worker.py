"""The jobs themselves: loading a set and answering with it. One thread makes, uses and closes everything here."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from app.api.desk import IS_COMPARED, IS_EXCHANGED, Desk
from app.bench.prompts import read_prompts
from app.bench.rounds import prompt_tokens
from app.comparison import Comparison
from app.conversations import Conversations
from app.jobs import Check, JobState, Load, PhaseReport, Verify
from app.run import Run, RunSnapshot
from app.sessions import SessionPool
from app.trace import TracedStep, traced
from app.verification import samplings, sentences, speculations, spread, verify
from engine.config import SetConfig, Speculation
from engine.errors import IncompatibleDrafter, QuorumError
from engine.exactness import ExactnessReport, probe
from engine.insight import Insight, insight
from engine.loader import FREE_DRAFTERS, LoadedSet
from engine.runtime.model import LoadCancelled
from engine.runtime.template import Message
from engine.transcript import Piece
from engine.types import FinishReason, StepDone
from models.gguf_file import read_header
from models.pairing import explain

INSIGHT_INTERVAL_S = 1.0
VERIFIED_PROMPTS = 4
VERIFIED_TOKENS = 48


class NotReady(QuorumError):
    """What was asked for cannot be done now; the message says what has to come first."""


@dataclass(frozen=True, slots=True)
class LoadedFacts:
    """What is loaded, as plain data."""

    config: SetConfig
    context_tokens: int
    drafters: tuple[str, ...]
    has_thinking_switch: bool = False
    """Whether the model can be told to think first, or not to."""
    exactness: str = ""
    """How exact drafting is with it, in a clause."""

    @property
    def name(self) -> str:
        return self.config.target.stem


class Worker:
    """Owns the loaded set and the sessions on it."""

    def __init__(self, conversations: Conversations, desk: Desk) -> None:
        self._conversations = conversations
        self._desk = desk
        self._loaded: LoadedSet | None = None
        self._sessions: SessionPool | None = None
        self._has_learnt = False
        self.facts: LoadedFacts | None = None
        """What is loaded; this and what follows may be read from any thread."""
        self.insight: Insight | None = None
        """What the loaded set has measured and learnt."""
        self.exactness: ExactnessReport | None = None
        """What the last check of the loaded set found."""
        self.trace: tuple[TracedStep, ...] = ()
        """The last steps of the last answer."""

    def load(self, job: Load) -> None:
        """Exchange the loaded set. When that fails, the set before it is loaded again.

        Raises:
            QuorumError: the new set cannot be loaded.
            LoadCancelled: the job was cancelled.
        """
        config = job.prepare(self._beside(job.report), job.cancelled)
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
            model = self.facts.name if self.facts else ""
            kept = replace(
                turn,
                answer=answer.text,
                finish_reason=answer.finish_reason,
                note=note,
                model=model,
                tokens=answer.tokens,
                thinking=turn.thinking if run.begun else answer.thinking,
            )
            self._conversations.set_turn(run.conversation_id, run.turn, kept)
        return JobState.CANCELLED if answer.finish_reason is FinishReason.CANCELLED else JobState.DONE

    def check(self, job: Check) -> None:
        """Measure how exact the loaded set is.

        Raises:
            QuorumError: no set is loaded, or llama.cpp refused a pass.
            LoadCancelled: the job was cancelled.
        """
        if self._loaded is None:
            raise NotReady("no model is loaded; choose one and load it, then check it")

        beside = self._beside(job.report)

        def report(share: float) -> None:
            if job.cancelled.is_set():
                raise LoadCancelled("the check was stopped")
            beside("Comparing batches with single tokens", share)

        self.exactness = probe(self._loaded.context, is_thorough=True, progress=report)

    def verify(self, job: Verify) -> None:
        """Answer shipped prompts with and without drafts, and compare.

        Raises:
            QuorumError: no set is loaded, or llama.cpp refused a pass.
        """
        if self._loaded is None or self._sessions is None:
            raise NotReady("no model is loaded; choose one and load it, then verify it")
        loaded = self._loaded
        room = loaded.context.context_tokens - VERIFIED_TOKENS
        fitting = [prompt for prompt in read_prompts() if len(prompt_tokens(loaded, prompt)) <= room]
        ways = speculations(Speculation())
        prompts = spread(fitting, VERIFIED_PROMPTS)
        found = verify(loaded, prompts, samplings(), ways, VERIFIED_TOKENS, job.report, job.cancelled, self.attend)
        job.outcome = tuple(sentences(loaded, found))
        job.is_identical = not found.divergences if found.comparisons else None
        self._has_learnt = True

    def compare(self, job: Comparison) -> None:
        """Compare drafter sets on the loaded target; the loaded set is put away for it, and loaded again.

        Raises:
            QuorumError: no set is loaded, or something the user can mend stood in the way.
            LoadCancelled: the job was cancelled while loading.
        """
        if self._loaded is None:
            raise NotReady("no model is loaded; choose one and load it, then compare")
        config = self._loaded.config
        plan = job.request.plan(config)
        # The loaded set goes on without its files where they were removed meanwhile; one that is put away does not.
        check(replace(config, drafters=tuple({*config.drafters, *plan.drafter_specs.values()})))
        self.close(IS_COMPARED)
        try:
            job.run(config)
        finally:
            self._open(config, job.report, None)

    def attend(self) -> bool:
        """Work on the requests of other programs for one round; false when there was nothing to do."""
        has_worked = self._desk.attend()
        self._has_learnt |= has_worked
        return has_worked

    def _beside(self, report: PhaseReport) -> PhaseReport:
        """A report that also lets other programs' requests go on, for as long as went by since the last one."""
        last = time.monotonic()

        def report_and_attend(phase: str, share: float) -> None:
            nonlocal last
            report(phase, share)
            turn_s = time.monotonic() - last
            last = time.monotonic()
            while self.attend() and time.monotonic() - last < turn_s:
                pass
            last = time.monotonic()

        return report_and_attend

    def rest(self) -> None:
        """Nothing to do for now: keep what was learnt about this machine."""
        if self._loaded is not None and self._has_learnt:
            self._has_learnt = False
            self._loaded.save_learnt()

    def close(self, reason: str = IS_EXCHANGED) -> None:
        """Free sessions and set.

        Args:
            reason: Told to those whose requests end by it.
        """
        self._desk.close(reason)
        self.facts = None
        self.insight = None
        self.exactness = None
        if self._sessions is not None:
            self._sessions.close()
            self._sessions = None
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def _open(self, config: SetConfig, report: PhaseReport, cancel: threading.Event | None) -> None:
        self._loaded = LoadedSet.load(config, report, cancel)
        self._sessions = SessionPool(self._loaded, self._recall)
        self.insight = insight(self._loaded)
        self.facts = LoadedFacts(
            config,
            self._loaded.context.context_tokens,
            self._loaded.panel.names,
            self._loaded.template.has_thinking_switch,
            self._loaded.setting.badge,
        )
        self._desk.open(self._loaded)

    def _go_back(self, config: SetConfig, report: PhaseReport, error: Exception) -> None:
        def report_return(phase: str, share: float) -> None:
            report(f"Going back. {phase}", share)

        try:
            self._open(config, report_return, None)
        except QuorumError as second:
            raise NotReady(f"{error}; and the set before it could not be loaded again: {second}") from second

    def _generate(self, sessions: SessionPool, run: Run, messages: tuple[Message, ...]) -> None:
        session = sessions.session(run.conversation_id)
        target = str(sessions.target)
        is_prompt_kept = False
        looked_at = 0.0
        settings = run.settings
        if self.facts is not None and not self.facts.has_thinking_switch:
            settings = replace(settings, thinking=None)  # it was set for another model
        try:
            for event in session.chat(messages, settings, run.cancelled, run.begun):
                batch = run.record(event)
                self._has_learnt = True
                if isinstance(event, StepDone):
                    if not is_prompt_kept:
                        # What a killed process leaves of the answer is put behind this.
                        self._conversations.keep_pieces(run.conversation_id, target, session.remembered)
                        is_prompt_kept = True
                    self._conversations.append(run.conversation_id, run.turn, event.text, batch)
                now = time.monotonic()
                if now - looked_at >= INSIGHT_INTERVAL_S:
                    looked_at = now
                    self._look(run)
                if not run.is_read:
                    run.abandon()
                self.attend()
            self._conversations.keep_pieces(run.conversation_id, target, session.remembered)
            self._look(run)
        except QuorumError:
            raise
        except Exception:
            # Its state is unknown now; the next question makes a new one.
            sessions.drop(run.conversation_id)
            raise

    def _look(self, run: Run) -> None:
        assert self._loaded is not None
        answer = run.peek()
        metrics = answer.metrics
        rule = run.settings.speculation.weights
        used = metrics.prompt_tokens + metrics.emitted if metrics else 0
        self.insight = insight(self._loaded, used, rule, metrics.acceptance_rate if metrics else None)
        text = self._loaded.model.vocabulary.text
        self.trace = tuple(traced(event, text) for event in run.traced)

    def _recall(self, conversation_id: str) -> tuple[Piece, ...]:
        """What is kept of a conversation's tokens, as far as they still read as they did."""
        assert self._loaded is not None
        pieces = self._conversations.pieces(conversation_id, str(self._loaded.config.target))
        text = self._loaded.model.vocabulary.text
        good = itertools.takewhile(lambda piece: not piece.is_answer or text(piece.tokens) == piece.text, pieces)
        return tuple(good)

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
        if not verdict.is_compatible and not config.translates:
            raise IncompatibleDrafter(f"{verdict.reason}. {verdict.suggestion}".rstrip(". ") + ".")


def note_on(answer: RunSnapshot, context_tokens: int) -> str:
    """Why an answer ended and what the model was not told, where that is worth a word."""
    parts = [_end_of(answer, context_tokens)]
    if answer.dropped_messages:
        parts.append(f"the {answer.dropped_messages} oldest messages had no room in the context and were left out")
    if answer.rewritten_tokens:
        parts.append(
            f"{answer.rewritten_tokens} tokens of the conversation were read anew, since the model's template "
            "now writes them differently"
        )
    return "; ".join(filter(None, parts))


def _end_of(answer: RunSnapshot, context_tokens: int) -> str:
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
