"""A bell that any thread rings and that coroutines wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class Bell:
    """Wakes everyone who waited when it is rung."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[asyncio.Future[None]] = []

    def waiter(self) -> asyncio.Future[None]:
        """Done at the next ring. Get it before looking for what the ring tells of, so that nothing is missed."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append(future)
        return future

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """Its owner has found what it looked for and does not wait."""
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(waiter)

    def ring(self) -> None:
        """Called from any thread."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop has ended, and it with it
                future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
