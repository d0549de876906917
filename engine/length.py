"""How far to draft, and how much of a draft to send: five rules with one interface.

`auto` maximises expected tokens per second over the measured cost curve. The others are kept for comparison: `fixed`,
`minions` (the online trend rule of arXiv 2402.15678), `adaedl` (the entropy stop of arXiv 2410.18351), and `off`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.acceptance import AcceptanceModel
from engine.branches import best_size, best_tree
from engine.config import Policy, PolicyKind
from engine.cost import CostModel
from engine.drafters.base import KeepDrafting, always
from engine.types import Branch, TokenTree, VotedDraft

LONGEST_DRAFT = 15
"""Passes of 16 tokens are the largest that are calibrated, and no cheaper per token beyond on the CPUs measured."""

MINIONS_START = 4
MINIONS_LONGEST = 12
MINIONS_WINDOW = 8
MINIONS_RAISE = 1
MINIONS_CUT = 2
MINIONS_DELAY = 2

ADAEDL_ENTROPY_FACTOR = 0.2
ADAEDL_TARGET = 0.9
ADAEDL_STEP = 0.01
ADAEDL_ACCEPTANCE_MEMORY = 0.5
ADAEDL_THRESHOLD_MEMORY = 0.9
ADAEDL_FIRST_THRESHOLD = 0.3


class LengthRule(ABC):
    """Decides before, while and after drafting; learns from the verdict."""

    @abstractmethod
    def limit(self) -> int:
        """Most tokens to draft in this step; zero for none."""

    def keep_drafting(self, source: str, names: Sequence[str], context_tokens: int, pace: float) -> KeepDrafting:
        """The question `source` asks after each token it drafts beside the model drafters `names`.

        `pace` is what a millisecond is worth, in tokens.
        """
        return always

    def prefer(self, voted: VotedDraft, losers: Sequence[VotedDraft], context_tokens: int, pace: float) -> VotedDraft:
        """The draft to go on with: the voted one, or one that lost the vote and is worth more."""
        return voted

    def cut(
        self, voted: VotedDraft, branches: Sequence[Branch], most_branches: int, context_tokens: int, pace: float
    ) -> TokenTree:
        """What to send of the voted draft, and of the branches that leave it, of which at most so many."""
        return TokenTree(voted)

    def learn(self, verified: int, accepted: int, step_ms: float) -> None:  # noqa: B027 - `fixed` learns nothing
        """Hear the verdict on a step that sent `verified` draft tokens."""


class FixedLength(LengthRule):
    """Always the same length; zero switches drafting off."""

    def __init__(self, length: int) -> None:
        self._length = length

    def limit(self) -> int:
        return self._length


class MinionsLength(LengthRule):
    """Watches time per token over windows of steps: longer while it improves, much shorter when it worsens.

    The paper gives the rule but not its constants; the window, steps and the delay before the next change are ours.
    """

    def __init__(self) -> None:
        self._length = MINIONS_START
        self._window: list[float] = []
        self._delay = 0

    def limit(self) -> int:
        return self._length

    def learn(self, verified: int, accepted: int, step_ms: float) -> None:
        if self._delay:
            self._delay -= 1
            return
        self._window.append(step_ms / (1 + accepted))
        if len(self._window) < MINIONS_WINDOW:
            return
        worsening = _slope(self._window) > 0
        self._length += -MINIONS_CUT if worsening else MINIONS_RAISE
        self._length = min(max(self._length, 1), MINIONS_LONGEST)
        self._window.clear()
        self._delay = MINIONS_DELAY


def _slope(values: Sequence[float]) -> float:
    """Slope of the least-squares line through equally spaced values."""
    middle = (len(values) - 1) / 2
    return sum((index - middle) * value for index, value in enumerate(values))


class AdaEdlLength(LengthRule):
    """Stops when an entropy bound on acceptance falls below a threshold that follows the acceptance rate."""

    def __init__(self) -> None:
        self._threshold = ADAEDL_FIRST_THRESHOLD
        self._acceptance = ADAEDL_TARGET

    def limit(self) -> int:
        return LONGEST_DRAFT

    def keep_drafting(self, source: str, names: Sequence[str], context_tokens: int, pace: float) -> KeepDrafting:
        threshold = self._threshold

        def keep(_probabilities: Sequence[float], entropy: float) -> bool:
            return 1 - math.sqrt(ADAEDL_ENTROPY_FACTOR * entropy) >= threshold

        return keep

    def learn(self, verified: int, accepted: int, step_ms: float) -> None:
        if not verified:
            return
        memory = ADAEDL_ACCEPTANCE_MEMORY
        self._acceptance = memory * self._acceptance + (1 - memory) * accepted / verified
        if self._acceptance < ADAEDL_TARGET:
            wanted = self._threshold + ADAEDL_STEP
        elif verified < LONGEST_DRAFT:
            wanted = self._threshold - ADAEDL_STEP
        else:
            wanted = self._threshold
        memory = ADAEDL_THRESHOLD_MEMORY
        self._threshold = min(max(memory * self._threshold + (1 - memory) * wanted, 0.0), 1.0)


class AutoLength(LengthRule):
    """The length with the largest expected tokens − pace · time, zero included.

    With the pace at the best rate that can be had here this maximises tokens per second (Dinkelbach 1967).
    """

    def __init__(self, cost: CostModel, acceptance: AcceptanceModel) -> None:
        self._cost = cost
        self._acceptance = acceptance

    def limit(self) -> int:
        return LONGEST_DRAFT

    def keep_drafting(self, source: str, names: Sequence[str], context_tokens: int, pace: float) -> KeepDrafting:
        verify = [pace * ms for ms in self._cost.curve(context_tokens, LONGEST_DRAFT + 1)]
        draft = pace * self._cost.draft_ms(names)
        mean = self._acceptance.mean(names)
        estimate = self._acceptance.token
        survivals: list[float] = []
        best_now = -verify[0]
        gained = 0.0

        def keep(probabilities: Sequence[float], _entropy: float) -> bool:
            nonlocal best_now, gained
            # In lock-step the leader may be another at each token, and is asked about those before it too.
            for probability in probabilities[len(survivals) :]:
                survival = (survivals[-1] if survivals else 1.0) * estimate(source, probability, 1.0, 1)
                survivals.append(survival)
                gained += survival
                best_now = max(best_now, gained - verify[len(survivals)])
            length = len(survivals)
            survival = survivals[-1]
            future = gained
            spent = 0.0
            for later in range(length + 1, LONGEST_DRAFT + 1):
                survival *= mean
                future += survival
                spent += draft
                if future - spent - verify[later] > best_now:
                    return True
                if survival < draft:
                    return False
            return False

        return keep

    def prefer(self, voted: VotedDraft, losers: Sequence[VotedDraft], context_tokens: int, pace: float) -> VotedDraft:
        """Look-ups often agree with each other, having read the same text, and are less often right than a model."""
        if not losers:
            return voted
        drafts = [voted, *losers]
        costs = self._cost.curve(context_tokens, max(map(len, drafts)) + 1)
        return max(drafts, key=lambda draft: best_size(self._acceptance.survivals(draft), costs, pace)[1])

    def cut(
        self, voted: VotedDraft, branches: Sequence[Branch], most_branches: int, context_tokens: int, pace: float
    ) -> TokenTree:
        if not voted.tokens:
            return TokenTree(voted)
        trunk = self._acceptance.survivals(voted)
        known = [(branch, self._acceptance.branch(branch, trunk)) for branch in branches] if most_branches else []
        costs = self._cost.curve(context_tokens, max(len(voted), LONGEST_DRAFT if known else 0) + 1)
        return best_tree(voted, trunk, known, costs, pace, most_branches)


def make_rule(policy: Policy, cost: CostModel, acceptance: AcceptanceModel) -> LengthRule:
    """The rule a policy names."""
    if policy.kind is PolicyKind.AUTO:
        return AutoLength(cost, acceptance)
    if policy.kind is PolicyKind.MINIONS:
        return MinionsLength()
    if policy.kind is PolicyKind.ADAEDL:
        return AdaEdlLength()
    return FixedLength(policy.fixed_length)
