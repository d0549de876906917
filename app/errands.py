"""Work on model files beside chats: one errand at a time, in a thread of its own, watched and stopped like a job."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from app.jobs import JobState, ReportingJob, in_phases
from engine.errors import QuorumError, SettingError
from models.progress import Cancelled, Report

log = logging.getLogger(__name__)

Work = Callable[[Report, threading.Event], str]
"""Does it and returns one sentence on what came of it; raises `Cancelled` when the event is set."""


class Errand(ReportingJob):
    """Something that takes a while and needs no loaded set."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work
        self.outcome = ""
        """One sentence, once it is done."""

    def run(self) -> None:
        """Do it; called in the errand's own thread."""
        if not self.start():
            return

        try:
            self.outcome = self._work(in_phases(self.report), self.cancelled)
            self.finish(JobState.DONE)
        except Cancelled as error:
            self.finish(JobState.CANCELLED, str(error))
        except QuorumError as error:
            self.finish(JobState.FAILED, str(error))
        except Exception as error:
            log.exception("an errand failed in a way that should not happen")
            self.finish(JobState.FAILED, f"Quorum made a mistake ({type(error).__name__}: {error}); please report it")


class Errands:
    """Runs one errand after the other."""

    def __init__(self) -> None:
        self.last: Errand | None = None
        """The latest that was asked for."""
        self._thread: threading.Thread | None = None

    def begin(self, work: Work) -> Errand:
        """Raises:
        SettingError: one is under way.
        """
        if self.last is not None and not self.last.is_over:
            raise SettingError("a download or a derivation is under way; wait for its end, or stop it")
        self.last = Errand(work)
        self._thread = threading.Thread(target=self.last.run, name="quorum-errand")
        self._thread.start()
        return self.last

    def close(self) -> None:
        """Stop what is under way and wait for it."""
        if self.last is not None:
            self.last.cancel()
        if self._thread is not None:
            self._thread.join()
