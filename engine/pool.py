"""Several requests that share one loaded set: each pass of the target carries a token of every one of them.

A round admits what there is room for (`engine.room`), reads a slice of one prompt, and lets every answer go on in one
pass. The answers are those that each request would have had alone, where the set measures exact for several requests:
the cache keeps each sequence in the order of its tokens (`engine.runtime.shared`), prompts are read as a session reads
them (`engine.reading`), and text, limits and stop rules are a session's own (`engine.answer`).

The thread that owns the loaded set makes, steps and closes the pool; `submit` and the tickets are for any thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.active import ActiveRequest
from engine.answer import Answer
from engine.config import MAX_DRAFT_TOKENS, PolicyKind
from engine.drafting import Panel
from engine.errors import PoolClosed, PoolFull, PromptError, QuorumError
from engine.invariants import CHECKS_VARIABLE
from engine.loader import LoadedSet, target_settings
from engine.memory import cache_in_memory, check_memory
from engine.metrics import Ledger
from engine.pipeline import StepResult, emission
from engine.pool_drafting import NOTHING, PoolDrafting, mean_tokens
from engine.pool_types import TIMED, PoolSettings, PoolStatistics
from engine.reading import Reading, slice_size
from engine.room import Room
from engine.runtime.affinity import keep_to
from engine.runtime.context import PassCancelled, Run
from engine.runtime.devices import has_gpu
from engine.runtime.sampler import Sampler
from engine.runtime.shared import SharedContext
from engine.shelf import Cached
from engine.ticket import PoolRequest, Ticket
from engine.types import (
    Finished,
    FinishReason,
    Metrics,
    PrefillProgress,
    Provenance,
    SpeculationState,
    StepRecord,
    StepTimes,
    Timings,
    TokenTree,
    Verdict,
    VotedDraft,
)
from engine.verify.tree import Candidate, Verification, verify

__all__ = ["Pool", "PoolRequest", "PoolSettings", "PoolStatistics", "Ticket"]

SLICE_TOKENS = 32
"""Tokens of a prompt in a pass that carries answers too, where no other request waits to be read."""
GPU_SLICE_TOKENS = 256
SPARE_SEQUENCES = 2
"""One holds what is out of use, another what is being carried."""


class Pool:
    """Answers requests side by side. Owned by the thread that owns the set; `submit` is for any thread."""

    def __init__(
        self, loaded: LoadedSet, settings: PoolSettings | None = None, wake: Callable[[], None] = lambda: None
    ) -> None:
        """Make a second context on the set's target.

        Args:
            loaded: The set that answers; it is not closed with the pool.
            settings: How much the pool holds.
            wake: Called, by any thread, when there is something new to do.

        Raises:
            MemoryShortage: the cache finds no room.
            DecodeError: no context could be made.
        """
        self.settings = settings or PoolSettings()
        self._set = loaded
        self._wake_owner = wake
        self._clock = loaded.learning.cost.clock
        self._can_roll_back = loaded.model.can_roll_back
        # Cells of another order would show in what a recurrent model says; it answers one request at a time.
        self._most_active = self.settings.most_active if self._can_roll_back else 1
        tokens = self.settings.context_tokens or loaded.context.context_tokens
        self._most_rows = max(self._most_active, MAX_DRAFT_TOKENS + 1)
        """Tokens of answers in one pass."""
        sequences = self._most_active + self.settings.most_kept + SPARE_SEQUENCES
        needed_bytes = cache_in_memory(loaded.model, loaded.config.placement, tokens)
        check_memory(loaded.config.target, needed_bytes, f"a cache of {tokens} tokens for several requests")
        shape = target_settings(loaded.config, tokens)
        self._read_tokens = shape.batch_tokens
        """Of a prompt, most in one pass."""
        self._slice_tokens = min(GPU_SLICE_TOKENS if has_gpu() else SLICE_TOKENS, self._read_tokens)
        # Before the context's threads start, which stay where the one is that starts them.
        self._cores = keep_to(self.settings.target_cores) if self.settings.target_cores else frozenset()
        self._context = SharedContext(
            loaded.model,
            replace(
                shape,
                kv_type=loaded.setting.kv_type,
                max_outputs=max(self._most_rows, sequences),
                max_sequences=sequences,
                batch_tokens=self._most_rows + self._read_tokens,
            ),
        )
        self._limit = min(self._context.context_tokens, loaded.context.context_tokens)
        """Tokens of one request, its answer included: as in a session."""
        self._active: list[ActiveRequest] = []
        """In the order of their admission."""
        self._room = Room(loaded, self._context, self._active, self.settings.most_kept, self._pass_cells, self._fail)
        self._admitted = 0
        self._lock = threading.Lock()
        self._waiting: deque[Ticket] = deque()
        self._is_closed = False
        self._awake = threading.Event()
        self._is_checked = bool(os.environ.get(CHECKS_VARIABLE))
        try:
            self._drafting = PoolDrafting(
                loaded,
                self._most_active,
                self._context.context_tokens,
                self.settings.overlap,
                self.settings.drafter_cores,
            )
        except BaseException:
            self._context.close()
            raise
        self._counts: Counter[str] = Counter()
        self._times: dict[str, float] = dict.fromkeys(TIMED, 0.0)
        self._statistics = PoolStatistics(loaded.setting.requests_badge)
        self._tell()

    @property
    def statistics(self) -> PoolStatistics:
        """A snapshot; may be read from any thread."""
        return replace(self._statistics, waiting=len(self._waiting))

    def submit(self, request: PoolRequest) -> Ticket:
        """Ask for an answer; any thread may.

        Raises:
            PromptError: the prompt is empty or cannot fit.
            PoolFull: as many requests wait as may.
            PoolClosed: the pool is closed.
        """
        if not request.prompt:
            raise PromptError("the prompt is empty; write something to answer")
        if len(request.prompt) >= self._limit:
            raise PromptError(
                f"the prompt has {len(request.prompt)} tokens and a request holds {self._limit}, its answer included; "
                "shorten it, or load the model with a larger context"
            )
        ticket = Ticket(request, self._wake)
        with self._lock:
            if self._is_closed:
                raise PoolClosed("the model that would answer is being put away; ask again when one is loaded")
            # Those that will be taken up in the next rounds wait for nothing.
            places = max(0, self._most_active - len(self._active))
            if len(self._waiting) >= self.settings.most_waiting + places:
                raise PoolFull(f"{len(self._waiting)} requests are waiting already; ask again later")
            self._waiting.append(ticket)
        self._wake()
        return ticket

    def _wake(self) -> None:
        self._awake.set()
        self._wake_owner()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until a request comes or is cancelled; whether one was before the time-out."""
        is_awake = self._awake.wait(timeout_s)
        self._awake.clear()
        return is_awake

    def step(self) -> bool:
        """One round; False when there was nothing to do, or the pool is closed."""
        if self._is_closed:
            return False
        started = self._clock()
        before = self._accounted_ms()
        ended = self._counts["failed"] + self._counts["cancelled"]
        self._end_cancelled()
        self._admit()
        if not self._active:
            self._tell()
            # Whoever asked for what could not be begun waits to hear of it.
            return self._counts["failed"] + self._counts["cancelled"] > ended
        self._carry()
        is_answering = any(active.reading is None for active in self._active)
        self._room.make(self._pass_cells if is_answering else self._read_tokens)
        self._room.bring_back()
        self._pass()
        if self._is_checked:
            self.check()
        self._counts["rounds"] += 1
        self._times["other_ms"] += (self._clock() - started) * 1e3 - (self._accounted_ms() - before)
        self._tell()
        return True

    def close(self) -> None:
        """End every request as if it were cancelled, and free the cache. Safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for ticket in waiting:
            self._give_up(ticket)
        # Whatever goes wrong with one of them, the others are told and all is freed.
        with contextlib.ExitStack() as ends:
            if self._cores:
                ends.callback(keep_to, self._cores)
            ends.callback(self._context.close)
            ends.callback(self._drafting.close)
            ends.callback(self._tell)
            for active in reversed(self._active):
                ends.callback(self._break_off, active)

    def _break_off(self, active: ActiveRequest) -> None:
        """End a request as if it were cancelled; where that fails, whoever waits for it is told at least."""
        try:
            self._finish(active, FinishReason.CANCELLED)
        except Exception:
            active.ticket.put(PoolClosed("the answer could not be ended properly; ask again"))
            raise

    def check(self) -> None:
        """Check what must hold between two rounds.

        Raises:
            AssertionError: something does not hold; the message says what.
        """
        self._context.check()
        for active in self._active:
            active.check(self._context)
        self._drafting.check()

    # Admission.

    def _end_cancelled(self) -> None:
        for active in list(self._active):
            if active.ticket.cancelled.is_set():
                self._finish(active, FinishReason.CANCELLED)
        with self._lock:
            gone = [ticket for ticket in self._waiting if ticket.cancelled.is_set()]
            for ticket in gone:
                self._waiting.remove(ticket)
        for ticket in gone:
            self._give_up(ticket)

    def _give_up(self, ticket: Ticket) -> None:
        """End a request that was not begun."""
        request = ticket.request
        state = SpeculationState(False, "off: cancelled before it began")
        metrics = Metrics(prompt_tokens=len(request.prompt))
        seed = request.settings.sampling.seed or 0
        ticket.put(Finished(FinishReason.CANCELLED, "", (), seed, metrics, Timings(), state))
        self._counts["cancelled"] += 1

    def _admit(self) -> None:
        """Begin the request that has waited longest when the one before it is read and there is room for it."""
        while self._waiting and not any(active.reading for active in self._active):
            if len(self._active) >= self._most_active or any(active.put_aside is not None for active in self._active):
                return
            ticket = self._waiting[0]
            source, shared = self._room.source(ticket.request)
            if self._active and not self._room.fits(ticket.request, source, shared):
                return
            with self._lock:
                self._waiting.popleft()
            try:
                self._begin(ticket, source, shared)
            except QuorumError as error:
                ticket.put(error)
                self._counts["failed"] += 1
            except BaseException:
                # Whoever closes the pool now ends this one too.
                with self._lock:
                    self._waiting.appendleft(ticket)
                raise

    @property
    def _slice_size(self) -> int:
        next_ones = min(len(self._waiting), self._most_active - len(self._active))
        return slice_size(self._slice_tokens, 1 + next_ones, self._read_tokens)

    @property
    def _pass_cells(self) -> int:
        """What is to be free for a pass with answers; of a prompt, no more enters than there is room for."""
        return self._most_rows + self._slice_tokens

    def _begin(self, ticket: Ticket, source: Cached | None, shared: int) -> None:
        request = ticket.request
        started = time.perf_counter()
        settings = request.settings
        vocabulary = self._set.model.vocabulary
        sampler = Sampler(settings.sampling, vocabulary, request.prompt, settings.top_log_probabilities)
        sequence = self._room.enter(source, shared)
        held = frozenset(one for one in source.held if one.end <= shared) if source else frozenset()
        reading = Reading(self._context, sequence, request.prompt, self._room.wanted(request), held)
        self._counts["prompt_tokens"] += len(request.prompt)
        self._counts["reused_tokens"] += shared
        self._admitted += 1
        ledger = Ledger(len(request.prompt), shared)
        active = ActiveRequest(ticket, self._admitted, sequence, sampler, ledger, reading, started, self._limit)
        self._active.append(active)
        self._heed(active)

    # A round.

    def _carry(self) -> None:
        """Read a slice of a stretch that is carried, where one comes next."""
        active = next((active for active in self._active if active.reading), None)
        if active is None or active.reading is None or not active.reading.carried_tokens:
            return
        started = self._clock()
        self._room.make(active.reading.carried_tokens + self._most_rows)
        if active not in self._active:
            return
        try:
            active.reading.carry(active.ticket.cancelled)
        except PassCancelled:
            return
        except QuorumError as error:
            self._fail(active, error)
            return
        finally:
            self._times["prefill_ms"] += (self._clock() - started) * 1e3
        self._heed(active)

    def _pass(self) -> None:
        """Let every answer go on, and a prompt that is read, in one pass."""
        reader = next((active for active in self._active if active.reading), None)
        batch = [active for active in self._active if active.reading is None and active.put_aside is None]
        slices: list[Run] = []
        if reader is not None and reader.reading is not None and not reader.reading.carried_tokens:
            size = self._slice_size if batch else self._read_tokens
            slices = [reader.reading.slice(max(0, min(size, self._context.free_cells - len(batch))))]
        if not batch:
            if reader is not None and slices:
                self._read_alone(reader, slices[0])
            return
        self._answer_on(batch, reader if slices else None, slices)

    def _answer_on(self, batch: list[ActiveRequest], reader: ActiveRequest | None, slices: Sequence[Run]) -> None:
        """Draft, verify and commit for every answer; a slice of a prompt enters with them."""
        started = self._clock()
        self._drafting.read(batch)
        read_on = self._clock()
        plan, batch, waited_ms = self._drafting.prepare(batch)
        drafted = self._clock()
        entering = sum(len(run.tokens) for run in slices)
        most_rows = max(len(batch), min(self._most_rows, self._context.free_cells - entering))
        sent = self._drafting.share(batch, most_rows)
        # What the last one rejects lies at the end of the cache, where it leaves no gap.
        order = sorted(range(len(batch)), key=lambda at: len(sent[at]))
        batch, sent = [batch[at] for at in order], [sent[at] for at in order]
        candidates = [
            Candidate(active.sequence, active.tokens[-1], own.tokens, active.sampler)
            for active, own in zip(batch, sent, strict=True)
        ]
        context_tokens = mean_tokens(batch)
        is_drafting = self._drafting.is_drafting
        self._times["draft_ms"] += (drafted - started) * 1e3
        try:
            verification = verify(self._context, candidates, self._clock, slices)
        except QuorumError as error:
            self._room.relieve(error)
            return
        self._room.note_pass()
        rows = sum(1 + len(own) for own in sent)
        verify_ms = verification.verify_ms * rows / (rows + entering)
        self._times["verify_ms"] += verify_ms
        self._times["prefill_ms"] += verification.verify_ms - verify_ms
        self._times["sample_ms"] += verification.sample_ms
        self._counts["passes"] += 1
        self._counts["carried_answers"] += len(batch)
        self._counts["overlapped"] += is_drafting
        before = self._counts["tokens"]
        round_ms = (self._clock() - read_on) * 1e3
        for active, own, verdict in zip(batch, sent, verification.verdicts, strict=True):
            self._commit(active, own, verdict, verification, round_ms)
        if slices:
            assert reader is not None
            self._heed(reader)
            return
        round_ms = (self._clock() - read_on) * 1e3
        besides_ms = max(0.0, round_ms - waited_ms - verification.verify_ms)
        if not plan.way.overlaps:
            self._set.learning.cost.observe_verify(rows, context_tokens, verification.verify_ms, len(batch))
        self._drafting.learn_round(plan, len(batch), self._counts["tokens"] - before, round_ms, besides_ms)

    def _read_alone(self, active: ActiveRequest, run: Run) -> None:
        started = self._clock()
        try:
            self._context.decode([run], active.ticket.cancelled)
        except PassCancelled:
            return
        except QuorumError as error:
            self._room.relieve(error)
            return
        finally:
            self._times["prefill_ms"] += (self._clock() - started) * 1e3
        self._room.note_pass()
        self._heed(active)

    def _heed(self, active: ActiveRequest) -> None:
        """Tell how far a prompt is read, and begin its answer when it is."""
        assert active.reading is not None
        active.ticket.put(PrefillProgress(active.reading.done_tokens, len(active.ticket.request.prompt)))
        if active.reading.is_done:
            active.end_reading()
            active.answer = self._answer(active)
            self._drafting.open(active)

    def _answer(self, active: ActiveRequest) -> Answer:
        request = active.ticket.request
        answer = Answer(
            self._set,
            request.settings,
            len(request.prompt),
            active.ledger,
            active.sampler,
            request.starts_thinking,
            active.started,
        )
        is_off = request.settings.speculation.policy.kind is PolicyKind.OFF
        answer.attach(active, Panel(()) if is_off else self._set.panel)
        return answer

    def _commit(
        self, active: ActiveRequest, sent: VotedDraft, verdict: Verdict, verification: Verification, round_ms: float
    ) -> None:
        """Append what the target chose, learn from it, and tell the reader."""
        tree = TokenTree(sent)
        emitted, ended = emission(tree, verdict, self._set.model.vocabulary.end_tokens)
        active.tokens.extend(token.id for token in emitted)
        if ended:
            # The end token itself belongs to the template's text, which a next turn brings along.
            length = self._context.length(active.sequence)
            self._context.truncate(active.sequence, min(length, len(active.tokens)))
        ballot = active.ballot or NOTHING
        scores = self._drafting.learn(active, sent, verdict, [token.id for token in emitted], round_ms)
        accepted = sum(token.provenance is Provenance.ACCEPTED for token in emitted)
        times = StepTimes(draft_ms=ballot.draft_ms, verify_ms=verification.verify_ms, sample_ms=verification.sample_ms)
        record = StepRecord(
            proposed=sum(ballot.proposals.values()),
            drafted=len(ballot.voted),
            accepted=accepted,
            emitted=len(emitted),
            context_tokens=len(active.tokens),
            planned_length=len(sent),
            proposals=ballot.proposals,
            look_ahead="",
            unused_look_ahead=0,
            times=times,
            reason=self._drafting.reason,
            drafts=tuple(draft for draft in ballot.drafts if draft.tokens),
            voted=ballot.voted,
            sent=tree,
        )
        active.ledger.record(record, emitted, ballot.voted.proposers, scores)
        self._counts["tokens"] += len(emitted)
        self._counts["drafted"] += len(ballot.voted)
        self._counts["verified"] += len(sent)
        self._counts["accepted"] += accepted
        answer = active.answer
        assert answer is not None
        active.ticket.put(answer.take(StepResult(emitted, record, ended)))
        if ended or answer.is_stopped:
            self._finish(active, FinishReason.STOP)
            return
        reason = answer.limit_reached(len(active.tokens), self._limit)
        if reason is not None:
            self._finish(active, reason)

    # Ends.

    def _finish(self, active: ActiveRequest, reason: FinishReason) -> None:
        answer = active.answer or self._answer(active)
        active.ticket.put(answer.finish(reason))
        self._counts["cancelled" if reason is FinishReason.CANCELLED else "done"] += 1
        self._leave(active)

    def _fail(self, active: ActiveRequest, error: QuorumError) -> None:
        active.ticket.put(error)
        self._counts["failed"] += 1
        self._leave(active)

    def _leave(self, active: ActiveRequest) -> None:
        """Free what a request holds; its tokens in the cache are kept for others that begin the same."""
        self._active.remove(active)
        self._drafting.drop(active)
        active.close()
        self._room.leave(active)

    def _accounted_ms(self) -> float:
        return sum(self._times.values()) - self._times["other_ms"]

    def _tell(self) -> None:
        """Let `statistics` say how things stand."""
        put_aside = sum(active.put_aside is not None for active in self._active)
        self._statistics = PoolStatistics(
            exactness=self._set.setting.requests_badge,
            active=len(self._active),
            put_aside=put_aside,
            gathered=self._room.gathered,
            free_cells=self._context.free_cells,
            left_out=tuple(self._drafting.failures.items()),
            **self._counts,
            **self._times,  # type: ignore[arg-type]
        )
