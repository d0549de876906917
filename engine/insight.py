"""What a loaded set has measured and learnt, as plain data to look at. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import WeightRule
from engine.learning import Learning
from engine.length import LONGEST_DRAFT
from engine.loader import LoadedSet


@dataclass(frozen=True, slots=True)
class RateForecast:
    """Tokens per second by number of draft tokens sent, from 0, for one choice of draft models."""

    drafters: tuple[str, ...]
    """The draft models; none stands for what needs no model."""
    acceptance: float
    """Learnt probability that a token of theirs is accepted."""
    tokens_per_second: tuple[float, ...]

    @property
    def best_length(self) -> int:
        return max(range(len(self.tokens_per_second)), key=self.tokens_per_second.__getitem__)


@dataclass(frozen=True, slots=True)
class Insight:
    """A set at one moment."""

    description: str
    """Of the target, by llama.cpp."""
    kv_type: str
    threads: int
    gpu_layers: int
    context_tokens: int
    """What the context can hold."""
    used_tokens: int
    """The context length that the figures are for."""
    can_roll_back: bool
    exactness: str
    """How exact drafting is, in a clause."""
    pass_ms: tuple[float, ...]
    """Target passes of 1, 2, … tokens."""
    overhead_ms: float
    """Time per step that is neither drafting nor the target pass."""
    draft_ms: Mapping[str, float]
    """Time per drafted token, by draft model."""
    weights: Mapping[str, float]
    """Voting weights, by drafter."""
    forecasts: tuple[RateForecast, ...]


def insight(
    loaded: LoadedSet,
    used_tokens: int = 0,
    rule: WeightRule = WeightRule.HEDGE,
    measured_acceptance: float | None = None,
) -> Insight:
    """Look at a set.

    Args:
        loaded: Its owner thread must call.
        used_tokens: The context length to take costs for.
        rule: Whose weights to show.
        measured_acceptance: Of the last answer; stands in for drafters that are no models, of which no mean is learnt.
    """
    learning = loaded.learning
    models = [drafter.name for drafter in loaded.panel.models]
    weights = learning.weights(rule).current
    choices = [(name,) for name in models] + ([tuple(models)] if len(models) > 1 else [])
    forecasts = [_forecast(learning, names, learning.acceptance.mean(names), used_tokens) for names in choices]
    if not models and measured_acceptance is not None:
        forecasts = [_forecast(learning, (), measured_acceptance, used_tokens)]
    return Insight(
        description=loaded.model.description,
        kv_type=loaded.context.settings.kv_type.name,
        threads=loaded.context.settings.threads,
        gpu_layers=loaded.config.placement.gpu_layers,
        context_tokens=loaded.context.context_tokens,
        used_tokens=used_tokens,
        can_roll_back=loaded.model.can_roll_back,
        exactness=loaded.setting.badge,
        pass_ms=learning.cost.curve(used_tokens, LONGEST_DRAFT + 1),
        overhead_ms=learning.cost.overhead_ms,
        draft_ms={name: learning.cost.draft_ms((name,)) for name in models},
        weights={name: weights[name] for name in loaded.panel.names},
        forecasts=tuple(forecasts),
    )


def _forecast(learning: Learning, names: Sequence[str], acceptance: float, used_tokens: int) -> RateForecast:
    """(1 + expected accepted) ÷ (drafting + pass + overhead), acceptances taken as independent."""
    pass_ms = learning.cost.curve(used_tokens, LONGEST_DRAFT + 1)
    drafting_ms = learning.cost.drafting_curve(names, LONGEST_DRAFT)
    rates: list[float] = []
    expected, survival = 1.0, 1.0
    for length, ms in enumerate(pass_ms):
        if length:
            survival *= acceptance
            expected += survival
        rates.append(1e3 * expected / (ms + drafting_ms[length] + learning.cost.overhead_ms))
    return RateForecast(tuple(names), acceptance, tuple(rates))
