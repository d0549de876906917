"""A context whose cache several sequences use at the same time, each as exact as if it had it alone.

Attention adds up in the order of the cells, so a sequence's tokens must lie in cells of increasing number. llama.cpp
fills the lowest free cells first: a cell that is freed below others would be taken by a later token of any sequence.
So nothing is freed there. What is cut off is parked, unless it lies at the end of what is in use; when cells run short
all sequences are taken out and put back one behind the other, which is the only time at which cells are used again.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Iterable, Sequence

from engine.errors import DecodeError
from engine.runtime.context import Context, ContextSettings, Run
from engine.runtime.model import Model
from engine.runtime.state import StateBytes


class SharedContext(Context):
    """Knows the cell of every token. Sequences are never put aside here as in a context that one has alone."""

    def __init__(self, model: Model, settings: ContextSettings) -> None:
        super().__init__(model, settings)
        self._cells: dict[int, list[int]] = {}
        """Of each sequence, where its tokens lie, in their order; leading ones may be shared with other sequences."""
        self._parked: set[int] = set()
        self._used = 0
        """Cells below this are in use or parked; those from it on are free."""

    @property
    def free_cells(self) -> int:
        """How many tokens can enter before cells must be gathered."""
        return self.context_tokens - self._used

    @property
    def live_cells(self) -> int:
        """What stays in use when cells are gathered."""
        return self.cells_of(self._cells)

    @property
    def has_gaps(self) -> bool:
        """Whether gathering would free cells."""
        return self.live_cells < self._used

    def cells_of(self, sequences: Iterable[int]) -> int:
        """Cells that these sequences take when they are gathered; with sliding windows none is shared then."""
        held = [self._cells[sequence] for sequence in sequences]
        return sum(map(len, held)) if self.model.window_tokens else len(set().union(*held))

    def allocate(self) -> int:
        sequence = super().allocate()
        self._cells[sequence] = []
        return sequence

    def copy(self, source: int, length: int | None = None) -> int:
        branch = super().copy(source, length)
        self._cells[branch] = self._cells[source][:length]
        return branch

    def free(self, sequence: int) -> None:
        self._discard(sequence, 0)
        super().free(sequence)
        del self._cells[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        current = self.length(sequence)
        if length > current:
            raise ValueError(f"sequence {sequence} has {current} tokens, cannot be cut to {length}")
        self._discard(sequence, length)

    def _discard(self, sequence: int, length: int) -> None:
        """Cut a sequence; the cells at the end of all that is in use become free, the others are parked."""
        self._check_owner()
        cells = self._cells[sequence]
        kept = len(cells)
        while kept > length and cells[kept - 1] == self._used - 1 and self._is_last_holder(sequence, cells[kept - 1]):
            self._used -= 1
            kept -= 1
        if kept < len(cells):
            self._cut(sequence, kept)
        if not self.model.can_roll_back:
            del cells[self.length(sequence) :]
            return
        if length < kept:
            self._parked.update(cells[length:kept])
            self.park(sequence, length)
        del cells[length:]

    def _is_last_holder(self, sequence: int, cell: int) -> bool:
        held = (cells[-1:] for one, cells in self._cells.items() if one != sequence)
        return cell not in self._parked and [cell] not in held

    def decode(self, runs: Sequence[Run], cancel: threading.Event | None = None) -> None:
        super().decode(runs, cancel)
        for run in runs:
            taken = range(self._used, self._used + len(run.tokens))
            for sequence in (run.sequence, *run.also):
                self._cells[sequence].extend(taken)
            self._used += len(run.tokens)

    def append(self, sequence: int, state: StateBytes, tokens: int) -> None:
        """Let a sequence go on with what a state holds, in free cells.

        Args:
            sequence: It ends where the state begins.
            state: As `state` or `take_beyond` give it, of a context of the same model with the same cache format.
            tokens: In the state.

        Raises:
            DecodeError: llama.cpp refused the state; the sequence is as before.
        """
        self._check_owner()
        before = self.length(sequence)
        reader = self.allocate() if before else sequence
        try:
            self._put(reader, state, tokens)
            if before:
                self._lib.llama_memory_seq_cp(self._memory, reader, sequence, before, -1)
                self._lib.llama_memory_seq_rm(self._memory, reader, -1, -1)
        finally:
            if before:
                del self._lengths[reader], self._cells[reader]
        self._cells[sequence].extend(range(self._used, self._used + tokens))
        self._used += tokens
        self._lengths[sequence] = before + tokens

    def _put(self, sequence: int, state: StateBytes, tokens: int) -> None:
        buffer = (ctypes.c_uint8 * len(state)).from_buffer(state.data)
        if not self._lib.llama_state_seq_set_data(self.handle, buffer, len(state), sequence):
            raise DecodeError(f"{tokens} tokens of a request could not be brought back into the cache")

    def gather(self) -> frozenset[int]:
        """Bring all sequences' cells together, so that none is parked. What is shared stays shared.

        Returns:
            Sequences whose state llama.cpp refused, and those that shared cells with them; they are empty.
        """
        self._check_owner()
        places = self._family()
        states: list[StateBytes | None] = []
        for sequence, _, shared in places:
            own = self.length(sequence) - shared
            states.append(self.take_beyond(sequence, shared) if own else None)
        lengths = self._lengths.copy()
        self.clear()
        lost: set[int] = set()
        for (sequence, parent, shared), state in zip(places, states, strict=True):
            own = lengths[sequence] - shared
            if parent in lost and shared:
                lost.add(sequence)
                continue
            try:
                if state is not None:
                    self._put(sequence, state, own)
            except DecodeError:
                lost.add(sequence)
                continue
            if shared:
                self._lib.llama_memory_seq_cp(self._memory, parent, sequence, 0, shared)
            cells = range(self._used, self._used + own)
            self._cells[sequence] = [*self._cells[parent][:shared], *cells]
            self._lengths[sequence] = lengths[sequence]
            self._used += own
        return frozenset(lost)

    def _family(self) -> list[tuple[int, int, int]]:
        """Every sequence after the one it shares most cells with: itself, that one, and how many they share.

        The state of a sequence with sliding windows leaves out what is beyond them, so these share nothing.
        """
        order = sorted(self._cells, key=self._cells.__getitem__)
        places = [(sequence, sequence, 0) for sequence in order]
        if not self.model.window_tokens:
            for at in range(1, len(order)):
                before, own = self._cells[order[at - 1]], self._cells[order[at]]
                pairs = enumerate(zip(before, own, strict=False))
                shared = next((at for at, (left, right) in pairs if left != right), min(len(before), len(own)))
                places[at] = (order[at], order[at - 1], shared)
        return places

    def clear(self) -> None:
        """Empty all sequences; they stay allocated."""
        self._check_owner()
        self._lib.llama_memory_clear(self._memory, False)
        self._parking = None
        self.parked_tokens = 0
        self._parked.clear()
        self._used = 0
        for sequence in self._cells:
            self._cells[sequence] = []
            self._lengths[sequence] = 0

    def check(self) -> None:
        """Check that what is kept about cells agrees with itself and with llama.cpp.

        Raises:
            AssertionError: it does not.
        """
        for sequence, cells in self._cells.items():
            length, stored = self.length(sequence), self.stored_length(sequence)
            assert length == stored == len(cells), f"{length} tokens, {stored} stored, in {len(cells)} cells"
            assert all(left < right for left, right in itertools.pairwise(cells)), "cells are out of order"
            assert not cells or cells[-1] < self._used, "a token lies in a cell that counts as free"
            assert sequence != self._parking, "a sequence that is in use holds what is parked"
        held = self._parked.union(*self._cells.values())
        assert len(held) == self._used, f"{self._used} cells are counted and {len(held)} are held"
