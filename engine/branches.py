"""Side branches of a token tree: which ones the drafts offer, and which to send.

What loses the vote need not be thrown away. Where a losing draft leaves the winner's, and at a drafter's own second
choice, a side branch can catch the target's next token when the trunk's is rejected. A branch costs a place in the
target's pass, so it is sent only where its tokens are worth more than that.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.prefix import shared_prefix
from engine.types import Branch, Draft, TokenTree, VotedDraft

TREE_MARGIN = 0.05
"""A tree must be worth more than the best chain by this share of its pass: of many branches, one always looks good."""


def side_branches(voted: VotedDraft, drafts: Sequence[Draft]) -> tuple[Branch, ...]:
    """What the drafts offer beside the voted one, at most one branch for each first token at a place.

    Losing drafts come first: they are as long as they are. A second choice is one token.
    """
    trunk = voted.tokens
    found: dict[tuple[int, int], Branch] = {}
    for draft in drafts:
        if draft.source == voted.winner:
            continue
        fork = shared_prefix(draft.tokens, trunk)
        if fork < min(len(draft), len(trunk)):
            branch = Branch(fork, draft.tokens[fork:], draft.probabilities[fork:], draft.source)
            key = (fork, branch.tokens[0])
            if key not in found or len(branch) > len(found[key]):
                found[key] = branch
    winner = next((draft for draft in drafts if draft.source == voted.winner), None)
    if winner is not None:
        for fork, (token, probability) in enumerate(winner.seconds[: len(trunk)]):
            if token != trunk[fork]:
                found.setdefault((fork, token), Branch(fork, (token,), (probability,), winner.source, is_second=True))
    return tuple(found.values())


def best_tree(
    voted: VotedDraft,
    survivals: Sequence[float],
    branches: Sequence[tuple[Branch, Sequence[float]]],
    pass_ms: Sequence[float],
    pace: float,
    most_branches: int,
) -> TokenTree:
    """The tree with the most expected tokens − pace · time; a chain where side branches gain little.

    A node brings its survival, the probability that it and all before it are accepted; no node survives more surely
    than its parent. So the best tree of a size consists of its most likely nodes, and only the size is to be found.

    Args:
        voted: The trunk to take from.
        survivals: Of the trunk's tokens.
        branches: With the survivals of their tokens.
        pass_ms: Time of a target pass over 1, 2, … tokens; trees larger than it knows are not considered.
        pace: Tokens per millisecond that time is worth.
        most_branches: How many may be sent.
    """
    likely = sorted(branches, key=lambda branch: -branch[1][0])[:most_branches]
    # Equal ones stay in this order, parents before children and the trunk before its branches.
    nodes: list[tuple[float, int | None]] = [(survival, None) for survival in survivals]
    nodes += [(survival, number) for number, (_, own) in enumerate(likely) for survival in own]
    nodes.sort(key=lambda node: -node[0])
    size, value = best_size([survival for survival, _ in nodes], pass_ms, pace)
    length, chain_value = best_size(survivals, pass_ms, pace)
    if value <= chain_value + TREE_MARGIN * pace * pass_ms[size]:
        return TokenTree(voted.trimmed(length))
    chosen = [number for _, number in nodes[:size]]
    kept = [branch.trimmed(chosen.count(number)) for number, (branch, _) in enumerate(likely) if number in chosen]
    return TokenTree(voted.trimmed(chosen.count(None)), tuple(kept))


def best_size(survivals: Sequence[float], pass_ms: Sequence[float], pace: float) -> tuple[int, float]:
    """How many of these nodes are worth most in a pass, and what they are worth, in tokens."""
    best, best_value = 0, -pace * pass_ms[0]
    gained = 0.0
    for size, survival in enumerate(survivals[: len(pass_ms) - 1], start=1):
        gained += survival
        value = gained - pace * pass_ms[size]
        if value > best_value:
            best, best_value = size, value
    return best, best_value
