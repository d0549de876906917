"""The last steps of an answer, as plain data: what was proposed, voted, sent, and what the target said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.prefix import shared_prefix
from engine.types import Provenance, StepDone

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
class TracedBranch:
    """A side branch of the token tree that was sent."""

    fork: int
    """How many of the voted tokens come before it."""
    drafter: str
    is_second: bool
    """A drafter's second choice, rather than the first choice of one that lost the vote."""
    tokens: tuple[TracedToken, ...]
    accepted: int


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
    """Tokens sent to the target, those of side branches included."""
    sent_of_voted: int
    accepted: int
    accepted_of_voted: int
    branches: tuple[TracedBranch, ...]
    emitted: tuple[TracedToken, ...]
    origins: tuple[str, ...]
    look_ahead: str
    milliseconds: dict[str, float]


def traced(event: StepDone, text: TextOf) -> TracedStep:
    """A step as it can be shown and taken away."""

    def tokens(ids: Sequence[int]) -> tuple[TracedToken, ...]:
        return tuple(TracedToken(number, text([number])) for number in ids)

    step, times = event.step, event.step.times
    trunk = step.sent.trunk.tokens
    accepted = [token.id for token in event.tokens if token.provenance is Provenance.ACCEPTED]
    on_trunk = shared_prefix(accepted, trunk)
    beyond = accepted[on_trunk:]
    parts = ("plan", "draft", "vote", "verify", "sample", "other")
    return TracedStep(
        context_tokens=step.context_tokens,
        reason=step.reason,
        drafts=tuple(TracedDraft(draft.source, tokens(draft.tokens)) for draft in step.drafts),
        voted=tokens(step.voted.tokens),
        winner=step.winner,
        agreement=step.agreement,
        sent=step.verified,
        sent_of_voted=len(trunk),
        accepted=step.accepted,
        accepted_of_voted=on_trunk,
        branches=tuple(
            TracedBranch(
                branch.fork,
                branch.source,
                branch.is_second,
                tokens(branch.tokens),
                # No two branches that leave at one place begin with the same token.
                len(beyond) if branch.fork == on_trunk and beyond and branch.tokens[0] == beyond[0] else 0,
            )
            for branch in step.sent.branches
        ),
        emitted=tokens([token.id for token in event.tokens]),
        origins=tuple(token.provenance.value for token in event.tokens),
        look_ahead=step.look_ahead,
        milliseconds={part: round(getattr(times, f"{part}_ms"), 3) for part in parts},
    )
