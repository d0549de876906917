"""Where the calls that use a model run: at once in the caller's thread, or in turn in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from engine.runtime.affinity import keep_to

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Lane:
    """Runs the calls of one model, one at a time. Used by the thread that owns the loaded set.

    In that thread they share its compute threads with the target. Any other thread that computes brings compute threads
    of its own, and while there are more of those than cores, GNU OpenMP lets all of them sleep at every barrier of a
    pass (`engine.runtime.api.OPENMP_WAITING`), which made a pass up to a sixth longer. So a thread is begun where work
    is to go on beside other work, and ended when nothing is.
    """

    def __init__(self, name: str) -> None:
        """Args:
        name: Of the thread.
        """
        self._name = name
        self._thread: ThreadPoolExecutor | None = None
        self._is_kept = False
        """Whether the thread stays, as it runs on cores of its own."""
        self._user: int | None = None
        """The thread that a call is running in."""

    @property
    def is_entered(self) -> bool:
        """Whether the calling thread runs one of the lane's calls."""
        return self._user == threading.get_ident()

    def run(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **named: Arguments.kwargs
    ) -> Future[Result]:
        """Make a call in the lane's thread while there is one, else at once."""
        if self._thread is not None:
            return self.run_beside(call, *args, **named)
        future: Future[Result] = Future()
        try:
            future.set_result(self._enter(partial(call, *args, **named)))
        except Exception as error:
            future.set_exception(error)
        return future

    def run_beside(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **named: Arguments.kwargs
    ) -> Future[Result]:
        """Make a call in the lane's thread, which begins if there is none."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, self._name)
        return self._thread.submit(self._enter, partial(call, *args, **named))

    def end_thread(self) -> None:
        """Wait for what runs beside, and go on without a thread."""
        if self._thread is not None and not self._is_kept:
            self._thread.shutdown()
            self._thread = None

    def keep_to(self, cores: Collection[int]) -> None:
        """Make all calls in a thread that runs on these processor cores only; none: as before.

        Raises:
            SettingError: there are no such cores.
        """
        self._is_kept = False
        self.end_thread()
        if cores:
            self.run_beside(keep_to, cores).result()
            self._is_kept = True

    def _enter(self, call: Callable[[], Result]) -> Result:
        self._user = threading.get_ident()
        try:
            return call()
        finally:
            self._user = None
