"""Settings, checked where they are made. All are frozen: a change is a new object."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path

from engine.errors import SettingError


class NumberFormat(IntEnum):
    """How numbers are kept. The values are ggml's type numbers."""

    F16 = 1
    Q8_0 = 8
    BF16 = 30


class KvType(Enum):
    """Number formats of a key/value cache: of its keys, and of its values."""

    F16 = (NumberFormat.F16, NumberFormat.F16)
    BF16_F16 = (NumberFormat.BF16, NumberFormat.F16)
    BF16 = (NumberFormat.BF16, NumberFormat.BF16)
    Q8_0 = (NumberFormat.Q8_0, NumberFormat.Q8_0)

    @property
    def keys(self) -> NumberFormat:
        return self.value[0]

    @property
    def values(self) -> NumberFormat:
        return self.value[1]


class WeightRule(str, Enum):
    """How drafters' voting weights learn."""

    HEDGE = "hedge"
    MINIONS = "minions"


class VoteMode(str, Enum):
    """Whether drafters draft alone and then vote, or vote on every token."""

    TREE = "tree"
    COLLECTIVE = "collective"


class LookAhead(str, Enum):
    """Whether drafters run ahead while the target verifies."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Shape(str, Enum):
    """What is sent to the target: a chain, or a token tree where that pays."""

    AUTO = "auto"
    CHAIN = "chain"


class Exactness(str, Enum):
    """Whether the backend setting must give bit-equal logits in every batch size."""

    EXACT = "exact"
    FAST = "fast"


class Acceptance(str, Enum):
    """How drafts are judged."""

    MATCH = "match"
    """A draft token stands while it is the target's own choice: the same tokens as without drafts."""
    RESIDUAL = "residual"
    """Drafters draw, and acceptance keeps the answer's distribution: more tokens stand, and they are others."""


class PolicyKind(str, Enum):
    """The rule that chooses the speculation length."""

    AUTO = "auto"
    MINIONS = "minions"
    ADAEDL = "adaedl"
    FIXED = "fixed"
    OFF = "off"


MAX_DRAFT_TOKENS = 31
"""Longest draft that is ever verified in one pass."""
MAX_LOGIT_BIAS = 100
MAX_TOP_LOG_PROBABILITIES = 20


@dataclass(frozen=True, slots=True)
class Policy:
    """A length rule, and its length where the rule is `fixed`."""

    kind: PolicyKind = PolicyKind.AUTO
    fixed_length: int = 0

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read `auto`, `minions`, `adaedl`, `fixed:N`, `off` or `plain` (another name of `off`)."""
        name, _, number = text.strip().lower().partition(":")
        if name == "plain":
            name = PolicyKind.OFF.value
        try:
            kind = PolicyKind(name)
        except ValueError:
            choices = "auto, minions, adaedl, fixed:N, off"
            raise SettingError(f"unknown policy {text!r}; choose one of {choices}") from None
        if kind is not PolicyKind.FIXED:
            if number:
                raise SettingError(f"policy {name!r} takes no number, found {text!r}")
            return cls(kind)
        if not number.isdecimal() or not 1 <= int(number) <= MAX_DRAFT_TOKENS:
            raise SettingError(f"policy fixed:N needs N from 1 to {MAX_DRAFT_TOKENS}, found {text!r}")
        return cls(kind, int(number))

    def __str__(self) -> str:
        return f"fixed:{self.fixed_length}" if self.kind is PolicyKind.FIXED else self.kind.value


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SettingError(message)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The target's sampler chain. At temperature 0 the most probable token is taken."""

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_tokens: int = 64
    seed: int | None = None
    """None draws a fresh seed for each answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits; minus infinity forbids one."""
    grammar: str = ""
    """GBNF text with a rule `root` that the answer must follow; empty for none."""

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 5, f"temperature must be from 0 to 5, found {self.temperature}")
        _require(self.top_k >= 0, f"top-k must be 0 (off) or more, found {self.top_k}")
        _require(0 < self.top_p <= 1, f"top-p must be above 0 and at most 1, found {self.top_p}")
        _require(0 <= self.min_p < 1, f"min-p must be from 0 to below 1, found {self.min_p}")
        _require(
            0 < self.repeat_penalty <= 5, f"repeat penalty must be above 0, at most 5, found {self.repeat_penalty}"
        )
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, f"{name.replace('_', ' ')} must be from -2 to 2, found {value}")
        _require(self.penalty_last_tokens >= 0, f"penalty window must be 0 or more, found {self.penalty_last_tokens}")
        if self.seed is not None:
            _require(0 <= self.seed < 2**32 - 1, f"seed must be from 0 to {2**32 - 2}, found {self.seed}")
        for token, bias in self.logit_bias:
            _require(token >= 0, f"a biased token is a number from 0, found {token}")
            _require(
                -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS or bias == -math.inf,
                f"a logit bias must be from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, or -inf, found {bias}",
            )

    @property
    def has_penalties(self) -> bool:
        return self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def can_be_drawn(self) -> bool:
        """Whether a token is drawn from a distribution that depends on the logits of its place alone."""
        return self.temperature > 0 and not (self.has_penalties or self.logit_bias or self.grammar)

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the most probable token as it stands."""
        return self.temperature == 0 and not (self.has_penalties or self.logit_bias or self.grammar)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How drafting is done; can change between answers without a reload."""

    policy: Policy = field(default_factory=Policy)
    weights: WeightRule = WeightRule.HEDGE
    vote: VoteMode = VoteMode.TREE
    look_ahead: LookAhead = LookAhead.AUTO
    shape: Shape = Shape.AUTO
    acceptance: Acceptance = Acceptance.MATCH


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """Everything about one answer besides its prompt."""

    sampling: Sampling = field(default_factory=Sampling)
    speculation: Speculation = field(default_factory=Speculation)
    max_tokens: int | None = None
    """None: until the model stops or the context is full."""
    stop_strings: tuple[str, ...] = ()
    stops_in_thinking: bool = False
    """Whether stop strings end a thought as well."""
    thinking: bool | None = None
    """Whether the model is to think before it answers, where its template has a switch; None: as the template does."""
    top_log_probabilities: int | None = None
    """How many tokens' log-probabilities come with each emitted token, besides its own; None for none at all."""

    def __post_init__(self) -> None:
        _require(
            self.max_tokens is None or self.max_tokens >= 1, f"max tokens must be 1 or more, found {self.max_tokens}"
        )
        _require(all(self.stop_strings), "a stop string must not be empty")
        _require(
            self.top_log_probabilities is None or 0 <= self.top_log_probabilities <= MAX_TOP_LOG_PROBABILITIES,
            f"log-probabilities must be from 0 to {MAX_TOP_LOG_PROBABILITIES}, found {self.top_log_probabilities}",
        )


def default_threads() -> int:
    """Physical cores this process may use: more threads than cores slow llama.cpp down."""
    import psutil

    physical = psutil.cpu_count(logical=False) or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(physical, allowed))


@dataclass(frozen=True, slots=True)
class ModelPlacement:
    """Where and how a model runs."""

    threads: int = field(default_factory=default_threads)
    gpu_layers: int = -1
    """Layers kept on the GPU; -1 is all, 0 none. Without a GPU it means nothing."""

    def __post_init__(self) -> None:
        _require(1 <= self.threads <= 512, f"threads must be from 1 to 512, found {self.threads}")
        _require(self.gpu_layers >= -1, f"gpu layers must be -1 (all) or more, found {self.gpu_layers}")


@dataclass(frozen=True, slots=True)
class SetConfig:
    """A target and its drafters: what is loaded together."""

    target: Path
    drafters: tuple[str, ...] = ("ngram", "suffix")
    """`ngram`, `suffix`, or the path of a GGUF file."""
    context_tokens: int = 4096
    placement: ModelPlacement = field(default_factory=ModelPlacement)
    exactness: Exactness = Exactness.EXACT
    cost_file: Path | None = None
    """Where the measured cost curves are kept; None keeps them in memory only."""
    kv_type: KvType | None = None
    """Number format of the target's cache; None: what `exactness` asks for."""
    drafter_placements: tuple[tuple[str, ModelPlacement], ...] = ()
    """Drafters that run elsewhere than the target, as named in `drafters`."""
    translates: bool = False
    """Whether drafters of other vocabularies are allowed; text goes between them and the target."""

    def __post_init__(self) -> None:
        _require(
            self.context_tokens == 0 or self.context_tokens >= 64,
            f"context must be 64 tokens or more, found {self.context_tokens}",
        )
        repeated = sorted({name for name in self.drafters if self.drafters.count(name) > 1})
        _require(not repeated, f"drafter named twice: {', '.join(repeated)}")
        unknown = sorted({name for name, _ in self.drafter_placements} - set(self.drafters))
        _require(not unknown, f"a placement is given for what is no drafter of this set: {', '.join(unknown)}")

    def placement_of(self, drafter: str) -> ModelPlacement:
        """The drafter's own placement, else the target's."""
        return dict(self.drafter_placements).get(drafter, self.placement)
