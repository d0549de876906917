"""A bell that any thread rings and that coroutines wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class Bell:
    """Wakes everyone who listens when it is rung."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[asyncio.Future[None]] = set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Future[None]]:
        """Done at the next ring. Listen before looking for what the ring tells of, so that nothing is missed."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._listeners.add(future)
        try:
            yield future
        finally:
            with self._lock:
                self._listeners.discard(future)

    def ring(self) -> None:
        """Called from any thread."""
        with self._lock:
            listeners, self._listeners = self._listeners, set()
        for future in listeners:
            with contextlib.suppress(RuntimeError):  # its loop has ended, and it with it
                future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
