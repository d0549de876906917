"""Where requests meet the loaded set: handed in by any thread, worked off by the thread that owns the set.

The owner opens the desk when a set is loaded, attends to it between its other work, and closes it before the set goes.
The request pool, which has a context of its own, is made when the first request comes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from app.api.bell import Bell
from app.api.errors import Unavailable
from app.api.metrics import counted
from app.api.recollection import Recollection
from engine.errors import QuorumError
from engine.loader import LoadedSet
from engine.pool import Pool, PoolRequest, PoolSettings, PoolStatistics, Ticket

log = logging.getLogger(__name__)

NOTHING_LOADED = "no model is loaded; load one and ask again"
IS_LOADING = "a model is being loaded; ask again in a while"
IS_COMPARED = "the page compares drafter sets, which takes the loaded model's place for some minutes; ask again then"
IS_EXCHANGED = "the loaded model is being exchanged; ask again in a while"
SHUTS_DOWN = "Quorum is shutting down"


@dataclass(frozen=True, slots=True)
class Lent:
    """A loaded set as it is lent to those who prepare requests for it: vocabulary and template, no context."""

    loaded: LoadedSet
    recollection: Recollection


def submit_all(pool: Pool, requests: Sequence[PoolRequest]) -> list[Ticket]:
    """Hand requests in, all of them or none.

    Raises:
        QuorumError: there is no room, or a prompt does not fit.
    """
    tickets: list[Ticket] = []
    try:
        for request in requests:
            tickets.append(pool.submit(request))
    except QuorumError:
        for ticket in tickets:
            ticket.cancel()
        raise
    return tickets


class Desk:
    """Takes requests while a set is loaded."""

    def __init__(self, settings: PoolSettings, wake: Callable[[], None]) -> None:
        """Args:
        settings: Of each pool.
        wake: Called when there is something to attend to.
        """
        self._settings = settings
        self._wake = wake
        self._changed = threading.Condition()
        self._lent: Lent | None = None
        self._borrowers = 0
        self._pool: Pool | None = None
        self._is_wanted = False
        self._refusal = NOTHING_LOADED
        """Why there is nothing to ask; empty while there is."""
        self._problem: QuorumError | None = None
        """Why the pool could not be made."""
        self._ended = ""
        self._earlier: Counter[str] = Counter()
        """What pools that are closed have counted."""
        self.bell = Bell()
        """Rung when answers have got further, and when the desk opens or closes."""

    # Any thread

    @property
    def most_requests(self) -> int:
        """How many can be open at once."""
        return self._settings.most_active + self._settings.most_waiting

    @property
    def refusal(self) -> str:
        """Why there is nothing to ask now; empty while there is."""
        return self._refusal

    @property
    def ended(self) -> str:
        """Why open requests were last ended from here."""
        return self._ended

    @property
    def statistics(self) -> PoolStatistics | None:
        """Of the present pool; None while there is none."""
        with self._changed:
            return None if self._pool is None else self._pool.statistics

    @property
    def counts(self) -> Counter[str]:
        """What all pools since the start have counted, by name."""
        with self._changed:
            counts = self._earlier.copy()
            if self._pool is not None:
                counts.update(counted(self._pool.statistics))
            return counts

    @property
    def is_idle(self) -> bool:
        """Whether no request is open."""
        statistics = self.statistics
        return statistics is None or not (statistics.active or statistics.waiting)

    @contextmanager
    def borrowed(self) -> Iterator[Lent]:
        """The loaded set, which stays loaded meanwhile; to be given back soon.

        Raises:
            Unavailable: none is loaded.
        """
        with self._changed:
            if self._lent is None:
                raise Unavailable(self._refusal or NOTHING_LOADED)
            lent = self._lent
            self._borrowers += 1
        try:
            yield lent
        finally:
            with self._changed:
                self._borrowers -= 1
                self._changed.notify_all()

    async def wait_for_pool(self) -> None:
        """Wait until requests can be handed in.

        Raises:
            QuorumError: none can; the message says why.
        """
        while True:
            with self.bell.listening() as rung:
                with self._changed:
                    if self._refusal:
                        raise Unavailable(self._refusal)
                    if self._pool is not None:
                        return
                    if self._problem is not None:
                        problem, self._problem = self._problem, None
                        raise problem
                    self._is_wanted = True
                self._wake()
                await rung

    def submit(self, requests: Sequence[PoolRequest]) -> list[Ticket]:
        """Hand requests in, all of them or none.

        Raises:
            QuorumError: the desk is closed, there is no room, or a prompt does not fit.
        """
        with self._changed:
            if self._pool is None or self._refusal:
                raise Unavailable(self._refusal or IS_EXCHANGED)
            return submit_all(self._pool, requests)

    def refuse(self, reason: str) -> None:
        """Take no more requests; those that are open go on."""
        with self._changed:
            if self._refusal != SHUTS_DOWN:
                self._refusal = reason
        self.bell.ring()

    # The thread that owns the set

    def open(self, loaded: LoadedSet) -> None:
        """Take requests for this set from now on."""
        with self._changed:
            self._lent = Lent(loaded, Recollection())
            if self._refusal != SHUTS_DOWN:
                self._refusal = ""
        self.bell.ring()

    def attend(self) -> bool:
        """One round of the pool; false when there was nothing to do."""
        if self._is_wanted and self._pool is None and self._lent is not None:
            self._make_pool(self._lent.loaded)
        if self._pool is None:
            return False
        try:
            has_worked = self._pool.step()
        except Exception as error:
            if not isinstance(error, QuorumError):
                log.exception("a round of the request pool failed in a way that should not happen")
            self._close_pool(f"the request pool failed ({type(error).__name__}: {error}); ask again")
            self.bell.ring()
            return False
        if has_worked:
            self.bell.ring()
        return has_worked

    def close(self, reason: str = IS_EXCHANGED) -> None:
        """End all open requests and let go of the set."""
        with self._changed:
            if self._refusal != SHUTS_DOWN:
                self._refusal = reason
            self._lent = None
            self._changed.wait_for(lambda: self._borrowers == 0)
        self._close_pool(reason)
        self.bell.ring()

    def _make_pool(self, loaded: LoadedSet) -> None:
        pool: Pool | None = None
        problem: QuorumError | None = None
        try:
            pool = Pool(loaded, self._settings, self._wake)
        except QuorumError as error:
            problem = error
        except Exception as error:
            log.exception("no request pool could be made, in a way that should not happen")
            problem = Unavailable(f"Quorum made a mistake ({type(error).__name__}: {error}); please report it")
        with self._changed:
            self._pool, self._problem = pool, problem
            self._is_wanted = False
        self.bell.ring()

    def _close_pool(self, reason: str) -> None:
        with self._changed:
            self._ended = reason
            pool, self._pool = self._pool, None
            if pool is None:
                return
            try:
                pool.close()
            except Exception:
                # The worker has a set to close, and others to answer.
                log.exception("a request pool could not be closed")
            self._earlier.update(counted(pool.statistics))
