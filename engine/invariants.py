"""What must hold between two steps, checked after every one of them where `QUORUM_CHECKS` is set, and in tests."""

from __future__ import annotations

from collections.abc import Sequence

from engine.drafting import Panel
from engine.runtime.context import Context

CHECKS_VARIABLE = "QUORUM_CHECKS"
"""Environment variable that has every step checked; for finding faults, not for speed."""


def check_step(context: Context, sequence: int, tokens: Sequence[int], panel: Panel, *, ended: bool) -> None:
    """Check the target's cache and every drafter against the committed tokens.

    Args:
        context: The target's.
        sequence: The conversation's.
        tokens: Committed.
        panel: The drafters that were told of them.
        ended: The answer has ended; its last token may then be in the cache, as it is pending no more.

    Raises:
        AssertionError: something does not hold; the message says what.
    """
    cached = context.length(sequence)
    stored = context.stored_length(sequence)
    assert cached == stored, f"{cached} tokens are counted in the cache and {stored} are in it"
    pending = len(tokens) - cached
    allowed = (0, 1) if ended else (1,)
    assert pending in allowed, f"{cached} of {len(tokens)} tokens are cached: {pending} pending instead of one"
    for drafter in (*panel.free, *panel.models):
        drafter.check(tokens)
