"""One answer in the making: the pool's events as what a client is told, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.api.tools import CallReader
from engine.runtime.template import ToolCall
from engine.types import EmittedToken, Finished, FinishReason, GenerationEvent, StepDone


@dataclass(frozen=True, slots=True)
class Delta:
    """What an event adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[EmittedToken, ...] = ()
    texts: tuple[str, ...] = ()
    """What became readable by each token."""
    characters_before: int = 0
    """Of the content, before this."""
    calls_before: int = 0
    is_last: bool = False
    """Nothing comes after it."""


@dataclass(slots=True)
class Answer:
    """What there is of it so far."""

    index: int
    prompt_number: int = 0
    """Which of the request's prompts it answers."""
    reads_calls: bool = False
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[EmittedToken] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finished: Finished | None = None
    is_announced: bool = False
    """Whether a client that reads a stream was told that it begins."""
    _text: str = ""
    """What was read of its text, calls included."""
    _reader: CallReader = field(default_factory=CallReader)

    def take(self, event: GenerationEvent) -> Delta:
        """Add an event; returns what it brought."""
        if isinstance(event, StepDone):
            texts = event.token_texts
            return self._add(event.text, event.thinking, event.tokens[: len(texts)], texts)
        if isinstance(event, Finished):
            self.finished = event
            text = event.text[len(self._text) :]
            thinking = event.thinking[len(self.reasoning) :]
            return self._add(text, thinking, (), ())
        return Delta()

    def _add(self, text: str, reasoning: str, tokens: Sequence[EmittedToken], texts: Sequence[str]) -> Delta:
        self._text += text
        content = text
        calls: tuple[ToolCall, ...] = ()
        if self.reads_calls:
            parts = list(self._reader.push(text))
            content = "".join(part for part in parts if isinstance(part, str))
            calls = tuple(part for part in parts if isinstance(part, ToolCall))
            if self.finished is not None:
                content += self._reader.finish()
            if (self.calls or calls) and not content.strip():
                content = ""  # white space around calls is no content
        delta = Delta(
            content,
            reasoning,
            calls,
            tuple(tokens),
            tuple(texts),
            len(self.content),
            len(self.calls),
            self.finished is not None,
        )
        self.content += content
        self.reasoning += reasoning
        self.calls += calls
        self.tokens += tokens
        self.texts += texts
        return delta

    @property
    def end(self) -> Finished:
        """How it ended; only once it has."""
        assert self.finished is not None
        return self.finished

    @property
    def finish_reason(self) -> str | None:
        """In OpenAI's words; None while it goes on."""
        if self.finished is None:
            return None
        if self.calls:
            return "tool_calls"
        return "stop" if self.finished.reason is FinishReason.STOP else "length"
