"""How long work on model files reports what it has done, and how it is asked to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import QuorumError


@dataclass(frozen=True, slots=True)
class Progress:
    """One reading: what is being done, and how far it has come."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0
    """Zero where the end cannot be foreseen."""
    bytes_per_second: float = 0.0
    """Of late; zero where it is not known."""
    done_share: float | None = None
    """For work that is not counted in bytes."""

    @property
    def share(self) -> float | None:
        """From 0 to 1; None where the end cannot be foreseen."""
        if self.done_share is not None:
            return self.done_share
        return min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else None

    @property
    def seconds_left(self) -> float | None:
        """None where it cannot be foreseen."""
        if not self.total_bytes or not self.bytes_per_second:
            return None
        return max(0, self.total_bytes - self.done_bytes) / self.bytes_per_second


Report = Callable[[Progress], None]


class Cancelled(QuorumError):
    """The user stopped it; the message says what, and whether anything is kept."""


def no_report(_: Progress) -> None:
    """For callers that do not care."""


def stop_if_asked(cancel: threading.Event | None, what: str) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled(f"{what} was stopped; nothing was kept")
