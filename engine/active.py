"""A request of the pool that is being read or answered: its tokens, its place in the cache, its answer so far."""

from __future__ import annotations

from engine.answer import Answer
from engine.config import Speculation
from engine.drafting import Ballot, Panel
from engine.metrics import Ledger, Pace
from engine.prefill import Stretch
from engine.reading import Reading
from engine.runtime.sampler import Sampler
from engine.runtime.shared import SharedContext
from engine.runtime.state import StateBytes
from engine.shelf import Cached
from engine.ticket import Ticket

EXPECTED_ANSWER_TOKENS = 256
"""Room that an answer is foreseen to take where no smaller limit is set; those that take more find it later."""


class ActiveRequest:
    """A request that is being read or answered."""

    def __init__(
        self,
        ticket: Ticket,
        number: int,
        sequence: int,
        sampler: Sampler,
        ledger: Ledger,
        reading: Reading,
        started: float,
        limit_tokens: int,
    ) -> None:
        """Args:
        number: Its own among all requests of the pool.
        started: When it was admitted, by `time.perf_counter`.
        limit_tokens: Most tokens it may have, its prompt included.
        """
        self.ticket = ticket
        self.number = number
        self.sequence = sequence
        self.sampler = sampler
        self.ledger = ledger
        self.reading: Reading | None = reading
        """None once the prompt is read."""
        self.started = started
        self._limit_tokens = limit_tokens
        self.answer: Answer | None = None
        """None until the prompt is read."""
        self.tokens = list(ticket.request.prompt)
        """Committed."""
        self.put_aside: StateBytes | None = None
        """What the cache held of it, while it waits for room; it has no sequence then."""
        self.panel = Panel(())
        """Free drafters of its own, which have read it."""
        self.ballot: Ballot | None = None
        """What is drafted for its next pass; None before that is done."""
        self.asked: tuple[str, ...] = ()
        """Draft models that took part in it."""
        self.pace = Pace()
        self.active: frozenset[str] = frozenset()
        """Drafters that took part in the last step."""
        self._held: frozenset[Stretch] = frozenset()

    @property
    def cached(self) -> Cached:
        """What the cache holds of it."""
        held = self._held if self.reading is None else self.reading.held
        return Cached(self.sequence, self.tokens, held)

    @property
    def expected_tokens(self) -> int:
        """How many tokens will still enter the cache, as far as room for them is foreseen."""
        request = self.ticket.request
        remaining = request.settings.max_tokens if self.answer is None else self.answer.remaining_tokens
        unread = 0 if self.reading is None else len(request.prompt) - self.reading.done_tokens
        return unread + (EXPECTED_ANSWER_TOKENS if remaining is None else min(remaining, EXPECTED_ANSWER_TOKENS))

    @property
    def speculation(self) -> Speculation:
        return self.ticket.request.settings.speculation

    @property
    def room_tokens(self) -> int:
        """Most draft tokens that overrun neither the answer's limit nor the request's."""
        room = self._limit_tokens - len(self.tokens) - 1
        remaining = None if self.answer is None else self.answer.remaining_tokens
        return max(0, room if remaining is None else min(room, remaining - 1))

    def end_reading(self) -> None:
        """The prompt is read."""
        assert self.reading is not None
        self._held = self.reading.held
        self.reading = None

    def check(self, context: SharedContext) -> None:
        """Check the cache against the committed tokens.

        Raises:
            AssertionError: they do not agree.
        """
        if self.put_aside is not None:
            return
        cached = context.length(self.sequence)
        pending = len(self.tokens) - cached
        assert pending == 1 or self.reading is not None, f"{pending} tokens are pending instead of one"

    def close(self) -> None:
        """Free what is native, the sequence aside."""
        self.sampler.close()
        if self.reading is not None:
            held = self.reading.held
            self.reading.close()
            self.reading, self._held = None, held
