"""Verification of chains: one batched pass over every pending token and the draft behind it, then token matching.

Token matching (accept a draft token while it equals the target's own choice) is lossless for any draft, a voted one
included: the emitted tokens are always the target's choices from its own sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.runtime.context import Context, Run
from engine.runtime.sampler import Sampler
from engine.types import Verdict


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft to be verified at the end of one sequence."""

    sequence: int
    pending: int
    """The last committed token, which enters the cache with this pass."""
    draft: tuple[int, ...]
    sampler: Sampler


@dataclass(frozen=True, slots=True)
class Verification:
    """Verdicts in the order of the candidates, and what they took."""

    verdicts: tuple[Verdict, ...]
    verify_ms: float
    sample_ms: float


def verify(context: Context, candidates: Sequence[Candidate], clock: Callable[[], float]) -> Verification:
    """Score all candidates in one pass and roll every sequence back to its accepted path.

    Afterwards a sequence holds the pending and the accepted draft tokens; the final token is the next pending one.

    Args:
        context: The target's.
        candidates: At most one for each sequence.
        clock: Gives seconds.

    Raises:
        DecodeError: the pass failed; all sequences are as before it.
    """
    runs = [
        Run(candidate.sequence, (candidate.pending, *candidate.draft), len(candidate.draft) + 1)
        for candidate in candidates
    ]
    started = clock()
    context.decode(runs)
    decoded = clock()
    verdicts: list[Verdict] = []
    first_output = 0
    for candidate in candidates:
        accepted, final = candidate.sampler.match(context, candidate.draft, first_output)
        verdicts.append(Verdict(accepted, final))
        first_output += len(candidate.draft) + 1
    for candidate, verdict in zip(candidates, verdicts, strict=True):
        rejected = len(candidate.draft) - verdict.accepted
        context.truncate(candidate.sequence, context.length(candidate.sequence) - rejected)
    return Verification(tuple(verdicts), (decoded - started) * 1e3, (clock() - decoded) * 1e3)
