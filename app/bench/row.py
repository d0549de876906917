"""One measured answer, and what the baseline's answer to the same prompt in the same round says about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from engine.types import Finished, FinishReason, Metrics, StepTimes

NGRAM = 4
LOOP_SHARE = 0.6
"""An answer with a smaller share of distinct 4-grams is a loop."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer of one configuration. None stands for what a peer does not tell."""

    prompt_id: str
    category: str
    config: str
    baseline: str
    """Name of the plain configuration it is compared with."""
    round: int
    """From 1; a warm-up is round 0."""
    tokens: int
    """Of the answer; the end token is not among them."""
    seconds: float
    """Decoding alone, as `decode_seconds`."""
    tokens_per_second: float
    """Decoding speed; the end token counts, since it takes a pass like any other."""
    distinct_4gram: float
    """Share of the answer's 4-grams that are different: low where it runs in a loop."""
    finish_reason: str
    answer_sha256: str
    """Of the token ids."""
    text_sha256: str
    prompt_tokens: int
    prefill_seconds: float
    time_to_first_token_seconds: float
    decode_seconds: float
    total_seconds: float
    peak_memory_bytes: int
    """Of the process that answered, up to now."""
    verify_passes: int | None = None
    plain_passes: int | None = None
    proposed: int | None = None
    drafted: int | None = None
    verified: int | None = None
    accepted: int | None = None
    mean_accepted_length: float | None = None
    verified_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    acceptance_by_position: tuple[float, ...] = ()
    """For each position, the share of verify passes that accepted it."""
    agreement: float | None = None
    length_histogram: Mapping[str, int] = field(default_factory=dict)
    """How often each number of draft tokens was sent to the target."""
    time_split_seconds: Mapping[str, float] = field(default_factory=dict)
    look_ahead_hits: int | None = None
    look_ahead_misses: int | None = None
    ratio_to_plain: float | None = None
    """Speed against the baseline's on the same prompt in the same round."""
    identical_to_plain: bool | None = None
    answer: str = ""
    """What was said, for readers; empty for a peer's."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What identifies a row of a run."""
        return (self.prompt_id, self.config, self.round)

    @property
    def is_plain(self) -> bool:
        return self.config == self.baseline

    @property
    def is_loop(self) -> bool:
        """Whether the answer repeats itself."""
        return self.distinct_4gram < LOOP_SHARE

    @property
    def python_ms_per_pass(self) -> float | None:
        """The engine's own time per target pass: no model, no vocabulary-wide arithmetic."""
        passes = (self.verify_passes or 0) + (self.plain_passes or 0)
        if not passes or not self.time_split_seconds:
            return None
        return sum(self.time_split_seconds[part] for part in ("plan", "vote", "other")) * 1e3 / passes


def distinct_share(tokens: Sequence[int]) -> float:
    """Share of different 4-grams; 1 where there are none."""
    grams = [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def hash_tokens(tokens: Iterable[int]) -> str:
    return hash_text(",".join(map(str, tokens)))


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def measured(
    prompt_id: str,
    category: str,
    config: str,
    baseline: str,
    round_number: int,
    finished: Finished,
    times: Iterable[StepTimes],
    total_seconds: float,
    peak_memory_bytes: int,
) -> Row:
    """The row of an answer by the engine.

    Args:
        times: Of each of its steps.
        total_seconds: From the prompt to the last token.
    """
    metrics, timings = finished.metrics, finished.timings
    seconds = timings.decode_ms / 1e3
    made = len(finished.token_ids) + (finished.reason is FinishReason.STOP)
    split = {part: ms / 1e3 for part, ms in sum(times, StepTimes()).parts.items()}
    row = Row(
        prompt_id=prompt_id,
        category=category,
        config=config,
        baseline=baseline,
        round=round_number,
        tokens=len(finished.token_ids),
        seconds=seconds,
        tokens_per_second=made / seconds if seconds else 0.0,
        distinct_4gram=distinct_share(finished.token_ids),
        finish_reason=finished.reason.value,
        answer_sha256=hash_tokens(finished.token_ids),
        text_sha256=hash_text(finished.text),
        prompt_tokens=metrics.prompt_tokens,
        prefill_seconds=timings.prefill_ms / 1e3,
        time_to_first_token_seconds=timings.time_to_first_token_ms / 1e3,
        decode_seconds=seconds,
        total_seconds=total_seconds,
        peak_memory_bytes=peak_memory_bytes,
        time_split_seconds=split,
        look_ahead_hits=metrics.look_ahead_hits,
        look_ahead_misses=metrics.look_ahead_misses,
        answer=finished.text,
    )
    return with_counts(row, metrics)


def with_counts(row: Row, metrics: Metrics) -> Row:
    """The row with what was counted over its answer."""
    passes = metrics.verify_steps
    return replace(
        row,
        verify_passes=passes,
        plain_passes=metrics.plain_steps,
        proposed=metrics.proposed,
        drafted=metrics.drafted,
        verified=metrics.verified,
        accepted=metrics.accepted,
        mean_accepted_length=metrics.mean_accepted_length,
        verified_by_position=metrics.verified_by_position,
        accepted_by_position=metrics.accepted_by_position,
        acceptance_by_position=tuple(accepted / passes for accepted in metrics.accepted_by_position),
        agreement=metrics.mean_agreement,
        length_histogram={str(length): count for length, count in metrics.lengths.items()},
    )


def compare(rows: Sequence[Row]) -> list[Row]:
    """The rows with ratio and identity to their baselines; None where the baseline has not run in that round."""
    baselines = {row.key: row for row in rows if row.is_plain}
    return [_compared(row, baselines.get((row.prompt_id, row.baseline, row.round))) for row in rows]


def _compared(row: Row, plain: Row | None) -> Row:
    if plain is None:
        return replace(row, ratio_to_plain=None, identical_to_plain=None)
    ratio = row.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else None
    return replace(row, ratio_to_plain=ratio, identical_to_plain=_is_identical(row, plain))


def _is_identical(row: Row, plain: Row) -> bool | None:
    """A peer is compared by its text, and not at all where its sampling draws other random numbers."""
    if row.answer_sha256:
        return row.answer_sha256 == plain.answer_sha256
    return row.text_sha256 == plain.text_sha256 if row.text_sha256 else None


def row_document(row: Row) -> dict[str, Any]:
    """Plain data for JSON."""
    return asdict(row)


def row_from(document: Mapping[str, Any]) -> Row:
    """The row that `row_document` described.

    Raises:
        ValueError: it did not describe a row.
    """
    names = {part.name for part in fields(Row)}
    try:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in document.items()
            if name in names
        }
        return Row(**values)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a row: {error}") from error
