"""The state of a sequence as llama.cpp writes it, and the same keys and values for a cache of another number format.

The layout is llama.cpp's own affair and may change with it. What does not look as expected in every field is refused,
and whoever converts probes first that a state comes back as it went in.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.config import KvType, NumberFormat

StateBytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

_HEAD_BYTES = 8
"""llama.cpp's mark, and the sequence that the state was of."""
_MOST_LAYERS = 10_000
_INFINITE = 0x7C00
"""The F16 number that all larger ones become."""


class UnknownState(Exception):
    """The state has a layout or a number that cannot be carried over."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Keys or values of one layer: views of the state."""

    type: npt.NDArray[np.int32]
    """ggml's number of the format, alone in its array."""
    values: Words
    """Shape (cells, numbers in a row); bit patterns."""


@dataclass(frozen=True, slots=True)
class Cells:
    """What one cache holds of a sequence; models with two kinds of attention have two caches."""

    positions: npt.NDArray[np.int32]
    rows: tuple[Rows, ...]
    """Keys of all layers, then values of all layers."""

    @property
    def keys(self) -> tuple[Rows, ...]:
        return self.rows[: len(self.rows) // 2]

    @property
    def values(self) -> tuple[Rows, ...]:
        return self.rows[len(self.rows) // 2 :]


def cells_of(state: StateBytes) -> tuple[Cells, ...]:
    """The parts of a state, as views: who changes them changes the state.

    Raises:
        UnknownState: it is laid out otherwise.
    """
    return tuple(_Reader(state).caches())


def convert(state: StateBytes, source: KvType, destination: KvType) -> None:
    """Give the keys and values of a state other two-byte formats, in place, rounding to nearest even.

    Raises:
        UnknownState: it is laid out otherwise, of another format, or has numbers too large; it may be half converted.
    """
    for cells in cells_of(state):
        for rows in cells.keys:
            _convert_rows(rows, source.keys, destination.keys)
        for rows in cells.values:
            _convert_rows(rows, source.values, destination.values)


def _convert_rows(rows: Rows, source: NumberFormat, destination: NumberFormat) -> None:
    if rows.type[0] != source:
        raise UnknownState(f"keys or values have format {rows.type[0]}, not {source:d}")
    if source is destination:
        return
    rows.values[...] = _table(source, destination)[rows.values]
    if destination is NumberFormat.F16 and np.any(rows.values & 0x7FFF == _INFINITE):
        raise UnknownState("keys or values are too large for F16")
    rows.type[0] = destination


def keep_beginning(state: StateBytes, earlier: StateBytes) -> None:
    """Let the first cells of a state have, bit for bit, the keys and values of an earlier one of the same format.

    Raises:
        UnknownState: the earlier one is not its beginning.
    """
    caches, caches_before = cells_of(state), cells_of(earlier)
    if [len(cells.rows) for cells in caches] != [len(cells.rows) for cells in caches_before]:
        raise UnknownState("the states are of different models")
    for cells, before in zip(caches, caches_before, strict=True):
        count = len(before.positions)
        if not np.array_equal(cells.positions[:count], before.positions):
            raise UnknownState("the cells do not stand in the order of their tokens")
        for rows, old in zip(cells.rows, before.rows, strict=True):
            rows.values[:count] = old.values


class _Reader:
    """Walks through a state; every field is checked."""

    def __init__(self, state: StateBytes) -> None:
        self._state = state
        self._at = _HEAD_BYTES

    def caches(self) -> Iterator[Cells]:
        while self._at < len(self._state):
            streams, count = self._numbers("<II")
            self._expect(streams == 1)
            if not count:
                yield Cells(np.empty(0, np.int32), ())
                continue
            facts = self._take(12 * count).view(np.int32).reshape(count, 3)
            self._expect(bool(np.all(facts[:, 1] == 1)))
            is_transposed, layers = self._numbers("<II")
            self._expect(is_transposed == 0 and 0 < layers <= _MOST_LAYERS)
            yield Cells(facts[:, 0], tuple(self._rows(count) for _ in range(2 * layers)))

    def _rows(self, count: int) -> Rows:
        kind = self._take(4).view(np.int32)
        (row_bytes,) = self._numbers("<Q")
        self._expect(row_bytes % 2 == 0 and 0 < row_bytes < len(self._state))
        return Rows(kind, self._take(count * row_bytes).view(np.uint16).reshape(count, -1))

    def _numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)).tobytes())

    def _take(self, size_bytes: int) -> StateBytes:
        start, self._at = self._at, self._at + size_bytes
        self._expect(self._at <= len(self._state))
        return self._state[start : self._at]

    def _expect(self, holds: bool) -> None:
        if not holds:
            raise UnknownState("llama.cpp lays the state of a sequence out otherwise than is known here")


@functools.cache
def _table(source: NumberFormat, destination: NumberFormat) -> Words:
    """For every bit pattern of one two-byte format the nearest one of another."""
    patterns = np.arange(2**16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        numbers = patterns.view(np.float16).astype(np.float32) if source is NumberFormat.F16 else _wide(patterns)
        return numbers.astype(np.float16).view(np.uint16) if destination is NumberFormat.F16 else _narrow(numbers)


def _wide(patterns: Words) -> npt.NDArray[np.float32]:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def _narrow(numbers: npt.NDArray[np.float32]) -> Words:
    bits = numbers.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
