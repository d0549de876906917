"""The last steps of an answer, as plain data: what was proposed, voted, sent, and what the target said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.types import StepDone

TextOf = Callable[[Sequence[int]], str]
"""Token ids to the text they read as."""


@dataclass(frozen=True, slots=True)
class TracedToken:
    """One token of a draft or of the answer."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class TracedDraft:
    """What one drafter proposed."""

    drafter: str
    tokens: tuple[TracedToken, ...]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step."""

    context_tokens: int
    """Committed tokens after it."""
    reason: str
    """Why it had the length it had."""
    drafts: tuple[TracedDraft, ...]
    voted: tuple[TracedToken, ...]
    winner: str
    agreement: tuple[float, ...]
    sent: int
    accepted: int
    emitted: tuple[TracedToken, ...]
    origins: tuple[str, ...]
    look_ahead: str
    milliseconds: dict[str, float]


def traced(event: StepDone, text: TextOf) -> TracedStep:
    """A step as it can be shown and taken away."""

    def tokens(ids: Sequence[int]) -> tuple[TracedToken, ...]:
        return tuple(TracedToken(number, text([number])) for number in ids)

    step, times = event.step, event.step.times
    parts = ("plan", "draft", "vote", "verify", "sample", "other")
    return TracedStep(
        context_tokens=step.context_tokens,
        reason=step.reason,
        drafts=tuple(TracedDraft(draft.source, tokens(draft.tokens)) for draft in step.drafts),
        voted=tokens(step.voted.tokens),
        winner=step.winner,
        agreement=step.agreement,
        sent=step.verified,
        accepted=step.accepted,
        emitted=tokens([token.id for token in event.tokens]),
        origins=tuple(token.provenance.value for token in event.tokens),
        look_ahead=step.look_ahead,
        milliseconds={part: round(getattr(times, f"{part}_ms"), 3) for part in parts},
    )
