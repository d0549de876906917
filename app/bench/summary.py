"""From rows to figures.

A ratio is speed against plain decoding of the same prompt in the same round. A prompt counts with the median of its
rounds, a category with the median of its prompts, and overall is the mean of the categories, which weigh alike however
many prompts they have. Intervals come from drawing prompts anew within each category (bootstrap, seeded).

Prompts whose plain answer runs in a loop count nowhere: a loop is easy to draft, and impossible to get wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from app.bench.row import Row

BOOTSTRAP_DRAWS = 2000
INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One comparison: each category, and all of them weighing alike."""

    by_category: Mapping[str, Estimate]
    overall: Estimate

    @property
    def worst_category(self) -> str:
        return min(self.by_category, key=lambda category: self.by_category[category].value)


@dataclass(frozen=True, slots=True)
class ConfigSummary:
    """What the rows of one configuration say, loops left out."""

    config: str
    is_baseline: bool
    ratio: Figures | None
    """Decoding speed against plain; None when no row could be compared."""
    total_ratio: Figures | None
    """Speed with the prompt's reading included."""
    first_token_ratio: Figures | None
    """Time to first token against plain's: more than 1 is later."""
    rows: int
    identical: int
    compared: int
    """Rows whose text was compared with plain's."""
    tokens_per_second: float
    acceptance: float | None
    """Accepted ÷ verified."""
    mean_accepted_length: float | None
    """1 + accepted ÷ verify passes."""
    acceptance_by_position: tuple[float, ...]
    """For each position, the share of verify passes that accepted it."""
    lengths: Mapping[str, int]
    """How often each number of draft tokens was sent."""
    python_ms_per_pass: float | None
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Loop:
    """A plain answer that repeats itself, and the ratios measured on it, for what they are worth."""

    prompt_id: str
    category: str
    baseline: str
    rounds: int
    distinct_4gram: float
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """The engine's configurations against the best setting of a peer."""

    best_setting: str
    """The one whose overall ratio is highest."""
    best_by_category: Mapping[str, str]
    against_best: Mapping[str, Figures]
    """For each of our configurations, its speed against the best single setting."""
    against_best_of_category: Mapping[str, Mapping[str, float]]
    """The same against whichever setting was best in the category."""


@dataclass(frozen=True, slots=True)
class Summary:
    """All figures of a run."""

    configs: tuple[ConfigSummary, ...]
    loops: tuple[Loop, ...]
    peer: PeerComparison | None

    def named(self, config: str) -> ConfigSummary:
        return next(summary for summary in self.configs if summary.config == config)


def summarise(rows: Sequence[Row], peers: Sequence[str], seed: int) -> Summary:
    """The figures of compared rows.

    Args:
        rows: As `compare` returns them.
        peers: Names of the configurations that are a peer's.
        seed: Of the bootstrap.
    """
    plain = {row.key: row for row in rows if row.is_plain}
    looping = {key for key, row in plain.items() if row.is_loop}
    counted = [row for row in rows if (row.prompt_id, row.baseline, row.round) not in looping]
    configs = tuple(_summarise_config(name, counted, plain, seed) for name in dict.fromkeys(row.config for row in rows))
    return Summary(configs, _loops(rows, looping), _compare_peer(configs, counted, peers, seed))


def figures(values: Mapping[str, Mapping[str, Sequence[float]]], seed: int) -> Figures | None:
    """Figures of values by category, prompt and round; None when there are none."""
    prompts = {
        category: np.array([median(rounds) for rounds in by_prompt.values() if rounds])
        for category, by_prompt in values.items()
    }
    prompts = {category: own for category, own in prompts.items() if len(own)}
    if not prompts:
        return None
    random = np.random.default_rng(seed)
    draws = {
        category: np.median(own[random.integers(len(own), size=(BOOTSTRAP_DRAWS, len(own)))], axis=1)
        for category, own in prompts.items()
    }
    by_category = {
        category: _estimate(float(np.median(own)), draws[category], len(own)) for category, own in prompts.items()
    }
    overall = _estimate(
        mean(estimate.value for estimate in by_category.values()),
        np.mean(list(draws.values()), axis=0),
        sum(estimate.prompts for estimate in by_category.values()),
    )
    return Figures(by_category, overall)


def _estimate(value: float, draws: np.ndarray[tuple[int], np.dtype[np.float64]], prompts: int) -> Estimate:
    low, high = np.percentile(draws, INTERVAL)
    return Estimate(value, float(low), float(high), prompts)


def _by_prompt(rows: Iterable[Row], value: Callable[[Row], float | None]) -> dict[str, dict[str, list[float]]]:
    """Values by category and prompt; a row without one is passed over."""
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found = value(row)
        if found is not None:
            values.setdefault(row.category, {}).setdefault(row.prompt_id, []).append(found)
    return values


def _summarise_config(
    name: str, counted: Sequence[Row], plain: Mapping[tuple[str, str, int], Row], seed: int
) -> ConfigSummary:
    rows = [row for row in counted if row.config == name]

    def total_ratio(row: Row) -> float | None:
        baseline = plain.get((row.prompt_id, row.baseline, row.round))
        # Only the same text takes comparable time.
        if baseline is None or row.identical_to_plain is False or not row.total_seconds:
            return None
        return baseline.total_seconds / row.total_seconds

    def first_token_ratio(row: Row) -> float | None:
        baseline = plain.get((row.prompt_id, row.baseline, row.round))
        if baseline is None or not baseline.time_to_first_token_seconds:
            return None
        return row.time_to_first_token_seconds / baseline.time_to_first_token_seconds

    passes = sum(row.verify_passes or 0 for row in rows)
    verified = sum(row.verified or 0 for row in rows)
    accepted = sum(row.accepted or 0 for row in rows)
    by_position: Counter[int] = Counter()
    lengths: Counter[int] = Counter()
    for row in rows:
        by_position.update(dict(enumerate(row.accepted_by_position)))
        lengths.update({int(length): count for length, count in row.length_histogram.items()})
    python_ms = [row.python_ms_per_pass for row in rows if row.python_ms_per_pass is not None]
    return ConfigSummary(
        config=name,
        is_baseline=any(row.config == name for row in plain.values()),
        ratio=figures(_by_prompt(rows, lambda row: row.ratio_to_plain), seed),
        total_ratio=figures(_by_prompt(rows, total_ratio), seed),
        first_token_ratio=figures(_by_prompt(rows, first_token_ratio), seed),
        rows=len(rows),
        identical=sum(row.identical_to_plain is True for row in rows),
        compared=sum(row.identical_to_plain is not None for row in rows),
        tokens_per_second=median(row.tokens_per_second for row in rows) if rows else 0.0,
        acceptance=accepted / verified if verified else None,
        mean_accepted_length=1 + accepted / passes if passes else None,
        acceptance_by_position=tuple(by_position[place] / passes for place in sorted(by_position)),
        lengths={str(length): lengths[length] for length in sorted(lengths)},
        python_ms_per_pass=median(python_ms) if python_ms else None,
        peak_memory_bytes=max((row.peak_memory_bytes for row in rows), default=0),
    )


def _loops(rows: Sequence[Row], looping: set[tuple[str, str, int]]) -> tuple[Loop, ...]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if (row.prompt_id, row.baseline, row.round) in looping:
            found.setdefault((row.prompt_id, row.baseline), []).append(row)
    return tuple(_loop(own) for own in found.values())


def _loop(rows: Sequence[Row]) -> Loop:
    plain = [row for row in rows if row.is_plain]
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio_to_plain is not None and not row.is_plain:
            ratios.setdefault(row.config, []).append(row.ratio_to_plain)
    return Loop(
        prompt_id=plain[0].prompt_id,
        category=plain[0].category,
        baseline=plain[0].config,
        rounds=len(plain),
        distinct_4gram=median(row.distinct_4gram for row in plain),
        ratios={config: median(own) for config, own in ratios.items()},
    )


def _compare_peer(
    configs: Sequence[ConfigSummary], counted: Sequence[Row], peers: Sequence[str], seed: int
) -> PeerComparison | None:
    ratios = {summary.config: summary.ratio for summary in configs if summary.config in peers and summary.ratio}
    if not ratios:
        return None
    best = max(ratios, key=lambda name: ratios[name].overall.value)
    categories = dict.fromkeys(category for own in ratios.values() for category in own.by_category)
    best_by_category = {
        category: max(
            (name for name in ratios if category in ratios[name].by_category),
            key=lambda name: ratios[name].by_category[category].value,
        )
        for category in categories
    }
    ours = [summary.config for summary in configs if summary.config not in peers and summary.ratio]
    against = {name: _against(name, counted, peers, seed) for name in ours}
    return PeerComparison(
        best_setting=best,
        best_by_category=best_by_category,
        against_best={name: own[best] for name, own in against.items() if best in own},
        against_best_of_category={
            name: {
                category: own[setting].by_category[category].value
                for category, setting in best_by_category.items()
                if setting in own and category in own[setting].by_category
            }
            for name, own in against.items()
        },
    )


def _against(name: str, counted: Sequence[Row], peers: Sequence[str], seed: int) -> dict[str, Figures]:
    """Speed of one configuration against each setting of the peer, on the same prompts in the same rounds."""
    found = {}
    for peer in peers:
        speeds = {(row.prompt_id, row.round): row.tokens_per_second for row in counted if row.config == peer}

        def ratio(row: Row, speeds: Mapping[tuple[str, int], float] = speeds) -> float | None:
            speed = speeds.get((row.prompt_id, row.round))
            return row.tokens_per_second / speed if speed else None

        own = figures(_by_prompt((row for row in counted if row.config == name), ratio), seed)
        if own is not None:
            found[peer] = own
    return found
