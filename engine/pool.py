"""Several requests that share one loaded set: each pass of the target carries a token of every one of them.

A round admits what there is room for, reads a slice of one prompt, and lets every answer go on in one pass. The answers
are those that each request would have had alone, wherever the set's setting measures exact: the cache keeps each
sequence in the order of its tokens (`engine.runtime.shared`), prompts are read as a session reads them
(`engine.reading`), and text, limits and stop rules are a session's own (`engine.answer`).

The thread that owns the loaded set makes, steps and closes the pool; `submit` and the tickets are for any thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.active import EXPECTED_ANSWER_TOKENS, ActiveRequest
from engine.answer import Answer
from engine.config import MAX_DRAFT_TOKENS, LookAhead, PolicyKind
from engine.drafting import Panel
from engine.errors import DecodeError, PoolClosed, PoolFull, PromptError, QuorumError
from engine.invariants import CHECKS_VARIABLE
from engine.loader import LoadedSet, target_settings
from engine.memory import cache_in_memory, check_memory
from engine.metrics import Ledger
from engine.pipeline import StepResult, emission
from engine.pool_drafting import NOTHING, PoolDrafting, mean_tokens
from engine.prefill import Part, Stretch, stretches, usable_prefix
from engine.prefix import shared_prefix
from engine.reading import Reading
from engine.runtime.affinity import keep_to
from engine.runtime.context import PassCancelled, Run
from engine.runtime.devices import has_gpu
from engine.runtime.sampler import Sampler
from engine.runtime.shared import SharedContext
from engine.shelf import Cached, Shelf
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

GATHERED_CELLS = 256
"""So many cells are to be free after they were gathered, where something can go for it: gathering takes a while."""
SLICE_TOKENS = 16
"""Tokens of a prompt in a pass that carries answers too; on a processor without a GPU, no dearer a token than more."""
GPU_SLICE_TOKENS = 256
TIMED = ("prefill_ms", "draft_ms", "verify_ms", "sample_ms", "other_ms")
SPARE_SEQUENCES = 2
"""One holds what is out of use, another what is being carried."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How much a pool holds."""

    most_active: int = 8
    """Requests that are answered at the same time."""
    most_waiting: int = 64
    """Requests that wait for that; more are refused. Those that are taken up at once are not counted."""
    context_tokens: int | None = None
    """Tokens in the cache that all requests share; None: as many as the set's own context holds."""
    most_kept: int = 8
    """Ended requests whose tokens are kept for others that begin the same."""
    overlap: LookAhead = LookAhead.AUTO
    """Whether draft models draft for some requests while the target verifies others; `auto`: where it measures faster,
    and as a rule where they have a processor of their own."""
    target_cores: tuple[int, ...] = ()
    """Processor cores that the pool's owner, which computes with one thread, is kept to; empty for all."""
    drafter_cores: tuple[int, ...] = ()
    """The same for draft models."""

    def __post_init__(self) -> None:
        for name in ("most_active", "most_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, found {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts since the pool was made, and how it stands."""

    exactness: str
    """Whether requests say what they would alone, in a clause."""
    active: int = 0
    put_aside: int = 0
    """Of the active, those that wait in memory for room in the cache."""
    waiting: int = 0
    done: int = 0
    cancelled: int = 0
    failed: int = 0
    rounds: int = 0
    passes: int = 0
    """Passes of the target that carried answers."""
    carried_answers: int = 0
    """Answers in all these passes together."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Of the prompts' tokens, those that were in the cache already."""
    tokens: int = 0
    """Emitted."""
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    overlapped: int = 0
    """Passes during which drafts were made for other answers."""
    gathered: int = 0
    """How often the cells of the cache were brought together."""
    free_cells: int = 0
    left_out: tuple[tuple[str, str], ...] = ()
    """Draft models of the set that do not draft here, and why."""
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    sample_ms: float = 0.0
    other_ms: float = 0.0

    @property
    def mean_batch(self) -> float | None:
        """Answers in a pass; None before the first."""
        return self.carried_answers / self.passes if self.passes else None


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
        self._slice_tokens = min(GPU_SLICE_TOKENS if has_gpu() else SLICE_TOKENS, shape.batch_tokens)
        # Before the context's threads start, which stay where the one is that starts them.
        self._cores = keep_to(self.settings.target_cores) if self.settings.target_cores else frozenset()
        self._context = SharedContext(
            loaded.model,
            replace(
                shape,
                kv_type=loaded.setting.kv_type,
                max_outputs=max(self._most_rows, sequences),
                max_sequences=sequences,
                batch_tokens=max(shape.batch_tokens, self._most_rows + self._slice_tokens),
            ),
        )
        self._limit = min(self._context.context_tokens, loaded.context.context_tokens)
        """Tokens of one request, its answer included: as in a session."""
        self._shelf = Shelf(self._context, self.settings.most_kept if self._can_roll_back else 0)
        self._active: list[ActiveRequest] = []
        """In the order of their admission."""
        self._admitted = 0
        self._failed_passes = 0
        """Passes of the target that failed since the last one that did not."""
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
        self._exactness = _exactness(loaded)
        self._counts: Counter[str] = Counter()
        self._times: dict[str, float] = dict.fromkeys(TIMED, 0.0)
        self._statistics = PoolStatistics(self._exactness)
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
        self._make_room(self._pass_cells if is_answering else self._context.settings.batch_tokens)
        self._bring_back()
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

    # Admission and room.

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
            source, shared = self._source(ticket.request)
            if self._active and not self._fits(ticket.request, source, shared):
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

    def _source(self, request: PoolRequest) -> tuple[Cached | None, int]:
        """The cached sequence that a prompt can go on from, and how many of its tokens stay."""
        best: tuple[Cached | None, int] = (None, 0)
        if not self._can_roll_back:
            return best
        wanted = self._wanted(request)
        for cached in (*self._shelf, *(active.cached for active in self._active if active.put_aside is None)):
            shared = shared_prefix(cached.tokens, request.prompt)
            shared = min(shared, self._context.length(cached.sequence), len(request.prompt) - 1)
            shared = usable_prefix(shared, wanted, cached.held)
            if shared > best[1] and self._context.sees_back_from(cached.sequence, shared):
                best = (cached, shared)
        return best

    def _wanted(self, request: PoolRequest) -> frozenset[Stretch]:
        """Stretches of the prompt that are carried, as a session carries them."""
        parts: Sequence[Part] = ((0, len(request.prompt)),) if request.parts is None else request.parts
        if self._set.model.window_tokens:
            # The state of a sequence leaves out what is beyond the window, so no stretch can go on from another.
            parts = [part for part in parts if part[0] == 0]
        return stretches(parts) if self._set.reader.carries else frozenset()

    def _fits(self, request: PoolRequest, source: Cached | None, shared: int) -> bool:
        """Whether a request, and all that are answered, will find room as far as can be foreseen."""
        sequences = [active.sequence for active in self._active if active.put_aside is None]
        # Where windows slide, what is shared is not once it was gathered.
        is_live = source is not None and source.sequence in sequences and not self._set.model.window_tokens
        limit = request.settings.max_tokens
        answer_tokens = EXPECTED_ANSWER_TOKENS if limit is None else min(limit, EXPECTED_ANSWER_TOKENS)
        needed = len(request.prompt) - shared * is_live + answer_tokens
        foreseen = sum(active.expected_tokens for active in self._active)
        return needed + foreseen + self._margin <= self._context.context_tokens - self._context.cells_of(sequences)

    @property
    def _pass_cells(self) -> int:
        """What a pass with answers takes at most."""
        return self._most_rows + self._slice_tokens

    @property
    def _margin(self) -> int:
        """Cells that are to be free between two rounds, besides those for what the next one adds."""
        return min(GATHERED_CELLS, self._context.context_tokens // 8)

    def _begin(self, ticket: Ticket, source: Cached | None, shared: int) -> None:
        request = ticket.request
        started = time.perf_counter()
        settings = request.settings
        vocabulary = self._set.model.vocabulary
        sampler = Sampler(settings.sampling, vocabulary, request.prompt, settings.top_log_probabilities)
        if source is None:
            sequence = self._context.allocate()
        else:
            sequence = self._context.copy(source.sequence, shared)
            self._shelf.use(source)
        held = frozenset(one for one in source.held if one.end <= shared) if source else frozenset()
        reading = Reading(self._context, sequence, request.prompt, self._wanted(request), held)
        self._counts["prompt_tokens"] += len(request.prompt)
        self._counts["reused_tokens"] += shared
        self._admitted += 1
        ledger = Ledger(len(request.prompt), shared)
        active = ActiveRequest(ticket, self._admitted, sequence, sampler, ledger, reading, started, self._limit)
        self._active.append(active)
        self._heed(active)

    def _make_room(self, cells: int) -> None:
        """Let so many cells be free: what was kept longest goes first, then the youngest answers are put aside."""
        context = self._context
        if context.free_cells >= cells:
            return
        wanted = min(cells + self._margin, context.context_tokens)
        while len(self._shelf) and context.context_tokens - context.live_cells < wanted:
            self._shelf.drop_oldest()
        while context.context_tokens - context.live_cells < wanted:
            movable = [active for active in self._active if active.reading is None and active.put_aside is None]
            if len(movable) + any(active.reading for active in self._active) < 2:
                break
            self._put_aside(movable[-1])
        if context.has_gaps:
            self._gather()

    def _put_aside(self, active: ActiveRequest) -> None:
        active.put_aside = self._context.take_beyond(active.sequence, 0)
        self._context.free(active.sequence)

    def _gather(self) -> None:
        """Bring the cells together. A request whose cells llama.cpp does not take back has failed, and no other."""
        lost = self._context.gather()
        self._counts["gathered"] += 1
        self._shelf.drop_all(lost)
        for active in [active for active in self._active if active.put_aside is None and active.sequence in lost]:
            self._fail(active, DecodeError("what was read of the request could not be kept in the cache; ask again"))

    def _bring_back(self) -> None:
        """Let answers that were put aside go on, the oldest first, where there is room for them again."""
        for active in list(self._active):
            if active.put_aside is None:
                continue
            others = [one for one in self._active if one.put_aside is None]
            context = self._context
            foreseen = sum(one.expected_tokens for one in (*others, active))
            needed = len(active.tokens) + foreseen + self._margin
            is_in_need = self._failed_passes > 0
            is_in_need |= needed > context.context_tokens - context.cells_of([one.sequence for one in others])
            if others and is_in_need:
                return
            self._make_room(len(active.tokens) + self._pass_cells)
            sequence = context.allocate()
            try:
                context.append(sequence, active.put_aside, len(active.tokens) - 1)
            except DecodeError as error:
                context.free(sequence)
                if others:
                    return  # there is room when they have ended
                self._fail(active, error)
                continue
            active.sequence, active.put_aside = sequence, None

    # A round.

    def _carry(self) -> None:
        """Read a slice of a stretch that is carried, where one comes next."""
        active = next((active for active in self._active if active.reading), None)
        if active is None or active.reading is None or not active.reading.carried_tokens:
            return
        started = self._clock()
        self._make_room(active.reading.carried_tokens + self._most_rows)
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
            size = self._slice_tokens if batch else self._context.settings.batch_tokens
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
            self._relieve(error)
            return
        self._failed_passes = 0
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
            self._relieve(error)
            return
        finally:
            self._times["prefill_ms"] += (self._clock() - started) * 1e3
        self._failed_passes = 0
        self._heed(active)

    def _relieve(self, error: QuorumError) -> None:
        """A pass failed; all is as before it, so that the next round is another attempt.

        It finds the cells gathered. When that was of no help, the youngest answers wait, one more each time: whoever
        is alone in the cache then, and still fails, has failed, and the others come back.
        """
        self._failed_passes += 1
        present = [active for active in self._active if active.put_aside is None]
        if self._can_roll_back and self._failed_passes == 1:
            self._gather()
        elif self._can_roll_back and len(present) > 1:
            self._put_aside([active for active in present if active.reading is None][-1])
        else:
            self._failed_passes = 0
            for active in present:
                self._fail(active, error)

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
        if active.put_aside is None:
            cached = active.cached
            length = self._context.length(cached.sequence)
            if length and self._can_roll_back:
                self._shelf.put(Cached(cached.sequence, tuple(active.tokens[:length]), cached.held))
            else:
                self._context.free(cached.sequence)

    def _accounted_ms(self) -> float:
        return sum(self._times.values()) - self._times["other_ms"]

    def _tell(self) -> None:
        """Let `statistics` say how things stand."""
        put_aside = sum(active.put_aside is not None for active in self._active)
        self._statistics = PoolStatistics(
            exactness=self._exactness,
            active=len(self._active),
            put_aside=put_aside,
            free_cells=self._context.free_cells,
            left_out=tuple(self._drafting.failures.items()),
            **self._counts,
            **self._times,  # type: ignore[arg-type]
        )


def _exactness(loaded: LoadedSet) -> str:
    """Whether requests in one pass say what each says alone, in a clause."""
    if loaded.setting.is_exact is None:
        return "not compared: requests in one pass may differ from each alone in the last bits"
    if loaded.setting.is_exact:
        return "exact: every request says what it says alone"
    return "not exact: with this model, passes of several tokens differ from single ones in the last bits"
