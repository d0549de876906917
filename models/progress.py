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


Report = Callable[[Progress], None]


class Cancelled(QuorumError):
    """The user stopped it; nothing half-done is left behind."""


def no_report(_: Progress) -> None:
    """For callers that do not care."""


def stop_if_asked(cancel: threading.Event | None, what: str) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled(f"{what} was stopped; nothing was kept")
