"""Reading one prompt into a shared cache, slice by slice, so that other requests go on meanwhile.

What a slice is does not change what is read: long stretches are carried from an F16 cache as `engine.prefill` carries
them, in passes of the same sizes, and all other tokens enter with whatever pass has room for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Sequence

from engine.config import KvType
from engine.errors import MemoryShortage
from engine.prefill import FAST_BATCH_TOKENS, Stretch, fast_context
from engine.runtime.context import Context, Run
from engine.runtime.shared import SharedContext
from engine.runtime.state import UnknownState, convert


def slice_size(least: int, unread_requests: int, most: int) -> int:
    """Tokens of a prompt that enter in a pass with answers.

    All pay for them with a longer pass. The more requests wait to be read, the more is gained by reading on: those that
    are read share the passes that come after.

    Args:
        least: Where only one is read.
        unread_requests: That one, and those that are to be read next.
        most: Of any pass.
    """
    return min(least * unread_requests, most)


class Reading:
    """A prompt that is being read. Used and closed by the context's owner."""

    def __init__(
        self,
        context: SharedContext,
        sequence: int,
        prompt: Sequence[int],
        wanted: Collection[Stretch],
        held: Collection[Stretch],
    ) -> None:
        """Args:
        sequence: It holds the prompt's beginning.
        prompt: All of its tokens but the last are read.
        wanted: The prompt's stretches that are to be carried.
        held: Those of them that the sequence holds.
        """
        self._context = context
        self._sequence = sequence
        self._prompt = prompt
        self._end = len(prompt) - 1
        self._coming = sorted(set(wanted) - set(held))
        self.held = frozenset(held)
        """Stretches in the sequence that were carried."""
        self._fast: tuple[Context, int] | None = None
        """The second context and its sequence, while a stretch is read."""

    @property
    def done_tokens(self) -> int:
        """Tokens that are read, or will be once their stretch is carried."""
        if self._fast is not None:
            context, own = self._fast
            return context.length(own)
        return self._context.length(self._sequence)

    @property
    def is_done(self) -> bool:
        return self._context.length(self._sequence) == self._end

    @property
    def carried_tokens(self) -> int:
        """Length of the stretch that comes next; 0 where the next tokens enter a pass of the cache's own."""
        if not self._coming or self._context.length(self._sequence) < self._coming[0].start:
            return 0
        return self._coming[0].end - self._coming[0].start

    def slice(self, most_tokens: int) -> Run:
        """The next tokens, for a pass of the cache's own."""
        start = self._context.length(self._sequence)
        end = self._coming[0].start if self._coming else self._end
        return Run(self._sequence, self._prompt[start : min(start + most_tokens, end)], 0)

    def carry(self, cancel: threading.Event) -> None:
        """Read the next slice of a stretch in an F16 cache; after its last one, the stretch is in the cache.

        Raises:
            DecodeError: a pass or a state was refused.
            PassCancelled: `cancel` was set.
        """
        stretch = self._coming[0]
        try:
            fast, own = self._fast = self._fast or self._open(stretch)
            start = fast.length(own)
            end = min(start + FAST_BATCH_TOKENS, stretch.end)
            fast.decode([Run(own, self._prompt[start:end], 0)], cancel)
            if end < stretch.end:
                return
            state = fast.take_beyond(own, stretch.start)
            convert(state, KvType.F16, self._context.settings.kv_type)
        except (UnknownState, MemoryShortage):
            # What cannot be carried is read as everything else is.
            self.close()
            self._coming.clear()
            return
        self.close()
        self._context.append(self._sequence, state, stretch.end - stretch.start)
        self._coming.pop(0)
        self.held |= {stretch}

    def close(self) -> None:
        """Free the second context."""
        if self._fast is not None:
            self._fast[0].close()
            self._fast = None

    def _open(self, stretch: Stretch) -> tuple[Context, int]:
        with contextlib.ExitStack() as undo:
            fast = fast_context(self._context, stretch.end)
            undo.callback(fast.close)
            own = fast.allocate()
            if stretch.start:
                beginning = self._context.state(self._sequence).copy()
                convert(beginning, self._context.settings.kv_type, KvType.F16)
                fast.replace(own, beginning, stretch.start)
            undo.pop_all()
        return fast, own
