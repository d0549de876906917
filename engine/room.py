"""The room that a pool's requests share: where a prompt finds its beginning, whose tokens stay in the cache, who waits.

Nothing is refused for want of room: what ended requests left goes first, then the cells are gathered, then the youngest
answers wait in memory until others have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.active import EXPECTED_ANSWER_TOKENS, ActiveRequest
from engine.errors import DecodeError, QuorumError
from engine.loader import LoadedSet
from engine.prefill import Part, Stretch, stretches, usable_prefix
from engine.prefix import shared_prefix
from engine.runtime.shared import SharedContext
from engine.shelf import Cached, Shelf
from engine.ticket import PoolRequest

GATHERED_CELLS = 256
"""So many cells are to be free after they were gathered, where something can go for it: gathering takes a while."""


class Room:
    """Shares a cache out among requests. Used by the pool's owner, which owns the cache."""

    def __init__(
        self,
        loaded: LoadedSet,
        context: SharedContext,
        active: Sequence[ActiveRequest],
        most_kept: int,
        pass_cells: int,
        fail: Callable[[ActiveRequest, QuorumError], None],
    ) -> None:
        """Args:
        active: All that are read or answered, in the order of their admission, as the pool keeps them.
        most_kept: Ended requests whose tokens are kept.
        pass_cells: What a pass with answers takes at most.
        fail: Ends a request that cannot be kept.
        """
        self._set = loaded
        self._context = context
        self._active = active
        self._pass_cells = pass_cells
        self._fail = fail
        self._can_roll_back = loaded.model.can_roll_back
        self._shelf = Shelf(context, most_kept if self._can_roll_back else 0)
        self._failed_passes = 0
        """Passes of the target that failed since the last one that did not."""
        self.gathered = 0
        """How often the cells of the cache were brought together."""

    @property
    def _margin(self) -> int:
        """Cells that are to be free between two rounds, besides those for what the next one adds."""
        return min(GATHERED_CELLS, self._context.context_tokens // 8)

    @property
    def _present(self) -> list[ActiveRequest]:
        """Those that are in the cache."""
        return [active for active in self._active if active.put_aside is None]

    # Coming and going.

    def source(self, request: PoolRequest) -> tuple[Cached | None, int]:
        """The cached sequence that a prompt can go on from, and how many of its tokens stay."""
        best: tuple[Cached | None, int] = (None, 0)
        if not self._can_roll_back:
            return best
        wanted = self.wanted(request)
        for cached in (*self._shelf, *(active.cached for active in self._present)):
            shared = shared_prefix(cached.tokens, request.prompt)
            shared = min(shared, self._context.length(cached.sequence), len(request.prompt) - 1)
            shared = usable_prefix(shared, wanted, cached.held)
            if shared > best[1] and self._context.sees_back_from(cached.sequence, shared):
                best = (cached, shared)
        return best

    def wanted(self, request: PoolRequest) -> frozenset[Stretch]:
        """Stretches of the prompt that are carried, as a session carries them."""
        parts: Sequence[Part] = ((0, len(request.prompt)),) if request.parts is None else request.parts
        if self._set.model.window_tokens:
            # The state of a sequence leaves out what is beyond the window, so no stretch can go on from another.
            parts = [part for part in parts if part[0] == 0]
        return stretches(parts) if self._set.reader.carries else frozenset()

    def fits(self, request: PoolRequest, source: Cached | None, shared: int) -> bool:
        """Whether a request, and all that are answered, will find room as far as can be foreseen."""
        sequences = [active.sequence for active in self._present]
        # Where windows slide, what is shared is not once it was gathered.
        is_live = source is not None and source.sequence in sequences and not self._set.model.window_tokens
        limit = request.settings.max_tokens
        answer_tokens = EXPECTED_ANSWER_TOKENS if limit is None else min(limit, EXPECTED_ANSWER_TOKENS)
        needed = len(request.prompt) - shared * is_live + answer_tokens
        foreseen = sum(active.expected_tokens for active in self._active)
        return needed + foreseen + self._margin <= self._context.context_tokens - self._context.cells_of(sequences)

    def enter(self, source: Cached | None, shared: int) -> int:
        """A sequence for a new request, which begins with what is shared."""
        if source is None:
            return self._context.allocate()
        sequence = self._context.copy(source.sequence, shared)
        self._shelf.use(source)
        return sequence

    def leave(self, active: ActiveRequest) -> None:
        """A request has ended: its tokens in the cache are kept for others that begin the same."""
        if active.put_aside is not None:
            return
        cached = active.cached
        length = self._context.length(cached.sequence)
        if length and self._can_roll_back:
            self._shelf.put(Cached(cached.sequence, tuple(active.tokens[:length]), cached.held))
        else:
            self._context.free(cached.sequence)

    # Between two rounds.

    def make(self, cells: int) -> None:
        """Let so many cells be free: what was kept longest goes first, then the youngest answers are put aside."""
        context = self._context
        if context.free_cells >= cells:
            return
        wanted = min(cells + self._margin, context.context_tokens)
        while len(self._shelf) and context.context_tokens - context.live_cells < wanted:
            self._shelf.drop_oldest()
        while context.context_tokens - context.live_cells < wanted:
            movable = [active for active in self._present if active.reading is None]
            if len(movable) + any(active.reading for active in self._active) < 2:
                break
            self._put_aside(movable[-1])
        if context.has_gaps:
            self.gather()

    def gather(self) -> None:
        """Bring the cells together. A request whose cells llama.cpp does not take back has failed, and no other."""
        lost = self._context.gather()
        self.gathered += 1
        self._shelf.drop_all(lost)
        for active in [active for active in self._present if active.sequence in lost]:
            self._fail(active, DecodeError("what was read of the request could not be kept in the cache; ask again"))

    def bring_back(self) -> None:
        """Let answers that were put aside go on, the oldest first, where there is room for them again."""
        for active in list(self._active):
            if active.put_aside is None:
                continue
            others = self._present
            context = self._context
            foreseen = sum(one.expected_tokens for one in (*others, active))
            needed = len(active.tokens) + foreseen + self._margin
            is_in_need = self._failed_passes > 0
            is_in_need |= needed > context.context_tokens - context.cells_of([one.sequence for one in others])
            if others and is_in_need:
                return
            self.make(len(active.tokens) + self._pass_cells)
            sequence = context.allocate()
            try:
                context.append(sequence, active.put_aside, len(active.tokens) - 1)
            except DecodeError as error:
                context.free(sequence)
                if others:
                    return  # there is room when they have ended
                self._fail(active, error)
                continue
            active.sequence, active.put_aside = sequence, None

    def _put_aside(self, active: ActiveRequest) -> None:
        active.put_aside = self._context.take_beyond(active.sequence, 0)
        self._context.free(active.sequence)

    # Passes that fail.

    def relieve(self, error: QuorumError) -> None:
        """A pass failed; all is as before it, so that the next round is another attempt.

        It finds the cells gathered. When that was of no help, the youngest answers wait, one more each time: whoever
        is alone in the cache then, and still fails, has failed, and the others come back.
        """
        self._failed_passes += 1
        present = self._present
        if self._can_roll_back and self._failed_passes == 1:
            self.gather()
        elif self._can_roll_back and len(present) > 1:
            self._put_aside([active for active in present if active.reading is None][-1])
        else:
            self._failed_passes = 0
            for active in present:
                self._fail(active, error)

    def note_pass(self) -> None:
        """A pass went well."""
        self._failed_passes = 0
