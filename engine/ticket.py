"""A request to the pool and the ticket that is given for it. Tickets are read and cancelled from any thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config import GenerationSettings
from engine.errors import QuorumError
from engine.prefill import Part
from engine.types import Finished, GenerationEvent


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """One answer that is asked for."""

    prompt: tuple[int, ...]
    """Its tokens."""
    settings: GenerationSettings = field(default_factory=GenerationSettings)
    starts_thinking: bool | None = None
    """Whether the prompt has opened a thought; None where there are no thoughts."""
    parts: tuple[Part, ...] | None = None
    """Of the prompt, those that are no answer of the target, which are read at the speed of an F16 cache where they are
    long; None: all of it is one. What was read of a conversation's earlier turns is only used again where the parts
    up to there are the same."""


class Ticket:
    """Hands a request's events over to whoever reads them. Nobody waits for a reader: events are kept until read."""

    def __init__(self, request: PoolRequest, wake: Callable[[], None]) -> None:
        """Args:
        wake: Called when the request is cancelled.
        """
        self.request = request
        self._wake = wake
        self._events: queue.SimpleQueue[GenerationEvent | QuorumError] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        """Set when the answer is not wanted any more."""
        self._error: QuorumError | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the last event was read, or the error: nothing comes after it."""
        return self._is_over

    @property
    def error(self) -> QuorumError | None:
        """Why the request failed, once that was read."""
        return self._error

    def read(self, timeout_s: float | None = None) -> GenerationEvent | None:
        """The next event; None when none came in time, or when the last one was read.

        Raises:
            QuorumError: the request failed. It is raised once.
        """
        if self._is_over:
            return None
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, QuorumError):
            self._error, self._is_over = event, True
            raise event
        self._is_over = isinstance(event, Finished)
        return event

    def cancel(self) -> None:
        """Give the answer up; what there is of it ends with a `Finished` within one pass."""
        self.cancelled.set()
        self._wake()

    def put(self, event: GenerationEvent | QuorumError) -> None:
        """For the pool: one more event, or the error that is the last."""
        self._events.put(event)
