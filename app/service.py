"""The one loaded set and the one thread that works with it.

Native contexts belong to the thread that made them, so a single worker loads, answers and closes, one job after the
other; whoever wants something done asks here and watches the job. Answers go on while pages come and go. A set that
cannot be loaded leaves the one before it in place, and conversations outlive both. Nothing outlives `close`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from app.api.desk import IS_LOADING, NOTHING_LOADED, SHUTS_DOWN, Desk
from app.comparison import Comparison, ComparisonRequest
from app.conversations import Conversations
from app.errands import Errands
from app.jobs import Check, Job, JobState, Load, Preparation, Unload, Verify
from app.run import GRACE_S, Clock, Run
from app.trace import TracedStep
from app.worker import LoadedFacts, NotReady, Worker
from engine.config import GenerationSettings
from engine.errors import PromptError, QuorumError
from engine.exactness import ExactnessReport
from engine.insight import Insight
from engine.pool import PoolSettings
from engine.runtime.model import LoadCancelled
from models.progress import Cancelled

log = logging.getLogger(__name__)


class Service:
    """Loads sets and answers questions, in the order in which they are asked."""

    def __init__(
        self,
        conversations: Conversations,
        *,
        clock: Clock = time.monotonic,
        grace_s: float = GRACE_S,
        pool_settings: PoolSettings | None = None,
    ) -> None:
        self.conversations = conversations
        self._clock = clock
        self._grace_s = grace_s
        self._wake = threading.Condition()
        self._queue: deque[Job] = deque()
        self._current: Job | None = None
        self._runs: dict[str, Run] = {}
        self._load: Load | None = None
        self._check: Check | None = None
        self._verify: Verify | None = None
        self._comparison: Comparison | None = None
        self.errands = Errands()
        self._is_closed = False
        self._is_nudged = False
        self.desk = Desk(pool_settings or PoolSettings(), self._nudge)
        """Where other programs' requests are handed in; they are answered between the steps of chats."""
        self._worker = Worker(conversations, self.desk)
        self._thread = threading.Thread(target=self._work, name="quorum-worker")
        self._thread.start()

    # What is going on

    @property
    def loaded(self) -> LoadedFacts | None:
        """What is loaded now; None while a set is being exchanged."""
        return self._worker.facts

    @property
    def last_load(self) -> Load | None:
        """The latest load that was asked for; None once it is over and somebody has asked a question since."""
        return self._load

    @property
    def insight(self) -> Insight | None:
        """What the loaded set has measured and learnt; None without one."""
        return self._worker.insight

    @property
    def exactness(self) -> ExactnessReport | None:
        """What the last check of the loaded set found."""
        return self._worker.exactness

    @property
    def last_check(self) -> Check | None:
        """The latest check that was asked for."""
        return self._check

    @property
    def last_verification(self) -> Verify | None:
        """The latest verification that was asked for."""
        return self._verify

    @property
    def last_comparison(self) -> Comparison | None:
        """The latest comparison that was asked for."""
        return self._comparison

    @property
    def trace(self) -> tuple[TracedStep, ...]:
        """The last steps of the last answer."""
        return self._worker.trace

    @property
    def occupied_by(self) -> str:
        """What the worker is at besides other programs' requests; empty for nothing."""
        with self._wake:
            job = self._current
            return "" if job is None or job.is_over else job.doing

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def run_of(self, conversation_id: str) -> Run | None:
        """The latest answer of a conversation, running or over."""
        with self._wake:
            return self._runs.get(conversation_id)

    def jobs_ahead(self, job: Job) -> tuple[Job, ...]:
        """Jobs that come before this one; empty once it runs."""
        with self._wake:
            jobs = [self._current, *self._queue] if self._current else [*self._queue]
            before = jobs[: jobs.index(job)] if job in jobs else []
            return tuple(other for other in before if not other.is_over)

    # What can be asked for

    def load(self, prepare: Preparation) -> Load:
        """Load another set when the running answer is done; a load that was still under way is given up."""
        job = Load(prepare)
        with self._wake:
            if self._load is not None:
                self._load.cancel()
            self._load = job
            self._enqueue(job)
        return job

    def ask(self, conversation_id: str, question: str, settings: GenerationSettings, system_prompt: str = "") -> Run:
        """Answer a question in a conversation.

        Raises:
            QuorumError: the question is empty, the conversation is busy or gone, or no set is loaded or being loaded.
        """
        return self._ask(conversation_id, question, settings, system_prompt)

    def retry(self, conversation_id: str, settings: GenerationSettings, system_prompt: str = "") -> Run:
        """Answer the last question of a conversation anew.

        Raises:
            QuorumError: as `ask`, or there is no question yet.
        """
        with self._wake:
            self._require_ready(conversation_id)
            conversation = self.conversations.get(conversation_id)
            if conversation is None or not conversation.turns:
                raise NotReady("there is no question to answer again; ask one first")
            last = len(conversation.turns) - 1
            return self.edit(conversation_id, last, conversation.turns[last].question, settings, system_prompt)

    def edit(
        self, conversation_id: str, turn: int, question: str, settings: GenerationSettings, system_prompt: str = ""
    ) -> Run:
        """Ask something else in place of an earlier question; it and what came after it go.

        Raises:
            QuorumError: as `ask`.
        """
        return self._ask(conversation_id, question, settings, system_prompt, turn)

    def resume(self, conversation_id: str, settings: GenerationSettings) -> Run:
        """Go on with the last answer of a conversation where it ended.

        Raises:
            QuorumError: as `ask`, or there is no answer to go on with.
        """
        with self._wake:
            self._require_ready(conversation_id)
            conversation = self.conversations.get(conversation_id)
            if conversation is None or not conversation.turns or not conversation.turns[-1].answer:
                raise NotReady("there is no answer to go on with; ask something first")
            last = conversation.turns[-1]
            turn = len(conversation.turns) - 1
            return self._start(
                Run(conversation_id, turn, settings, self._clock, self._grace_s, last.answer, last.tokens)
            )

    def unload(self) -> Unload:
        """Free the loaded set when the running answer is done."""
        job = Unload()
        self._enqueue(job)
        return job

    def check(self) -> Check:
        """Measure how exact the loaded set is, when the running answer is done."""
        with self._wake:
            if self._check is None or self._check.is_over:
                self._check = Check()
                self._enqueue(self._check)
            return self._check

    def verify(self) -> Verify:
        """Compare drafted answers of the loaded set with plain ones, when the running answer is done."""
        with self._wake:
            if self._verify is None or self._verify.is_over:
                self._verify = Verify()
                self._enqueue(self._verify)
            return self._verify

    def compare(self, request: ComparisonRequest) -> Comparison:
        """Compare drafter sets on the loaded target, when what was asked before is done.

        Raises:
            QuorumError: one is under way, nothing is loaded, or the request compares nothing.
        """
        with self._wake:
            if self._comparison is not None and not self._comparison.is_over:
                raise NotReady("a comparison is under way; wait for its end, or stop it")
            if self._worker.facts is None:
                raise NotReady("no model is loaded; choose one and load it, then compare")
            request.plan(self._worker.facts.config)
            self._comparison = Comparison(request)
            self._enqueue(self._comparison)
            return self._comparison

    def stop(self, conversation_id: str) -> None:
        """End the running answer of a conversation; what there is of it is kept."""
        run = self.run_of(conversation_id)
        if run is not None:
            run.cancel()

    def forget(self, conversation_id: str) -> None:
        """Delete a conversation and end its answer."""
        self.stop(conversation_id)
        self.conversations.delete(conversation_id)
        with self._wake:
            self._runs.pop(conversation_id, None)

    def close(self) -> None:
        """End everything and free the set. Safe to call twice."""
        self.desk.refuse(SHUTS_DOWN)
        with self._wake:
            self._is_closed = True
            jobs = [*self._queue, self._current]
            self._wake.notify_all()
        for job in jobs:
            if job is not None:
                job.cancel()
        self._thread.join()
        self.errands.close()

    def _ask(
        self,
        conversation_id: str,
        question: str,
        settings: GenerationSettings,
        system_prompt: str,
        replaced: int | None = None,
    ) -> Run:
        if not question.strip():
            raise PromptError("the message is empty; write something to answer")
        with self._wake:
            self._require_ready(conversation_id)
            turn = self.conversations.add_turn(conversation_id, question, system_prompt, replaced)
            if turn is None:
                raise NotReady("this conversation is no longer there; start a new chat")
            return self._start(Run(conversation_id, turn, settings, self._clock, self._grace_s))

    def _require_ready(self, conversation_id: str) -> None:
        run = self._runs.get(conversation_id)
        if run is not None and not run.is_over:
            raise NotReady("this conversation is still being answered; wait for the end, or stop it")
        is_comparing = self._comparison is not None and not self._comparison.is_over
        if self._worker.facts is None and not is_comparing and (self._load is None or self._load.is_over):
            raise NotReady("no model is loaded; choose one and load it, then ask again")

    def _start(self, run: Run) -> Run:
        if self._load is not None and self._load.is_over:
            self._load = None  # whatever became of it has been seen
        self._runs[run.conversation_id] = run
        self._enqueue(run)
        return run

    def _enqueue(self, job: Job) -> None:
        with self._wake:
            if self._is_closed:
                raise NotReady("Quorum is shutting down")
            self._queue.append(job)
            self._wake.notify_all()

    def _nudge(self) -> None:
        """There is something to do at the desk; called by any thread."""
        with self._wake:
            self._is_nudged = True
            self._wake.notify_all()

    # The worker's thread

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None:
                if isinstance(job, Run) and not job.is_read:
                    job.abandon()
                if not job.start():
                    continue
                try:
                    self._do(job)
                finally:
                    with self._wake:
                        self._current = None
        finally:
            self._worker.close(SHUTS_DOWN)

    def _next(self) -> Job | None:
        """The next job; requests at the desk are worked on until there is one. None when the service is closed."""
        while True:
            with self._wake:
                self._is_nudged = False
                if self._is_closed:
                    return None
                if self._queue:
                    self._current = self._queue.popleft()
                    return self._current
            if not self._worker.attend():
                self._rest()
                with self._wake:
                    self._wake.wait_for(lambda: self._queue or self._is_closed or self._is_nudged)

    def _rest(self) -> None:
        try:
            self._worker.rest()
        except OSError as error:
            log.warning("what was measured on this machine could not be kept: %s", error)

    def _do(self, job: Job) -> None:
        try:
            state = JobState.DONE
            if isinstance(job, Load):
                if self._worker.facts is None:
                    self.desk.refuse(IS_LOADING)
                self._worker.load(job)
            elif isinstance(job, Comparison):
                self._worker.compare(job)
                state = JobState.CANCELLED if job.cancelled.is_set() else JobState.DONE
            elif isinstance(job, Unload):
                self._worker.close(NOTHING_LOADED)
            elif isinstance(job, Check):
                self._worker.check(job)
            elif isinstance(job, Verify):
                self._worker.verify(job)
                state = JobState.CANCELLED if job.cancelled.is_set() else JobState.DONE
            elif isinstance(job, Run):
                state = self._worker.answer(job)
            job.finish(state)
        except (Cancelled, LoadCancelled):
            job.finish(JobState.CANCELLED)
        except QuorumError as error:
            job.finish(JobState.FAILED, str(error))
        except Exception as error:
            log.exception("a job failed in a way that should not happen")
            job.finish(JobState.FAILED, f"Quorum made a mistake ({type(error).__name__}: {error}); please report it")
        finally:
            if isinstance(job, Load) and self._worker.facts is None:
                self.desk.refuse(NOTHING_LOADED)
