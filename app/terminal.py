"""Progress on the terminal's error stream, and Ctrl-C as an event instead of an exception."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

from models.progress import Progress

EXIT_INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

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


class TransferLine:
    """Shows readings on one line of a terminal, and a line for each phase elsewhere; ends the line on leaving."""

    _SECONDS_BETWEEN = 0.2

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._phase = ""
        self._width = 0
        self._shown_at = 0.0

    def __enter__(self) -> TransferLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._width:
            print(file=self._stream)

    def show(self, progress: Progress) -> None:
        is_new = progress.phase != self._phase
        now = time.monotonic()
        is_done = progress.share == 1
        if not is_new and not is_done and now - self._shown_at < self._SECONDS_BETWEEN:
            return
        self._shown_at = now
        if not self._is_terminal:
            if is_new:
                print(progress.phase, file=self._stream, flush=True)
            self._phase = progress.phase
            return
        if is_new and self._width:
            print(file=self._stream)
            self._width = 0
        self._phase = progress.phase
        text = _reading(progress)
        print(f"\r{text.ljust(self._width)}", end="", file=self._stream, flush=True)
        self._width = len(text)


def _reading(progress: Progress) -> str:
    if progress.share is None:
        return progress.phase
    text = f"{progress.phase}: {int(100 * progress.share)} %"
    if progress.total_bytes:
        text += f" of {size_text(progress.total_bytes)}"
    return text + pace_text(progress)


def pace_text(progress: Progress) -> str:
    """How fast it comes and how long it will take, to be put behind other words; empty where it is not known."""
    if progress.seconds_left is None:
        return ""
    minutes, seconds = divmod(round(progress.seconds_left), 60)
    return f", {size_text(progress.bytes_per_second)}/s, {minutes}:{seconds:02d} left"


def size_text(size_bytes: float) -> str:
    """A size as people read it."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


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
