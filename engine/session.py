"""A conversation with a loaded set: tokens, sampler, stop rules, statistics; and the events of each answer.

The session owns the target's sequence and what is in it, and has the target's cache for itself while it computes: only
so does it say the same whatever other conversations there are. A new prompt keeps the longest common prefix with the
last one, in the target and in every drafter, and evaluates only what lies past it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from engine.answer import Answer
from engine.config import GenerationSettings, PolicyKind
from engine.drafting import Panel
from engine.errors import PromptError
from engine.invariants import CHECKS_VARIABLE, check_step
from engine.loader import LoadedSet
from engine.metrics import Ledger
from engine.pipeline import Pipeline
from engine.prefill import Part
from engine.prefix import shared_prefix
from engine.runtime.context import PassCancelled
from engine.runtime.sampler import Sampler
from engine.runtime.template import Message
from engine.transcript import Piece, Transcript
from engine.types import Finished, FinishReason, GenerationEvent, PrefillProgress

ANSWER_SHARE = 8
"""An answer is to have this part of the context, or the tokens it is limited to if that is less; the conversation's
oldest turns make room for it."""
KEPT_SHARE = 2
"""The part of the context that a conversation fills, at most, after turns were dropped."""


class Session:
    """One conversation. Used and closed by the thread that loaded the set; one generation at a time."""

    def __init__(self, loaded: LoadedSet, remembered: Sequence[Piece] = ()) -> None:
        """Args:
        loaded: The set that answers.
        remembered: What an earlier session of the same conversation, on the same target, knew of its tokens.
        """
        self._set = loaded
        self._context = loaded.context
        self._sequence = loaded.context.allocate()
        self._tokens: list[int] = []
        """Committed tokens; the target's cache holds a prefix of them."""
        self._is_checked = bool(os.environ.get(CHECKS_VARIABLE))
        self._transcript = Transcript(self._tokenize, remembered)
        self._said = ""
        """What the last answer reads as, with its thought."""
        self._dropped: tuple[Message, ...] = ()
        """The oldest messages that the last prompt left out."""
        self._expected = _Expected()

    @property
    def remembered(self) -> tuple[Piece, ...]:
        """Which tokens stand for which text so far; outlives the session."""
        return self._transcript.pieces

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything committed: the last prompt and its answer."""
        return tuple(self._tokens)

    def chat(
        self, messages: Sequence[Message], settings: GenerationSettings, cancel: threading.Event, begun: str = ""
    ) -> Iterator[GenerationEvent]:
        """Answer a conversation; ends with exactly one `Finished` unless it raises.

        Args:
            messages: The whole conversation; its last message is the user's.
            settings: For this answer.
            cancel: Set to stop within one pass of the target.
            begun: What there is of the answer already; the events tell what comes after it.

        Raises:
            PromptError: the conversation is empty or does not fit in the context.
            SettingError: the grammar cannot be read, a biased token does not exist, or thinking has no switch.
            DecodeError: llama.cpp refused a pass; the session stays usable.
        """
        if not messages or not messages[-1].content.strip():
            raise PromptError("the message is empty; write something to answer")
        earlier, self._expected = self._expected, _Expected()
        prompt, starts_thinking = self._fit(messages, settings, begun)
        rewritten = (
            earlier.tokens - shared_prefix(self._tokens, prompt) if earlier.is_continued(messages, self._dropped) else 0
        )
        for event in self._generate(prompt, self._transcript.prompt_parts, settings, cancel, starts_thinking):
            if isinstance(event, Finished):
                if self._record_answer(event):
                    said = (*messages, Message("assistant", begun + event.text))
                    expected = min(len(prompt) + len(event.token_ids), len(self._tokens))
                    self._expected = _Expected(said, self._dropped, expected)
                event = replace(event, dropped_messages=len(self._dropped), rewritten_tokens=max(0, rewritten))
            yield event

    def generate(
        self, prompt: Sequence[int], settings: GenerationSettings, cancel: threading.Event
    ) -> Iterator[GenerationEvent]:
        """Continue a prompt given as tokens; as `chat` otherwise."""
        self._expected = _Expected()
        return self._generate(prompt, [(0, len(prompt))], settings, cancel, None)

    def _generate(
        self,
        prompt: Sequence[int],
        parts: Sequence[Part],
        settings: GenerationSettings,
        cancel: threading.Event,
        starts_thinking: bool | None,
    ) -> Iterator[GenerationEvent]:
        """Args:
        parts: Of the prompt, those that are no answer of the target.
        starts_thinking: Whether the prompt has opened a thought; None where there are no thoughts.
        """
        self._check(prompt)
        started = time.perf_counter()
        sampler = Sampler(settings.sampling, self._context.model.vocabulary, prompt, settings.top_log_probabilities)
        try:
            ledger = Ledger(len(prompt), self._rebase(prompt, parts))
            cancelled = False
            for done in self._prefill(prompt, cancel):
                cancelled = done is None
                if done is not None:
                    yield PrefillProgress(done, len(prompt))
            answer = Answer(self._set, settings, len(prompt), ledger, sampler, starts_thinking, started)
            if cancelled:
                self._said = ""
                yield answer.finish(FinishReason.CANCELLED)
                return
            self._tokens = list(prompt)
            panel = self._set.panel if settings.speculation.policy.kind is not PolicyKind.OFF else Panel(())
            panel.begin(self._tokens)
            pipeline = Pipeline(
                self._context,
                self._sequence,
                self._tokens,
                sampler,
                panel,
                self._set.learning,
                ledger,
                settings.speculation,
            )
            answer.attach(pipeline, panel)
            while True:
                reason = answer.limit_reached(len(self._tokens), self._context.context_tokens)
                result = None
                if reason is None:
                    self._context.hold_alone(self._sequence)
                    result = None if cancel.is_set() else pipeline.step(answer.remaining_tokens, cancel)
                    reason = FinishReason.CANCELLED if result is None else None
                if result is not None:
                    if self._is_checked:
                        check_step(self._context, self._sequence, self._tokens, panel, ended=result.ended)
                    yield answer.take(result)
                    reason = FinishReason.STOP if result.ended or answer.is_stopped else None
                if reason is not None:
                    finished = answer.finish(reason)
                    self._said = answer.said
                    if answer.is_stopped:
                        self._keep(len(prompt) + answer.token_count)
                    yield finished
                    return
        finally:
            sampler.close()

    def _keep(self, tokens: int) -> None:
        """Let the cache hold what plain decoding would after so many tokens, the last one pending."""
        length = self._context.length(self._sequence)
        self._context.truncate(self._sequence, min(length, tokens - 1))

    def close(self) -> None:
        """Free the sequence."""
        self._context.free(self._sequence)

    def _fit(
        self, messages: Sequence[Message], settings: GenerationSettings, begun: str
    ) -> tuple[list[int], bool | None]:
        """Tokens of the conversation, without as many of its oldest turns as must go to leave room for an answer;
        and whether they open a thought.

        Turns once dropped stay so while the conversation begins as it did, so that the cache can be used again.
        """
        system = next((at for at, message in enumerate(messages) if message.role != "system"), len(messages))
        first = system + len(self._dropped)
        if tuple(messages[system:first]) != self._dropped or first >= len(messages):
            first = system
        limit = self._context.context_tokens
        answer_room = min(limit // ANSWER_SHARE, settings.max_tokens or limit)
        most_tokens = limit - answer_room
        while True:
            rendered = self._set.template.render([*messages[:system], *messages[first:]], settings.thinking) + begun
            prompt = self._transcript.encode(rendered)
            later = (at for at in range(first + 1, len(messages)) if messages[at].role == "user")
            turn = next(later, None)
            if len(prompt) <= most_tokens or turn is None:
                self._dropped = tuple(messages[system:first])
                return prompt, self._set.template.opens_thought(rendered)
            first = turn
            # Once something has to go, enough goes for some more questions.
            most_tokens = limit // KEPT_SHARE

    def _record_answer(self, finished: Finished) -> bool:
        """A stop string may cut a token in two: what its first half says is left to be tokenised."""
        text = self._context.model.vocabulary.text(finished.token_ids)
        is_whole = self._said.startswith(text)
        if is_whole:
            self._transcript.record_answer(text, finished.token_ids)
        return is_whole

    def _tokenize(self, text: str, begins: bool) -> list[int]:
        adds_special = begins and not self._set.template.starts_with_bos(text)
        return self._context.model.vocabulary.tokenize(text, adds_special=adds_special)

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise PromptError("the prompt is empty; write something to answer")
        limit = self._context.context_tokens
        if len(prompt) >= limit:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and the context holds {limit}, its answer included; "
                "shorten it, start a new chat, or load the model with a larger context"
            )

    def _rebase(self, prompt: Sequence[int], parts: Sequence[Part]) -> int:
        """Cut the cache back to what the prompt can go on from; returns the tokens that stay."""
        self._context.hold_alone(self._sequence)
        self._context.tidy(self._sequence)
        cached = self._context.length(self._sequence)
        shared = min(shared_prefix(self._tokens, prompt), cached, len(prompt) - 1)
        return self._set.reader.begin(self._sequence, shared, parts)

    def _prefill(self, prompt: Sequence[int], cancel: threading.Event) -> Iterator[int | None]:
        """Read all of the prompt but its last token; yields tokens done, or None once when cancelled."""
        try:
            yield from self._set.reader.read(self._sequence, prompt, len(prompt) - 1, cancel)
        except PassCancelled:
            yield None
        finally:
            self._tokens = list(prompt[: self._context.length(self._sequence)])


@dataclass(frozen=True, slots=True)
class _Expected:
    """A conversation with its last answer, and how many tokens of it a follow-up should find in the cache."""

    messages: tuple[Message, ...] = ()
    dropped: tuple[Message, ...] = ()
    tokens: int = 0

    def is_continued(self, messages: Sequence[Message], dropped: tuple[Message, ...]) -> bool:
        """Whether another conversation goes on from this one, with the same turns left out."""
        return self.dropped == dropped and tuple(messages[: len(self.messages)]) == self.messages
