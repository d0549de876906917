"""Reading prompts into the target's cache; long stretches are read at the speed of an F16 cache and carried over.

The kernel that reads prompts fast serves F16 caches only, and exactness asks for another format. So a long stretch is
read in a second context of the same model, which lives no longer than that, and its keys and values are converted. They
are not bit-equal to those of a stretch that was read directly: which stretches are carried must be a matter of the
conversation alone, never of what the cache happens to hold. It is, since a stretch that is carried is carried whole.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.config import KvType
from engine.errors import DecodeError, MemoryShortage
from engine.memory import COMPUTE_BUFFER_BYTES, check_memory
from engine.runtime.context import Context, ContextSettings, Run
from engine.runtime.state import StateBytes, UnknownState, cells_of, convert, keep_beginning

CARRIED_TYPES = (KvType.BF16_F16, KvType.BF16)
"""Caches that long stretches are carried into: of two-byte numbers, as the F16 cache is that reads faster."""
LEAST_CARRIED_TOKENS = 512
"""A shorter stretch gains less than the second context and the conversion cost."""
FAST_BATCH_TOKENS = 128
CELL_STEP = 256
"""llama.cpp rounds a context up to a multiple of this."""
COPIES_IN_MEMORY = 3
"""The second context's cache, its state, and the target's own state."""
PROBED_TOKENS = 24
PROBED_LIKENESS = 0.99
"""How closely logits after a carried text follow those of the F16 cache that it was read in."""


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """Consecutive tokens of a prompt that are carried."""

    start: int
    end: int


Part = tuple[int, int]
"""Where a part of a prompt begins and ends, in tokens."""


def stretches(parts: Sequence[Part]) -> frozenset[Stretch]:
    """Which tokens are worth carrying.

    Args:
        parts: Those that are no answer of the target. The last token of each is read with what follows it.
    """
    long = (Stretch(start, end - 1) for start, end in parts if end - 1 - start >= LEAST_CARRIED_TOKENS)
    return frozenset(long)


def usable_prefix(shared: int, wanted: Collection[Stretch], held: Collection[Stretch]) -> int:
    """How many cached tokens a prompt can go on from: those that were read as the prompt wants them read.

    Args:
        shared: Tokens that cache and prompt have in common.
        wanted: The prompt's stretches.
        held: The cache's.
    """
    broken = [one.start for one in {*wanted, *held} if one.end > shared or one not in wanted or one not in held]
    return min([shared, *broken])


class PromptReader:
    """Reads prompts into one context, and knows which stretches its sequences hold. Used by the context's owner."""

    def __init__(self, context: Context) -> None:
        """Finds out whether stretches can be carried: a short text is, there and back, in a few short passes."""
        self._context = context
        self._held: dict[int, frozenset[Stretch]] = {}
        self._wanted: frozenset[Stretch] = frozenset()
        self.reason = ""
        """Why no stretch is carried; empty where long ones are."""
        if context.settings.kv_type not in CARRIED_TYPES:
            self.reason = f"a cache in {context.settings.kv_type.name} is read at its own speed"
        elif not context.model.can_roll_back:
            self.reason = "this model's state is more than keys and values"
        else:
            self.reason = _fault(context)

    @property
    def carries(self) -> bool:
        """Whether long stretches are carried."""
        return not self.reason

    def begin(self, sequence: int, shared: int, parts: Sequence[Part]) -> int:
        """Cut a sequence that has the cache for itself back to what a prompt can go on from.

        Args:
            sequence: To be read into.
            shared: Tokens that the sequence and the prompt have in common.
            parts: Of the prompt, those that are no answer of the target.

        Returns:
            The tokens that stay.
        """
        if self._context.model.window_tokens:
            # The state of a sequence leaves out what is beyond the window, so no stretch can go on from another.
            parts = [part for part in parts if part[0] == 0]
        self._wanted = stretches(parts) if self.carries else frozenset()
        length = self._context.length(sequence)
        held = frozenset(one for one in self._held.get(sequence, ()) if one.end <= length)
        self._context.truncate(sequence, usable_prefix(shared, self._wanted, held))
        kept = self._context.length(sequence)
        self._held[sequence] = frozenset(one for one in held if one.end <= kept)
        return kept

    def read(self, sequence: int, prompt: Sequence[int], end: int, cancel: threading.Event) -> Iterator[int]:
        """After `begin`, read on to the prompt's first `end` tokens.

        Yields:
            How many tokens are read, or will be once their stretch is carried.

        Raises:
            PassCancelled: `cancel` was set; the sequence holds what was read, and no part of a stretch.
            DecodeError: a pass or a state was refused.
        """
        for stretch in sorted(self._wanted - self._held[sequence]):
            yield from self._read_plainly(sequence, prompt, stretch.start, cancel)
            try:
                yield from self._carry(sequence, prompt, stretch, cancel)
            except (UnknownState, MemoryShortage) as error:
                self.reason = str(error)
                break
            self._held[sequence] |= {stretch}
        yield from self._read_plainly(sequence, prompt, end, cancel)

    def _read_plainly(self, sequence: int, prompt: Sequence[int], end: int, cancel: threading.Event) -> Iterator[int]:
        size = self._context.settings.batch_tokens
        while (position := self._context.length(sequence)) < end:
            self._context.hold_alone(sequence)
            self._context.decode([Run(sequence, prompt[position : min(position + size, end)], 0)], cancel)
            yield self._context.length(sequence)

    def _carry(self, sequence: int, prompt: Sequence[int], stretch: Stretch, cancel: threading.Event) -> Iterator[int]:
        """Read a stretch at whose start the sequence ends."""
        context = self._context
        context.hold_alone(sequence)
        with contextlib.closing(fast_context(context, stretch.end)) as fast:
            own = fast.allocate()
            before = context.state(sequence) if stretch.start else None
            if before is not None:
                beginning = before.copy()
                convert(beginning, context.settings.kv_type, KvType.F16)
                fast.replace(own, beginning, stretch.start)
            for position in range(stretch.start, stretch.end, FAST_BATCH_TOKENS):
                chunk_end = min(position + FAST_BATCH_TOKENS, stretch.end)
                fast.decode([Run(own, prompt[position:chunk_end], 0)], cancel)
                if chunk_end < stretch.end:
                    yield chunk_end
            state = fast.state(own)
        convert(state, KvType.F16, context.settings.kv_type)
        if before is not None:
            keep_beginning(state, before)
        context.hold_alone(sequence)
        context.replace(sequence, state, stretch.end)
        yield stretch.end


def fast_context(context: Context, tokens: int) -> Context:
    """A context of the same model with an F16 cache, for one sequence of so many tokens.

    Raises:
        MemoryShortage: it finds no room, or what is carried does not.
    """
    model = context.model
    needed_bytes = COPIES_IN_MEMORY * tokens * model.kv_bytes_per_token + COMPUTE_BUFFER_BYTES
    check_memory(model.path, needed_bytes, f"reading {tokens} tokens at the speed of an F16 cache")
    cells = -(-(tokens + 1) // CELL_STEP) * CELL_STEP
    settings = ContextSettings(cells, KvType.F16, context.settings.threads, 1, 1, FAST_BATCH_TOKENS)
    try:
        return Context(model, settings)
    except DecodeError as error:
        raise MemoryShortage(str(error)) from error


def _fault(context: Context) -> str:
    """Why a text cannot be carried; empty when it can."""
    size = context.model.vocabulary.size
    text = [(index * 7919 + 101) % size for index in range(PROBED_TOKENS)]
    sequence = context.allocate()
    try:
        context.hold_alone(sequence)
        with contextlib.closing(fast_context(context, PROBED_TOKENS)) as fast:
            own = fast.allocate()
            fast.decode([Run(own, text[:-1], 0)])
            carried = fast.state(own)
            convert(carried, KvType.F16, context.settings.kv_type)
            context.replace(sequence, carried, len(text) - 1)
            returned = carried.copy()
            convert(returned, context.settings.kv_type, KvType.F16)
            fast.replace(own, returned, len(text) - 1)
            if not (_is_same(carried, context.state(sequence)) and _is_same(returned, fast.state(own))):
                return "llama.cpp does not give a state back as it took it"
            rows = []
            for reader, one in ((context, sequence), (fast, own)):
                reader.decode([Run(one, text[-1:], 1)])
                rows.append(reader.logits()[0] - reader.logits()[0].mean())
            likeness = float(rows[0] @ rows[1]) / float(np.linalg.norm(rows[0]) * np.linalg.norm(rows[1]))
            return "" if likeness > PROBED_LIKENESS else f"logits after a carried text are only {likeness:.2f} alike"
    except (UnknownState, MemoryShortage, DecodeError) as error:
        return str(error)
    finally:
        context.free(sequence)


def _is_same(left: StateBytes, right: StateBytes) -> bool:
    return all(
        np.array_equal(ours.positions, theirs.positions)
        and all(np.array_equal(a.values, b.values) for a, b in zip(ours.rows, theirs.rows, strict=True))
        for ours, theirs in zip(cells_of(left), cells_of(right), strict=True)
    )
