"""The plain data that travels between the parts of the engine, and out of it as events.

Nothing here computes, owns a native object or knows a thread. Terms are those of the speculative decoding literature:

- *proposed*: every token any drafter made in a step
- *drafted*: the voted draft before trimming = verified + trimmed + unused look-ahead
- *verified*: draft tokens sent to the target = accepted + rejected
- *emitted*: tokens added to the answer = accepted + corrected + bonus + plain
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum

import numpy as np
import numpy.typing as npt


class Provenance(str, Enum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    """A draft token that equals the target's own choice."""
    CORRECTED = "corrected"
    """The target's choice in place of the first rejected draft token."""
    BONUS = "bonus"
    """The target's choice after a draft that was accepted whole."""
    PLAIN = "plain"
    """The target's choice in a pass that carried no draft."""


class FinishReason(str, Enum):
    """Why an answer ended."""

    STOP = "stop"
    """The model ended its turn, or a stop string appeared."""
    LENGTH = "length"
    """The requested number of tokens was reached."""
    CONTEXT = "context"
    """The context is full."""
    CANCELLED = "cancelled"
    """The user stopped it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A drafter's guess at the next tokens, a chain; with no tokens it means that the drafter abstains."""

    source: str
    tokens: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    """The drafter's own probability of each token given the ones before it."""
    match_length: int = 0
    """For drafters that look text up: how many tokens of context matched. Zero for draft models."""
    last_entropy: float = 0.0
    """Entropy in nats of the distribution the last token was taken from; zero where there is none."""
    seconds: tuple[tuple[int, float], ...] = ()
    """Each position's second choice and its probability, where the drafter knows one; shape of `tokens`, or empty."""
    rows: tuple[npt.NDArray[np.float64], ...] = field(default=(), compare=False, repr=False)
    """Where tokens were drawn, the distribution over the target's vocabulary that each was drawn from."""

    def __post_init__(self) -> None:
        if len(self.probabilities) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} draft tokens with {len(self.probabilities)} probabilities")

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class VotedDraft:
    """The draft that won the vote, with what the vote says about each position."""

    tokens: tuple[int, ...] = ()
    probabilities: tuple[float, ...] = ()
    """The winning drafter's own probability of each token."""
    agreement: tuple[float, ...] = ()
    """Share of the participating weight that proposed the token, in (0, 1]."""
    proposers: tuple[tuple[str, ...], ...] = ()
    """Names of the drafters that proposed each token along this path."""
    winner: str = ""
    match_length: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def trimmed(self, length: int) -> VotedDraft:
        """The first `length` tokens of this draft."""
        if length >= len(self.tokens):
            return self
        return VotedDraft(
            tokens=self.tokens[:length],
            probabilities=self.probabilities[:length],
            agreement=self.agreement[:length],
            proposers=self.proposers[:length],
            winner=self.winner,
            match_length=self.match_length,
        )


@dataclass(frozen=True, slots=True)
class Branch:
    """A side path of a token tree: it leaves the voted draft, the tree's trunk, after `fork` of its tokens."""

    fork: int
    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    """The drafter's own probability of each token."""
    source: str
    is_second: bool = False
    """A drafter's second choice, rather than the first choice of one that lost the vote."""

    def __len__(self) -> int:
        return len(self.tokens)

    def trimmed(self, length: int) -> Branch:
        """The first `length` tokens of this branch."""
        if length >= len(self.tokens):
            return self
        return Branch(self.fork, self.tokens[:length], self.probabilities[:length], self.source, self.is_second)


@dataclass(frozen=True, slots=True)
class TokenTree:
    """What is sent to the target: the voted draft and side branches, all of whose tokens are verified in one pass."""

    trunk: VotedDraft
    branches: tuple[Branch, ...] = ()
    """The most promising first; no two that leave at the same place begin with the same token."""

    def __len__(self) -> int:
        return len(self.trunk) + sum(map(len, self.branches))

    def by_depth(self) -> tuple[int, ...]:
        """How many tokens stand at each place after the pending one."""
        ends = [branch.fork + len(branch) for branch in self.branches]
        counts = [1] * len(self.trunk) + [0] * (max(ends, default=0) - len(self.trunk))
        for branch, end in zip(self.branches, ends, strict=True):
            for depth in range(branch.fork, end):
                counts[depth] += 1
        return tuple(counts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one target pass said about a draft or a token tree."""

    accepted: int
    """Number of tokens that equal the target's choices, on the path that was accepted."""
    final: int
    """The target's own token after them: corrected, bonus or plain."""
    branch: Branch | None = None
    """The side branch on which the accepted path ends; None when it stays on the trunk."""

    @property
    def on_trunk(self) -> int:
        """How many of the accepted tokens are the trunk's."""
        return self.accepted if self.branch is None else self.branch.fork

    def path(self, trunk: tuple[int, ...]) -> tuple[int, ...]:
        """The accepted tokens, given the trunk's."""
        if self.branch is None:
            return trunk[: self.accepted]
        return (*trunk[: self.branch.fork], *self.branch.tokens[: self.accepted - self.branch.fork])

    def chosen(self, trunk: tuple[int, ...]) -> tuple[int, ...]:
        """The target's tokens from where the draft begins: the accepted ones and its own next, given the trunk's."""
        return (*self.path(trunk), self.final)


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """What the target itself thought of a token and its rivals, before any sampler: natural logarithms."""

    chosen: float
    """The emitted token's."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens with theirs, the best first; as many as were asked for."""


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """One token of the answer and its origin."""

    id: int
    provenance: Provenance
    proposers: tuple[str, ...] = ()
    """The drafters that had proposed this very token at this position."""
    agreement: float = 0.0
    probability: float = 0.0
    """The winning drafter's probability; zero where no draft covered the position."""
    log_probabilities: LogProbabilities | None = None
    """None unless they were asked for."""


@dataclass(frozen=True, slots=True)
class SpeculationState:
    """Whether drafting is on right now, and why, in words for the user."""

    is_on: bool
    reason: str
    speedup: float | None = None
    """Measured speed against plain decoding; None until both have been measured."""
    uncertainty: float | None = None
    """Half the width of its 95 % interval, from how much the last steps differ."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where one step's time went, in milliseconds. `python_ms` is the engine's own: no waiting, no vocabulary."""

    plan_ms: float = 0.0
    draft_ms: float = 0.0
    vote_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    other_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.plan_ms + self.draft_ms + self.vote_ms + self.verify_ms + self.sample_ms + self.other_ms

    @property
    def parts(self) -> dict[str, float]:
        """Milliseconds by the name of the part, in the order of a step."""
        return {part.name.removesuffix("_ms"): getattr(self, part.name) for part in fields(self)}

    @property
    def python_ms(self) -> float:
        return self.plan_ms + self.vote_ms + self.other_ms

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(
            self.plan_ms + other.plan_ms,
            self.draft_ms + other.draft_ms,
            self.vote_ms + other.vote_ms,
            self.verify_ms + other.verify_ms,
            self.sample_ms + other.sample_ms,
            self.other_ms + other.other_ms,
        )


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Counts and times of one step of the pipeline."""

    proposed: int
    drafted: int
    accepted: int
    emitted: int
    context_tokens: int
    planned_length: int
    """The speculation length the plan chose as its limit."""
    proposals: Mapping[str, int]
    """Tokens proposed by each drafter that took part."""
    look_ahead: str
    """`hit`, `miss`, or empty when the step had no look-ahead."""
    unused_look_ahead: int
    times: StepTimes
    reason: str
    """Why the plan chose this length, in words."""
    drafts: tuple[Draft, ...]
    """What each drafter proposed, before the vote."""
    voted: VotedDraft
    """What the vote made of it, before trimming."""
    sent: TokenTree
    """What was sent to the target, side branches included."""

    @property
    def verified(self) -> int:
        """Draft tokens sent."""
        return len(self.sent)

    @property
    def agreement(self) -> tuple[float, ...]:
        return self.voted.agreement

    @property
    def winner(self) -> str:
        return self.voted.winner


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """How one drafter fared over an answer."""

    name: str
    weight: float
    proposed: int
    scored: int
    """Committed tokens this drafter's own guess was compared with."""
    hits: int
    """How many of those it had guessed."""
    agreement: float
    """Share of voted tokens it had proposed, where it took part."""
    cost_ms: float
    """Measured time per drafted token."""
    is_active: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Counters of one answer; rates are derived, never stored."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens that were already in the target's cache."""
    verify_steps: int = 0
    """Target passes that carried a draft."""
    plain_steps: int = 0
    proposed: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    corrected: int = 0
    bonus: int = 0
    plain: int = 0
    trimmed: int = 0
    unused_look_ahead: int = 0
    look_ahead_hits: int = 0
    look_ahead_misses: int = 0
    accepted_by_position: tuple[int, ...] = ()
    verified_by_position: tuple[int, ...] = ()
    agreement_sum: float = 0.0
    agreement_count: int = 0
    lengths: Mapping[int, int] = field(default_factory=dict)
    """How often each number of draft tokens was sent to the target."""
    drafters: tuple[DrafterReport, ...] = ()

    @property
    def rejected(self) -> int:
        return self.verified - self.accepted

    @property
    def emitted(self) -> int:
        return self.accepted + self.corrected + self.bonus + self.plain

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted ÷ verified; None before anything was verified."""
        return self.accepted / self.verified if self.verified else None

    @property
    def mean_accepted_length(self) -> float | None:
        """1 + accepted ÷ verify steps: tokens per pass that carried a draft."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def mean_agreement(self) -> float | None:
        return self.agreement_sum / self.agreement_count if self.agreement_count else None


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock times of one answer, in milliseconds."""

    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    tokens_per_second: float = 0.0
    """Emitted tokens ÷ decode time."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """The prompt is being read."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step has committed tokens; `text` is what became readable by it (a character may span several tokens)."""

    tokens: tuple[EmittedToken, ...]
    text: str
    step: StepRecord
    metrics: Metrics
    timings: Timings
    state: SpeculationState
    thinking: str = ""
    """What became readable of a thought that precedes the answer."""
    token_texts: tuple[str, ...] = ()
    """What became readable by each token; one entry a token, fewer where a stop string ended the answer."""
    token_thoughts: tuple[str, ...] = ()
    """The same of a thought."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every answer, cancelled ones included."""

    reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    seed: int
    metrics: Metrics
    timings: Timings
    state: SpeculationState
    thinking: str = ""
    """The thought that preceded the answer; no part of its text."""
    dropped_messages: int = 0
    """The oldest messages of the conversation that the target was not given, for want of room in the context."""
    rewritten_tokens: int = 0
    """Tokens of the conversation so far that had to be read anew, because the template now renders them differently:
    as a rule, without the last answer's thought."""


GenerationEvent = PrefillProgress | StepDone | Finished
