"""What the service's one worker does for others: a job is watched and cancelled from any thread, done by the worker.

Every change of a job wakes those who wait for one. Snapshots are plain data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from app.terminal import pace_text
from engine.config import SetConfig
from models.progress import Progress, Report


class JobState(str, Enum):
    """Where a job stands; the last three are final."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Job:
    """State, error and cancellation, common to all jobs."""

    doing: ClassVar[str] = ""
    """What the worker is at while it runs, as others are told; empty for what no worker does."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self._changed = threading.Condition()
        self._state = JobState.WAITING
        self._error = ""

    @property
    def is_over(self) -> bool:
        return self._state not in (JobState.WAITING, JobState.RUNNING)

    def cancel(self) -> None:
        """Ask for its end; takes effect at once while it waits, and within one pass of the target while it runs."""
        self.cancelled.set()
        with self._changed:
            if self._state is JobState.WAITING:
                self._set_state(JobState.CANCELLED)

    def start(self) -> bool:
        """The worker takes it up; false when it was cancelled before."""
        with self._changed:
            if self._state is not JobState.WAITING:
                return False
            self._set_state(JobState.RUNNING)
            return True

    def finish(self, state: JobState, error: str = "") -> None:
        """The worker is through with it."""
        with self._changed:
            if not self.is_over:
                self._error = error
                self._set_state(state)

    def wait_until_over(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.is_over, timeout_s)

    def _set_state(self, state: JobState) -> None:
        self._state = state
        self._touch()

    def _touch(self) -> None:
        """Something changed; called with the lock held."""
        self._changed.notify_all()


PhaseReport = Callable[[str, float], None]
"""Called with what is being done and its share from 0 to 1."""
Preparation = Callable[[PhaseReport, threading.Event], SetConfig]
"""Makes the configuration to load, fetching what it needs; may take long, reports, and stops when the event is set."""


def in_phases(report: PhaseReport) -> Report:
    """Hears of work on files and tells it as a phase and a share."""

    def show(progress: Progress) -> None:
        phase = progress.phase[:1].upper() + progress.phase[1:]
        if progress.total_bytes:
            phase += f": {progress.done_bytes / 1e6:,.0f} of {progress.total_bytes / 1e6:,.0f} MB{pace_text(progress)}"
        report(phase, progress.share or 0.0)

    return show


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far a job that reports its progress has come."""

    state: JobState
    phase: str
    share: float
    error: str


class ReportingJob(Job):
    """A job that says what it is doing and how far it has come."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = "Waiting"
        self._share = 0.0

    def report(self, phase: str, share: float) -> None:
        with self._changed:
            self._phase = phase
            self._share = min(max(share, 0.0), 1.0)
            self._touch()

    def peek(self) -> Progressed:
        with self._changed:
            return Progressed(self._state, self._phase, self._share, self._error)


class Load(ReportingJob):
    """Loading a target with its drafters."""

    doing = "loading a model"

    def __init__(self, prepare: Preparation) -> None:
        super().__init__()
        self.prepare = prepare


class Unload(Job):
    """Freeing the loaded set."""

    doing = "unloading a model"


class Check(ReportingJob):
    """Measuring how exact the loaded set is."""

    doing = "measuring how exact the model is"


class Verify(ReportingJob):
    """Answering the same prompts with and without drafts, and comparing every token."""

    doing = "comparing drafted answers with plain ones"

    def __init__(self) -> None:
        super().__init__()
        self.outcome: tuple[str, ...] = ()
        """Sentences, the verdict first; also of a run that was stopped."""
        self.is_identical: bool | None = None
        """None while nothing was compared."""
