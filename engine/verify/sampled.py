"""Verification of drafts that were drawn from known distributions: the answer keeps its distribution, not its tokens.

One draft is judged as a block. Of several, each drafter that is still on the accepted path offers its next token, in an
order that is fixed beforehand, and recursive rejection chooses; off the trunk only the branch's own drafter goes on.
Nothing that decides what is judged may depend on a token's value before that token is judged, or it would be favoured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.config import MAX_DRAFT_TOKENS
from engine.prefix import shared_prefix
from engine.residual import Chance, Row, block_verification, recursive_rejection, speculative_sampling
from engine.types import Branch, Draft, TokenTree, Verdict, VotedDraft


@dataclass(frozen=True, slots=True)
class Drawn:
    """Drafts whose tokens were drawn, in a fixed order of their drafters, and the chance by which they are judged."""

    drafts: tuple[Draft, ...]
    chance: Chance


def trunk_of(drafts: Sequence[Draft]) -> VotedDraft:
    """The first drafter's draft, in the form of one that was voted."""
    first = drafts[0]
    count = len(first)
    return VotedDraft(first.tokens, first.probabilities, (1.0,) * count, ((first.source,),) * count, first.source)


def tree_of(drafts: Sequence[Draft], most_branches: int) -> TokenTree:
    """The first draft as trunk, and a branch wherever another one leaves it."""
    trunk = drafts[0].tokens
    branches: list[Branch] = []
    room = MAX_DRAFT_TOKENS - len(trunk)
    for draft in drafts[1:]:
        fork = shared_prefix(draft.tokens, trunk)
        rest = draft.tokens[fork:]
        is_new = bool(rest) and fork < len(trunk) and all((b.fork, b.tokens[0]) != (fork, rest[0]) for b in branches)
        if is_new and len(branches) < most_branches and len(rest) <= room:
            branches.append(Branch(fork, rest, draft.probabilities[fork:], draft.source))
            room -= len(rest)
    return TokenTree(trunk_of(drafts), tuple(branches))


def judge(row: Callable[[int], Row], tree: TokenTree, drawn: Drawn) -> Verdict:
    """Accept what keeps the target's distribution.

    Args:
        row: The target's distribution after the pending token (0), and after each token of the tree in its order.
        tree: As `tree_of` makes it.
        drawn: What it was made of.
    """
    trunk = tree.trunk.tokens
    if len(drawn.drafts) == 1:
        (draft,) = drawn.drafts
        found = block_verification([row(place) for place in range(len(trunk) + 1)], draft.rows, trunk, drawn.chance)
        return Verdict(found.accepted, found.final)
    for place in range(len(trunk)):
        offers = [one for one in drawn.drafts if len(one) > place and one.tokens[:place] == trunk[:place]]
        tokens = [one.tokens[place] for one in offers]
        chosen, token = recursive_rejection(row(place), [one.rows[place] for one in offers], tokens, drawn.chance)
        if chosen is None:
            return Verdict(place, token)
        if token != trunk[place]:
            return _on_branch(row, tree, drawn, place, token)
    return Verdict(len(trunk), drawn.chance.pick(row(len(trunk))))


def _on_branch(row: Callable[[int], Row], tree: TokenTree, drawn: Drawn, fork: int, token: int) -> Verdict:
    """Go on along the branch that begins with an accepted token, where it was sent."""
    output = 1 + len(tree.trunk)
    for branch in tree.branches:
        if (branch.fork, branch.tokens[0]) == (fork, token):
            own = next(draft for draft in drawn.drafts if draft.source == branch.source)
            p = [row(output + place) for place in range(len(branch))]
            found = speculative_sampling(p, own.rows[fork + 1 :], branch.tokens[1:], drawn.chance)
            return Verdict(fork + 1 + found.accepted, found.final, branch)
        output += len(branch)
    return Verdict(fork, token)
