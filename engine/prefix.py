"""How far two texts agree, in tokens."""

from __future__ import annotations

from collections.abc import Sequence


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(left), len(right)))
