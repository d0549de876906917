"""Does a position's logits depend on the batch it is scored in? Measured on the loaded model, never assumed.

A fixed text is scored one token at a time, then again in batches of the sizes drafting uses. Where all rows are
bit-equal, verifying a draft gives exactly the choices that plain decoding gives. How a prompt was read is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.runtime.context import Context, Run

PROBED_TEXT = (
    "The harbour was quiet when the first boats came in. Mira counted the crates, wrote 14 in her notebook, and "
    'asked: "Is this all?" def total(items): return sum(item.price for item in items) # 3.50 + 2.25 = 5.75. '
)
PROBED_TOKENS = 48
LONG_PROBE_START = 520
"""Beyond 512 cells llama.cpp may split attention over threads, and results may change with it."""
PROBED_BATCHES = (2, 3, 4, 5, 8, 12, 16)

ProbeProgress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class SizeFinding:
    """How rows scored in batches of one size compare with rows scored one token at a time."""

    batch_tokens: int
    first_position: int
    compared_rows: int
    equal_rows: int
    greatest_difference: float
    """In logits; zero when all are bit-equal."""
    changed_choices: int
    """Rows whose most probable token differs."""

    @property
    def is_equal(self) -> bool:
        return self.equal_rows == self.compared_rows


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    """Findings by batch size, shallow and deep in the context."""

    kv_type: str
    threads: int
    findings: tuple[SizeFinding, ...]

    @property
    def is_exact(self) -> bool:
        return all(finding.is_equal for finding in self.findings)

    @property
    def summary(self) -> str:
        if self.is_exact:
            return "bit-equal in every batch size probed"
        unequal = sorted({finding.batch_tokens for finding in self.findings if not finding.is_equal})
        worst = max(finding.greatest_difference for finding in self.findings)
        sizes = ", ".join(map(str, unequal))
        return f"not bit-equal in batches of {sizes}: logits differ by up to {worst:.2g}"


def probe(
    context: Context, *, reaches_beyond_512: bool = False, progress: ProbeProgress | None = None
) -> ExactnessReport:
    """Compare batches with single tokens on a sequence of its own.

    Args:
        context: Its owner thread must call; other sequences wait meanwhile.
        reaches_beyond_512: Also compare after 520 tokens of context, which takes a longer prefill.
        progress: Called with the share done.
    """
    vocabulary = context.model.vocabulary
    text = vocabulary.tokenize(PROBED_TEXT, adds_special=False)
    starts = [0]
    if reaches_beyond_512 and context.context_tokens > LONG_PROBE_START + PROBED_TOKENS:
        starts.append(LONG_PROBE_START)
    needed = starts[-1] + PROBED_TOKENS
    tokens = (text * (needed // len(text) + 1))[:needed]
    sequence = context.allocate()
    context.hold_alone(sequence)
    findings: list[SizeFinding] = []
    total = len(starts) * (1 + len(PROBED_BATCHES))
    try:
        for start in starts:
            _fill(context, sequence, tokens[:start])
            probed = tokens[start : start + PROBED_TOKENS]
            reference = _score(context, sequence, probed, 1)
            for size in PROBED_BATCHES:
                rows = _score(context, sequence, probed, size)
                findings.append(_compare(reference, rows, size, start))
                if progress is not None:
                    progress((len(findings) + start // LONG_PROBE_START + 1) / total)
    finally:
        context.free(sequence)
    return ExactnessReport(context.settings.kv_type.name, context.settings.threads, tuple(findings))


def _fill(context: Context, sequence: int, tokens: Sequence[int]) -> None:
    size = context.settings.batch_tokens
    for start in range(context.length(sequence), len(tokens), size):
        context.decode([Run(sequence, tokens[start : start + size], 0)])


def _score(context: Context, sequence: int, tokens: Sequence[int], size: int) -> npt.NDArray[np.float32]:
    """Rows for all tokens, scored `size` at a time; the sequence is as before afterwards."""
    start = context.length(sequence)
    rows: list[npt.NDArray[np.float32]] = []
    for position in range(0, len(tokens), size):
        batch = tokens[position : position + size]
        context.decode([Run(sequence, batch, len(batch))])
        rows.append(context.logits().copy())
    context.truncate(sequence, start)
    return np.concatenate(rows)


def _compare(reference: npt.NDArray[np.float32], rows: npt.NDArray[np.float32], size: int, start: int) -> SizeFinding:
    difference = np.abs(reference - rows).max(axis=1)
    return SizeFinding(
        batch_tokens=size,
        first_position=start,
        compared_rows=len(rows),
        equal_rows=int((difference == 0).sum()),
        greatest_difference=float(difference.max()),
        changed_choices=int((reference.argmax(axis=1) != rows.argmax(axis=1)).sum()),
    )
