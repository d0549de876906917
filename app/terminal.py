"""Progress on the terminal's error stream, and Ctrl-C as an event instead of an exception."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from models.progress import Progress

CLEAR_LINE = "\r\x1b[K"
REFRESH_SECONDS = 0.1


class ProgressLine:
    """One line that is rewritten in place; silent where the error stream is not a terminal."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty()
        self._last = 0.0

    def show(self, phase: str, share: float) -> None:
        now = time.monotonic()
        if self._is_live and now - self._last >= REFRESH_SECONDS:
            self._last = now
            sys.stderr.write(f"{CLEAR_LINE}{phase} {share:4.0%}")
            sys.stderr.flush()

    def show_bytes(self, progress: Progress) -> None:
        self.show(progress.phase, progress.done_bytes / progress.total_bytes if progress.total_bytes else 0.0)

    def clear(self) -> None:
        """Erase the line, once: what stands there later is not progress."""
        if self._last:
            self._last = 0.0
            sys.stderr.write(CLEAR_LINE)
            sys.stderr.flush()


@contextlib.contextmanager
def interrupt_event() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets; a second Ctrl-C interrupts as usual."""
    event = threading.Event()

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
