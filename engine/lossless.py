"""Is a drafted answer the target's own? The same prompt answered plainly and with drafts, compared token by token."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.config import GenerationSettings, Policy, PolicyKind, Sampling, Speculation
from engine.loader import LoadedSet
from engine.runtime.context import FloatRows
from engine.session import Session
from engine.types import Finished, FinishReason, GenerationEvent, StepDone

CLOSE_MARGIN = 0.5
"""Where the two most probable tokens lie closer than this, in logits, inexact arithmetic may exchange them."""


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """What the target alone says, and how sure it is of every token."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    """For each choice, the end of the answer included: by how much the most probable token leads, in logits."""

    @property
    def close_calls(self) -> int:
        """Choices in which the two most probable tokens are nearly equal."""
        return sum(margin < CLOSE_MARGIN for margin in self.margins)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place at which two answers differ. None stands for the end of an answer."""

    position: int
    """In the answer; its first token has position 0."""
    plain_token: int | None
    drafted_token: int | None
    margin: float
    """The target's, as in `PlainAnswer`."""


def margin(logits: FloatRows) -> float:
    """Difference of the two greatest of some logits, shape (vocabulary,)."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


def first_divergence(plain: PlainAnswer, drafted: Sequence[int]) -> Divergence | None:
    """Compare an answer with the plain one; None when they are identical."""
    for position in range(max(len(plain.tokens), len(drafted))):
        ours = plain.tokens[position] if position < len(plain.tokens) else None
        theirs = drafted[position] if position < len(drafted) else None
        if ours != theirs:
            return Divergence(position, ours, theirs, plain.margins[position])
    return None


def answer_plainly(
    loaded: LoadedSet,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    cancel: threading.Event,
    between: Callable[[], object] = lambda: None,
) -> PlainAnswer | None:
    """Answer without drafts, in a session of its own; None when cancelled.

    Args:
        between: Called after each step.
    """
    settings = GenerationSettings(sampling, Speculation(Policy(PolicyKind.OFF)), max_tokens)
    session = Session(loaded)
    margins: list[float] = []
    try:
        for event in session.generate(prompt, settings, cancel):
            if isinstance(event, StepDone):
                margins.append(margin(loaded.context.logits()[-1]))
            between()
    finally:
        session.close()
    assert isinstance(event, Finished)
    return None if event.reason is FinishReason.CANCELLED else PlainAnswer(event.token_ids, tuple(margins))


def answer_drafted(
    loaded: LoadedSet,
    prompt: Sequence[int],
    sampling: Sampling,
    speculation: Speculation,
    max_tokens: int,
    cancel: threading.Event,
    between: Callable[[], object] = lambda: None,
) -> Finished | None:
    """Answer with drafts, in a session of its own; None when cancelled.

    Args:
        between: Called after each step.
    """
    session = Session(loaded)
    last: GenerationEvent | None = None
    try:
        for event in session.generate(prompt, GenerationSettings(sampling, speculation, max_tokens), cancel):
            last = event
            between()
    finally:
        session.close()
    assert isinstance(last, Finished)
    return None if last.reason is FinishReason.CANCELLED else last
