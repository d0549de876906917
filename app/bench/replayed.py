"""A recording replayed under configurations, as rows that the summary and the table understand; and what would have
been the best fixed setting in hindsight."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from app.bench.configuration import Configuration
from app.bench.recording import RecordedAnswer, Recording
from app.bench.replay import ReplayedAnswer, replay
from app.bench.row import Row, compare, distinct_share, with_counts
from app.bench.summary import summarise
from engine.config import LookAhead, Policy, PolicyKind, Shape, Speculation
from engine.errors import SettingError
from engine.length import LONGEST_DRAFT
from models.progress import stop_if_asked

BASELINE = Configuration().baseline
BEST = 3
"""Settings named for each category."""


@dataclass(frozen=True, slots=True)
class Hindsight:
    """A fixed setting, and its speed against plain in one category."""

    drafters: tuple[str, ...]
    length: int
    ratio: float


def replay_rows(recording: Recording, configurations: Sequence[Configuration], cancel: threading.Event) -> list[Row]:
    """Rows of plain decoding and of every configuration, one round.

    Raises:
        SettingError: a configuration needs a drafter that was not recorded.
        Cancelled: `cancel` was set.
    """
    rows = _rows(recording, BASELINE, ())
    for configuration in configurations:
        stop_if_asked(cancel, "replaying")
        rows += _rows(recording, configuration, _drafters(recording, configuration))
    return compare(rows)


def _drafters(recording: Recording, configuration: Configuration) -> tuple[str, ...]:
    if configuration.drafters is None:
        return recording.drafters
    for name in configuration.drafters:
        if name not in recording.drafters:
            raise SettingError(f"{name!r} was not recorded; there are {', '.join(recording.drafters)}")
    return configuration.drafters


def _rows(recording: Recording, configuration: Configuration, drafters: Sequence[str]) -> list[Row]:
    # Recorded chains hold no second choices, and running ahead needs a second clock.
    speculation = replace(configuration.speculation, look_ahead=LookAhead.OFF, shape=Shape.CHAIN)
    replayed = replay(recording.answers, drafters, speculation, recording.costs)
    return [_row(configuration.name, answer, own) for answer, own in zip(recording.answers, replayed, strict=True)]


def _row(config: str, answer: RecordedAnswer, replayed: ReplayedAnswer) -> Row:
    row = Row(
        prompt_id=answer.prompt_id,
        category=answer.category,
        config=config,
        baseline=BASELINE.name,
        round=1,
        tokens=replayed.tokens,
        seconds=replayed.seconds,
        tokens_per_second=replayed.tokens / replayed.seconds,
        distinct_4gram=distinct_share(answer.answer),
        finish_reason="replayed",
        answer_sha256="",
        text_sha256="",
        prompt_tokens=len(answer.prompt),
        prefill_seconds=0.0,
        time_to_first_token_seconds=0.0,
        decode_seconds=replayed.seconds,
        total_seconds=0.0,
        peak_memory_bytes=0,
    )
    return with_counts(row, replayed.metrics)


def best_in_hindsight(
    recording: Recording, progress: Callable[[str, float], None], cancel: threading.Event
) -> dict[str, list[Hindsight]]:
    """For each category the best fixed settings, of all subsets of the drafters and all lengths.

    Raises:
        Cancelled: `cancel` was set.
    """
    names = recording.drafters
    subsets = [own for size in range(1, len(names) + 1) for own in itertools.combinations(names, size)]
    plain = _rows(recording, BASELINE, ())
    found: dict[str, list[Hindsight]] = {}
    settings = list(itertools.product(subsets, range(1, LONGEST_DRAFT + 1)))
    for number, (drafters, length) in enumerate(settings):
        stop_if_asked(cancel, "replaying")
        progress("Replaying fixed settings", number / len(settings))
        configuration = Configuration(Speculation(Policy(PolicyKind.FIXED, length)), drafters=drafters)
        rows = compare([*plain, *_rows(recording, configuration, drafters)])
        ratio = summarise(rows, (), seed=0).named(configuration.name).ratio
        for category, estimate in ratio.by_category.items() if ratio is not None else ():
            found.setdefault(category, []).append(Hindsight(drafters, length, estimate.value))
    return {
        category: sorted(own, key=lambda setting: setting.ratio, reverse=True)[:BEST] for category, own in found.items()
    }
