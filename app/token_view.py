"""Answers token by token: where each came from, who proposed it, how sure and how agreed. Made from plain data."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app.conversations import AnswerToken, Turn
from app.run import RunSnapshot
from engine.types import Provenance

MOST_TOKENS = 3000
"""More than this would make the page slow; the latest are shown."""
MEANINGS = {
    Provenance.ACCEPTED: "drafted, and the target's own choice",
    Provenance.CORRECTED: "the target's choice in place of a rejected draft token",
    Provenance.BONUS: "the target's extra token after a draft accepted whole",
    Provenance.PLAIN: "the target's choice without a draft",
}


def token_view(turns: Sequence[Turn], running: RunSnapshot | None) -> str:
    """The answers of a conversation; the last one is taken from the running answer while there is one."""
    answers = [(turn.question, turn.tokens) for turn in turns]
    if running is not None and answers:
        answers[-1] = (answers[-1][0], running.tokens)
    left = MOST_TOKENS
    parts: list[str] = []
    for question, tokens in reversed(answers):
        shown = tokens[-left:] if left > 0 else ()
        left -= len(shown)
        parts.insert(0, _answer(question, shown, len(tokens)))
        if left <= 0:
            break
    body = "".join(parts) or '<p class="q-empty">Ask something; its tokens appear here as they come.</p>'
    return f"{_legend()}{body}"


def _legend() -> str:
    items = "".join(
        f'<li title="{escape(meaning)}"><span class="q-t" data-o="{origin.value}">{origin.value}</span></li>'
        for origin, meaning in MEANINGS.items()
    )
    return f'<ul class="q-legend" aria-label="Origins of tokens">{items}</ul>'


def _answer(question: str, tokens: Sequence[AnswerToken], in_all: int) -> str:
    counts = {origin: sum(token.provenance is origin for token in tokens) for origin in MEANINGS}
    facts = ", ".join(f"{count} {origin.value}" for origin, count in counts.items() if count)
    cut = f" (the last {len(tokens)})" if len(tokens) < in_all else ""
    spans = "".join(_token(token) for token in tokens)
    body = f'<p class="q-tokens">{spans}</p>' if spans else '<p class="q-small">No tokens are kept of this answer.</p>'
    return (
        f'<section class="q-answer"><h3>{escape(question)}</h3>{body}'
        f'<p class="q-small">{in_all} tokens{cut}{": " + facts if facts else ""}</p></section>'
    )


def _token(token: AnswerToken) -> str:
    about = f"{token.provenance.value}: {MEANINGS[token.provenance]}"
    if token.proposers:
        agreement = f"agreement {100 * token.agreement:.0f} %"
        about += (
            f"\nproposed by {', '.join(token.proposers)}"
            f"\n{agreement if token.agreement else 'on a side branch: the vote had gone to another token'}"
            f"\ndrafter's probability {100 * token.probability:.0f} %"
        )
    about += f"\ntoken {token.id}"
    text = escape(token.text) or "·"
    return f'<span class="q-t" data-o="{token.provenance.value}" title="{escape(about)}">{text}</span>'
