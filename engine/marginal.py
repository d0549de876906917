"""How many draft tokens each of several requests sends in one pass, by the marginal rule.

Tokens of all requests compete for places in the pass: the one most likely to be accepted comes first. So drafts shrink
as the batch grows, and the request that is easiest to foretell gets the longest. How many places there are is decided
over the measured cost of the whole pass, none included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def share_out(
    survivals: Sequence[Sequence[float]], expected_tokens: float, pass_ms: Callable[[int], float], most: int
) -> list[int]:
    """How many tokens of each draft to send, so that a round brings the most tokens for its time.

    Args:
        survivals: For each request, the probabilities that its draft's tokens, and all before them, are accepted: each
            at most the one before it.
        expected_tokens: What the pass brings without them.
        pass_ms: Time of the round by the number of these tokens that are sent.
        most: Of these tokens.
    """
    ranked = sorted(
        ((survival, request) for request, own in enumerate(survivals) for survival in own),
        key=lambda place: -place[0],
    )[:most]
    best_rate, best_count = expected_tokens / pass_ms(0), 0
    expected = expected_tokens
    for count, (survival, _) in enumerate(ranked, start=1):
        expected += survival
        rate = expected / pass_ms(count)
        if rate > best_rate:
            best_rate, best_count = rate, count
    counts = [0] * len(survivals)
    for _, request in ranked[:best_count]:
        counts[request] += 1
    return counts
