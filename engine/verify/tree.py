"""Verification of token trees, chains among them: one batched pass over every pending token and what is drafted behind
it, then token matching.

Token matching (accept a draft token while it equals the target's own choice) is lossless for any draft, a voted one
included: the emitted tokens are always the target's choices from its own sampler.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.runtime.context import Context, Run
from engine.runtime.sampler import Sampler
from engine.types import Branch, TokenTree, Verdict
from engine.verify.sampled import Drawn, judge, trunk_of


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft, or a token tree, to be verified at the end of one sequence."""

    sequence: int
    pending: int
    """The last committed token, which enters the cache with this pass."""
    draft: tuple[int, ...]
    """The tree's trunk."""
    sampler: Sampler
    branches: tuple[Branch, ...] = ()
    drawn: Drawn | None = None
    """What the tree was made of, where its tokens were drawn and are to be judged as such."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Verdicts in the order of the candidates, and what they took."""

    verdicts: tuple[Verdict, ...]
    verify_ms: float
    sample_ms: float


def verify(
    context: Context, candidates: Sequence[Candidate], clock: Callable[[], float], reading: Sequence[Run] = ()
) -> Verification:
    """Score all candidates in one pass and roll every sequence back to its accepted path.

    Afterwards a sequence holds the pending and the accepted draft tokens; the final token is the next pending one.

    Args:
        context: The target's; it has a spare sequence for every branch.
        candidates: At most one for each sequence.
        clock: Gives seconds.
        reading: What else enters in the same pass, without outputs: of sequences that are no candidate's.

    Raises:
        DecodeError: the pass failed; all sequences are as before it.
    """
    started = clock()
    copies = [[context.copy(candidate.sequence) for _ in candidate.branches] for candidate in candidates]
    runs = [run for pair in zip(candidates, copies, strict=True) for run in _runs(*pair)]
    try:
        context.decode([*runs, *reading])
    except BaseException:
        for copy in itertools.chain.from_iterable(copies):
            context.free(copy)
        raise
    decoded = clock()
    verdicts: list[Verdict] = []
    first_output = 0
    for candidate in candidates:
        verdicts.append(_judge(context, candidate, first_output))
        first_output += 1 + len(candidate.draft) + sum(map(len, candidate.branches))
    for candidate, own_copies, verdict in zip(candidates, copies, verdicts, strict=True):
        _settle(context, candidate, own_copies, verdict)
    return Verification(tuple(verdicts), (decoded - started) * 1e3, (clock() - decoded) * 1e3)


def _runs(candidate: Candidate, copies: Sequence[int]) -> Iterator[Run]:
    """The trunk, each of its tokens shared with the branches that leave it later, then the branches."""
    trunk = (candidate.pending, *candidate.draft)
    forks = sorted({branch.fork + 1 for branch in candidate.branches} | {0, len(trunk)})
    for start, end in itertools.pairwise(forks):
        also = tuple(copy for branch, copy in zip(candidate.branches, copies, strict=True) if branch.fork >= end - 1)
        yield Run(candidate.sequence, trunk[start:end], end - start, also)
    for branch, copy in zip(candidate.branches, copies, strict=True):
        yield Run(copy, branch.tokens, len(branch))


def _judge(context: Context, candidate: Candidate, first_output: int) -> Verdict:
    """Follow the target's choices down the trunk, and down the branch that begins with what it chose instead."""
    if candidate.drawn is not None:
        distribution = candidate.sampler.distribution
        assert distribution is not None, "what is judged as drawn is drawn by the target too"
        logits = context.logits()
        tree = TokenTree(trunk_of(candidate.drawn.drafts), candidate.branches)
        return judge(lambda output: distribution.row(logits[first_output + output]), tree, candidate.drawn)
    accepted, final = candidate.sampler.match(context, candidate.draft, first_output)
    output = first_output + 1 + len(candidate.draft)
    for branch in candidate.branches:
        if branch.fork == accepted and branch.tokens[0] == final:
            more, final = candidate.sampler.match(context, branch.tokens[1:], output)
            return Verdict(accepted + 1 + more, final, branch)
        output += len(branch)
    return Verdict(accepted, final)


def _settle(context: Context, candidate: Candidate, copies: Sequence[int], verdict: Verdict) -> None:
    """Roll the sequence back to the accepted path, and free its branches."""
    sequence = candidate.sequence
    before = context.length(sequence) - len(candidate.draft)
    if verdict.branch is None:
        for copy in copies:
            context.free(copy)
        context.truncate(sequence, before + verdict.accepted)
        return
    chosen = candidate.branches.index(verdict.branch)
    for branch, copy in list(zip(candidate.branches, copies, strict=True))[:chosen]:
        context.park(copy, before + branch.fork)
    context.adopt(sequence, copies[chosen], before + verdict.branch.fork)
    for number, copy in enumerate(copies):
        if number != chosen:
            context.free(copy)
    context.truncate(sequence, before + verdict.accepted)
