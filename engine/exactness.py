"""Does a position's logits depend on how it is scored? Measured on the loaded model, never assumed.

A fixed text is scored one token at a time, as plain decoding does, then again in every way that drafting, prompts and
conversations score it: in batches, in token trees, after other thread counts, beside other sequences, after a prompt
read in chunks. Where all rows are bit-equal, verifying a draft gives exactly the choices that plain decoding gives;
where they are not, the report says by how much the two best tokens move against each other.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
import numpy.typing as npt

from engine.prefill import PromptReader
from engine.runtime.context import Context, FloatRows, Run

PROBED_TEXT = (
    "The harbour was quiet when the first boats came in. Mira counted the crates, wrote 14 in her notebook, and "
    'asked: "Is this all?" def total(items): return sum(item.price for item in items) # 3.50 + 2.25 = 5.75. '
)
PROBED_TOKENS = 32
"""Most rows compared at one place in one way."""
PROBED_STARTS = (64, 520)
"""Beyond 512 cells llama.cpp may split attention over threads, and results may change with it."""
PROBED_BATCHES = (*range(2, 17), 24, 32)
PROMPT_CHUNK_TOKENS = 64
"""How the shallow place's prompt is read; the deep one's is read in passes as large as they get."""
PROBED_REQUESTS = 3
REQUEST_TOKENS = 4
"""Tokens of each request in one batch, where they share a prompt."""
REQUESTS_APART = 8
DRAFTS_APART = (0, 1, 2)
"""Draft tokens of one request, the next and the one after it, and so on in turn: soon no two neighbours are equally
long."""
ROUNDS_APART = 16
SHORT_ROUNDS_APART = 2
CARRIED_BATCHES = (2, 4, 8, 16)
THREADS_PROBED_TOKENS = 16
BATCHED_TOKENS = 16
"""Rows compared for each batch size, unless a batch is larger."""
SLICE_TOKENS = 64
"""Read at a time, so that a probe can be stopped."""
SHORT_PROMPT_TOKENS = 48
SHORT_TOKENS = 16
SHORT_BATCHES = (2, 3, 4, 5, 6, 7, 8, 12, 16)
CROWDED_CELLS = 520
"""So many are in use where the short probe compares."""

ProbeProgress = Callable[[float], None]


class Way(str, Enum):
    """How rows were scored that are compared with plain decoding's. The value is its name for the user."""

    BATCH = "batches"
    """So many tokens of the text in a pass."""
    TREE = "token trees"
    """As a side branch that is then followed, in a pass of so many tokens."""
    REQUESTS = "several requests at once"
    """Beside other sequences, with which it shares a prompt or nothing, in a pass of so many tokens."""
    THREADS = "other thread counts"
    """One token a pass, on so many threads, after a text that was read on all of them."""
    CHANGING_THREADS = "threads changing between passes"
    """One token a pass, on one thread and on so many by turns."""
    PREFILL = "prompt chunks"
    """At the end of a prompt read in chunks of so many tokens."""
    AFTER_PREFILL = "decoding after a prompt in chunks"
    """One token a pass, after a prompt read in chunks of so many tokens."""
    AFTER_CARRY = "batches after a carried prompt"
    """So many tokens in a pass, against one, after a prompt that was read in an F16 cache and carried over."""


@dataclass(frozen=True, slots=True)
class MarginShift:
    """How far unequal rows move plain decoding's two best tokens against each other, in logits."""

    rows: int
    median: float
    percentile_95: float
    greatest: float

    @classmethod
    def of(cls, shifts: npt.NDArray[np.float32]) -> MarginShift:
        """Args:
        shifts: One for each row that is not bit-equal; at least one.
        """
        median, percentile_95 = np.percentile(shifts, (50, 95))
        return cls(len(shifts), float(median), float(percentile_95), float(shifts.max()))


@dataclass(frozen=True, slots=True)
class Finding:
    """How rows scored in one way compare with rows scored one token at a time."""

    way: Way
    size: int
    """Tokens in a pass, or threads, as the way says."""
    first_position: int
    compared_rows: int
    equal_rows: int
    greatest_difference: float
    """In logits; zero when all are bit-equal."""
    changed_choices: int
    """Rows whose most probable token differs."""
    margin_shift: MarginShift | None
    """Of the rows that differ; None when all are bit-equal."""

    @property
    def is_equal(self) -> bool:
        return self.equal_rows == self.compared_rows


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    """Findings by way, size and place."""

    kv_type: str
    threads: int
    is_thorough: bool
    findings: tuple[Finding, ...]
    """Empty for a model that cannot take tokens back: nothing is ever drafted for it."""
    margin_shift: MarginShift | None
    """Of all rows that differ, whatever the way; None when all are bit-equal."""
    one_token_ms: float = 0.0
    """The fastest of the passes of one token that all was compared with."""

    @property
    def is_exact(self) -> bool:
        return all(finding.is_equal for finding in self.findings)

    @property
    def equal_batches(self) -> tuple[int, ...]:
        """Sizes of passes that are bit-equal to one token a pass wherever they were compared."""
        unequal = {finding.size for finding in self.of(Way.BATCH) if not finding.is_equal}
        return tuple(sorted({finding.size for finding in self.of(Way.BATCH)} - unequal))

    def is_equal(self, *ways: Way) -> bool:
        """Whether all of these ways were compared and are bit-equal."""
        return all(self.of(way) and _are_equal(self.of(way)) for way in ways)

    @property
    def compared_rows(self) -> int:
        return sum(finding.compared_rows for finding in self.findings)

    @property
    def changed_choices(self) -> int:
        return sum(finding.changed_choices for finding in self.findings)

    @property
    def summary(self) -> str:
        """One clause for the user, without a full stop."""
        if not self.findings:
            return "nothing is drafted for this model, so there is nothing to compare"
        if self.margin_shift is None:
            others = [str(way.value) for way in Way if way is not Way.BATCH and self.of(way)]
            return "bit-equal in every batch size probed" + (f"; also {', '.join(others)}" if others else "")
        shift = self.margin_shift
        unequal = ", ".join(f"{way.value}{_sizes(self.of(way))}" for way in Way if not _are_equal(self.of(way)))
        return (
            f"not bit-equal: {unequal}; the margin of the best token moves by {shift.median:.2g} (median), "
            f"{shift.percentile_95:.2g} (95 %), {shift.greatest:.2g} at most; {self.changed_choices} of "
            f"{self.compared_rows} choices change"
        )

    def of(self, way: Way) -> tuple[Finding, ...]:
        """The findings of one way."""
        return tuple(finding for finding in self.findings if finding.way is way)

    def in_words(self, way: Way) -> str:
        """What was found of one way, for the user."""
        findings = self.of(way)
        if not findings:
            return "not compared"
        rows = sum(finding.compared_rows for finding in findings)
        if _are_equal(findings):
            return f"bit-equal in {rows} rows"
        differing = rows - sum(finding.equal_rows for finding in findings)
        places = sorted({finding.first_position for finding in findings if not finding.is_equal})
        shift = max(finding.margin_shift.greatest for finding in findings if finding.margin_shift is not None)
        changed = sum(finding.changed_choices for finding in findings)
        return (
            f"{differing} of {rows} rows differ{_sizes(findings)}, from position {' and '.join(map(str, places))}; "
            f"margins move by up to {shift:.2g}; {changed} choices change"
        )


def _are_equal(findings: Sequence[Finding]) -> bool:
    return all(finding.is_equal for finding in findings)


def _sizes(findings: Sequence[Finding]) -> str:
    """The sizes that are not equal, where some others are."""
    unequal = sorted({finding.size for finding in findings if not finding.is_equal})
    all_sizes = {finding.size for finding in findings}
    return "" if len(unequal) == len(all_sizes) else f" of {', '.join(map(str, unequal))}"


def probe(context: Context, *, is_thorough: bool, progress: ProbeProgress | None = None) -> ExactnessReport:
    """Compare every way of scoring with single tokens, on sequences of its own.

    Args:
        context: Its owner thread must call; other sequences wait meanwhile.
        is_thorough: Every way, shallow and beyond 512 cells, which takes as long as some hundred tokens and a few
            prompts of that length; otherwise what decides how a set is loaded and what is said of it (batches, token
            trees, a prompt chunk, several requests), beyond 512 cells where there are so many, which takes as long as
            some forty tokens and a short prompt.
        progress: Called with the share done.

    Raises:
        DecodeError: llama.cpp refused a pass.
    """
    settings = context.settings
    probing = _Probing(context)
    if context.model.can_roll_back:
        steps = list(probing.thorough() if is_thorough else probing.short())
        try:
            probing.begin()
            for done, step in enumerate(steps, start=1):
                step()
                if probing.is_hopeless and not is_thorough:
                    break
                if progress is not None:
                    progress(done / len(steps))
        finally:
            probing.end()
    shifts = probing.shifts
    return ExactnessReport(
        settings.kv_type.name,
        settings.threads,
        is_thorough,
        tuple(probing.findings),
        MarginShift.of(np.concatenate(shifts)) if shifts else None,
        probing.one_token_ms,
    )


Step = Callable[[], None]


class _Probing:
    """One probe at work: a text, a sequence, and what plain decoding says at the probed places."""

    def __init__(self, context: Context) -> None:
        self.findings: list[Finding] = []
        self.shifts: list[npt.NDArray[np.float32]] = []
        """Margin shifts of unequal rows, one array for each finding that has any."""
        self.one_token_ms = 0.0
        self._crowd: list[int] = []
        """Sequences that only fill cells."""
        self._context = context
        self._sequence = -1
        self._references: dict[int, FloatRows] = {}
        self._at_once = np.empty((0, context.model.vocabulary.size), np.float32)
        text = context.model.vocabulary.tokenize(PROBED_TEXT, adds_special=False)
        needed = PROBED_STARTS[-1] + PROBED_TOKENS
        self._tokens = (text * (needed // len(text) + 1))[:needed]

    def begin(self) -> None:
        self._sequence = self._context.allocate()
        self._context.hold_alone(self._sequence)

    def end(self) -> None:
        self._set_threads(self._context.settings.threads)
        for sequence in (*self._crowd, self._sequence):
            if sequence >= 0:
                self._context.free(sequence)

    @property
    def is_hopeless(self) -> bool:
        """Even two tokens in a pass are not equal to one each."""
        return any(finding.way is Way.BATCH and not finding.is_equal and finding.size == 2 for finding in self.findings)

    def short(self) -> Iterator[Step]:
        start = SHORT_PROMPT_TOKENS
        yield partial(self._read_at_once, start, SHORT_TOKENS)
        yield partial(self._gather_crowd, start)
        yield partial(self._refer, start, SHORT_TOKENS)
        yield partial(self._judge_reading, start)
        for size in SHORT_BATCHES:
            yield partial(self._batch, start, size)
        yield partial(self._crowd_apart, start)
        yield partial(self._tree, start)

    def thorough(self) -> Iterator[Step]:
        """All comparisons, in an order that reads the text one by one only once."""
        settings = self._context.settings
        # Requests and branches may need some cells for each row.
        starts = [start for start in PROBED_STARTS if start + 4 * PROBED_TOKENS <= self._context.context_tokens]
        for previous, start in itertools.pairwise((0, *starts)):
            for end in range(previous, start, SLICE_TOKENS):
                yield partial(self._read, end, 1)
            yield partial(self._refer, start, PROBED_TOKENS)
            for size in PROBED_BATCHES:
                if size <= settings.max_outputs:
                    yield partial(self._batch, start, size)
            for threads in range(1, settings.threads):
                yield partial(self._on_threads, start, Way.THREADS, (threads,))
            if settings.threads > 1:
                yield partial(self._on_threads, start, Way.CHANGING_THREADS, (1, settings.threads))
            if self._context.spare_sequences >= PROBED_REQUESTS:
                yield partial(self._requests, start)
            if start == starts[0]:
                yield partial(self._twins_apart, start)
            yield partial(self._tree, start)
        chunks = zip(PROBED_STARTS, (PROMPT_CHUNK_TOKENS, settings.batch_tokens), strict=True)
        for start, size in chunks:
            if start in starts and size <= start + PROBED_TOKENS:
                yield partial(self._prefill, start, size)
        if starts[-1:] == [PROBED_STARTS[-1]]:
            yield partial(self._carry, PROBED_STARTS[-1])

    def _refer(self, start: int, count: int) -> None:
        """Read on to `start` and keep what plain decoding says of the next `count` tokens."""
        self._read(start, 1)
        self._references[start] = self._one_by_one(start, start + count)
        self._context.truncate(self._sequence, start)

    def _read_at_once(self, start: int, count: int) -> None:
        """A prompt in one chunk, of which the last rows are kept and taken back again."""
        self._context.decode([Run(self._sequence, self._tokens[: start + count], count)])
        self._at_once = self._context.logits().copy()
        self._context.truncate(self._sequence, start)

    def _judge_reading(self, start: int) -> None:
        self._compare(Way.PREFILL, start + len(self._at_once), start, self._at_once)

    def _gather_crowd(self, start: int) -> None:
        """Put copies of the prompt into cells behind it, so that what follows stands deep in the cache at no cost."""
        context = self._context
        wanted = (CROWDED_CELLS - start) // start + 1
        has_room = context.context_tokens >= (wanted + 2) * start + 4 * SHORT_TOKENS
        if has_room and context.spare_sequences >= wanted + PROBED_REQUESTS:
            self._crowd = [context.duplicate(self._sequence) for _ in range(wanted)]

    def _batch(self, start: int, size: int) -> None:
        count = min(len(self._references[start]), max(size, BATCHED_TOKENS))
        rows = self._rows(start, start + count, size)
        self._context.truncate(self._sequence, start)
        self._compare(Way.BATCH, size, start, rows)

    def _tree(self, start: int) -> None:
        """Every second token is found on a side branch, followed as `engine.verify.tree` follows one."""
        context, sequence = self._context, self._sequence
        if context.spare_sequences < 1:
            return
        rows: list[FloatRows] = []
        wrong = self._tokens[0]
        for position in range(start, start + len(self._references[start]), 2):
            one, two = self._tokens[position : position + 2]
            branch = context.copy(sequence)
            trunk = Run(sequence, (one,), 1, (branch,))
            context.decode([trunk, Run(sequence, (wrong, wrong), 2), Run(branch, (two,), 1)])
            rows.append(context.logits()[[0, 3]])
            context.adopt(sequence, branch, position + 1)
        context.truncate(sequence, start)
        context.tidy(sequence)
        self._compare(Way.TREE, 4, start, np.concatenate(rows))

    def _requests(self, start: int) -> None:
        """The same text as several requests that share a prompt."""
        context = self._context
        copies = [context.copy(self._sequence) for _ in range(PROBED_REQUESTS - 1)]
        rows: list[FloatRows] = []
        try:
            for position in range(start, start + PROBED_TOKENS, REQUEST_TOKENS):
                tokens = self._tokens[position : position + REQUEST_TOKENS]
                context.decode([Run(sequence, tokens, len(tokens)) for sequence in (self._sequence, *copies)])
                rows.append(context.logits().copy().reshape(PROBED_REQUESTS, len(tokens), -1))
        finally:
            for copy in copies:
                context.free(copy)
            context.truncate(self._sequence, start)
        own_rows = np.concatenate(rows, axis=1)
        reference = np.concatenate([self._references[start]] * PROBED_REQUESTS)
        self._note(Way.REQUESTS, PROBED_REQUESTS * REQUEST_TOKENS, start, reference, own_rows.reshape(reference.shape))

    def _crowd_apart(self, start: int) -> None:
        if len(self._crowd) >= REQUESTS_APART:
            self._apart(self._crowd[:REQUESTS_APART], start, SHORT_ROUNDS_APART)

    def _twins_apart(self, start: int) -> None:
        context = self._context
        needed = (1 + REQUESTS_APART) * (start + PROBED_TOKENS)
        if context.spare_sequences < REQUESTS_APART or context.context_tokens < needed:
            return
        twins: list[int] = []
        try:
            for _ in range(REQUESTS_APART):
                twins.append(context.duplicate(self._sequence))
            self._apart(twins, start, ROUNDS_APART)
        finally:
            for twin in twins:
                context.free(twin)

    def _apart(self, requests: Sequence[int], start: int, rounds: int) -> None:
        """Requests that share no cell, which fill the cache by turns: one token and a draft each, then one token each.

        Args:
            requests: Sequences that hold the text up to `start`; they go on.
        """
        context = self._context
        found: dict[int, tuple[list[FloatRows], list[FloatRows]]] = {}
        for number in range(rounds):
            runs: list[Run] = []
            references: list[FloatRows] = []
            for request, drafted in zip(requests, itertools.cycle(DRAFTS_APART), strict=False):
                first = context.length(request)
                tokens = self._tokens[first : first + 1 + (0 if number % 2 else drafted)]
                runs.append(Run(request, tokens, len(tokens)))
                references.append(self._references[start][first - start : first - start + len(tokens)])
            context.decode(runs)
            expected, rows = found.setdefault(sum(len(run.tokens) for run in runs), ([], []))
            expected += references
            rows.append(context.logits().copy())
        for size, (expected, rows) in found.items():
            self._note(Way.REQUESTS, size, start, np.concatenate(expected), np.concatenate(rows))

    def _set_threads(self, threads: int) -> None:
        self._context.set_threads(threads, threads)

    def _on_threads(self, start: int, way: Way, counts: Sequence[int]) -> None:
        """One token a pass, on so many threads by turns."""
        rows: list[FloatRows] = []
        try:
            for number in range(THREADS_PROBED_TOKENS):
                self._set_threads(counts[number % len(counts)])
                rows.append(self._one_by_one(start + number, start + number + 1))
        finally:
            self._set_threads(self._context.settings.threads)
            self._context.truncate(self._sequence, start)
        self._compare(way, counts[-1], start, np.concatenate(rows))

    def _prefill(self, start: int, size: int) -> None:
        """Read a prompt in chunks, then decode; and let the prompt's own last chunk end at the same place."""
        context, sequence = self._context, self._sequence
        context.truncate(sequence, 0)
        end = start + PROBED_TOKENS
        last_chunk = end - size
        self._read(last_chunk, size)
        kept = min(PROBED_TOKENS, context.settings.max_outputs, size)
        context.decode([Run(sequence, self._tokens[last_chunk:end], kept)])
        reference = self._references[start][-kept:]
        self._note(Way.PREFILL, size, end - kept, reference, context.logits().copy())
        context.truncate(sequence, min(last_chunk, start))
        self._read(start, size)
        self._compare(Way.AFTER_PREFILL, size, start, self._one_by_one(start, end))

    def _carry(self, start: int) -> None:
        """Read a prompt as long ones are read, then compare batches with single tokens after it."""
        context, sequence = self._context, self._sequence
        reader = PromptReader(context)
        if not reader.carries:
            return
        context.hold_alone(sequence)
        reader.begin(sequence, 0, [(0, start + 1)])
        for _ in reader.read(sequence, self._tokens, start, threading.Event()):
            pass
        end = start + CARRIED_BATCHES[-1]
        single = self._one_by_one(start, end)
        for size in CARRIED_BATCHES:
            context.truncate(sequence, start)
            self._note(Way.AFTER_CARRY, size, start, single, self._rows(start, end, size))

    def _read(self, end: int, size: int) -> None:
        """Read on to `end` in chunks."""
        for position in range(self._context.length(self._sequence), end, size):
            self._context.decode([Run(self._sequence, self._tokens[position : min(end, position + size)], 0)])

    def _one_by_one(self, start: int, end: int) -> FloatRows:
        return self._rows(start, end, 1)

    def _rows(self, start: int, end: int, size: int) -> FloatRows:
        """Rows of the tokens from `start` to `end`, scored `size` at a time at the end of the sequence."""
        rows = [np.empty((0, self._context.model.vocabulary.size), np.float32)]
        for position in range(start, end, size):
            batch = self._tokens[position : min(end, position + size)]
            began = time.perf_counter()
            self._context.decode([Run(self._sequence, batch, len(batch))])
            if size == 1:
                elapsed_ms = (time.perf_counter() - began) * 1e3
                self.one_token_ms = min(self.one_token_ms or elapsed_ms, elapsed_ms)
            rows.append(self._context.logits().copy())
        return np.concatenate(rows)

    def _compare(self, way: Way, size: int, start: int, rows: FloatRows) -> None:
        self._note(way, size, start, self._references[start][: len(rows)], rows)

    def _note(self, way: Way, size: int, first_position: int, reference: FloatRows, rows: FloatRows) -> None:
        difference = np.abs(reference - rows).max(axis=1)
        unequal = difference != 0
        shifts = margin_shifts(reference[unequal], rows[unequal])
        if len(shifts):
            self.shifts.append(shifts)
        self.findings.append(
            Finding(
                way=way,
                size=size,
                first_position=first_position,
                compared_rows=len(rows),
                equal_rows=int(len(rows) - unequal.sum()),
                greatest_difference=float(difference.max()),
                changed_choices=int((reference.argmax(axis=1) != rows.argmax(axis=1)).sum()),
                margin_shift=MarginShift.of(shifts) if len(shifts) else None,
            )
        )


def margin_shifts(reference: FloatRows, rows: FloatRows) -> npt.NDArray[np.float32]:
    """By how much the reference's two best tokens move against each other, for each row.

    Args:
        reference: Logits of shape (rows, vocabulary).
        rows: The same positions scored otherwise.
    """
    best = np.argpartition(reference, -2, axis=1)[:, -2:]
    before = np.diff(np.take_along_axis(reference, best, axis=1), axis=1)
    after = np.diff(np.take_along_axis(rows, best, axis=1), axis=1)
    shifts: npt.NDArray[np.float32] = np.abs(after - before)[:, 0]
    return shifts
