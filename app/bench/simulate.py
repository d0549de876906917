"""A model of the request pool: what it would bring with other costs, another acceptance, or more requests at once.

Nothing is measured here. Events of two processors, the target's and the drafters', follow each other on a clock that
costs alone move: passes of the target as `engine.cost` foresees them, drafting, reading, and the way of a draft between
two devices. Requests are admitted, read in slices and verified in one pass, and drafts shared out, as `engine.pool`
does it. What it leaves out: learning and trials (acceptance and costs are known from the start), the choice among the
ways to draft (each is predicted), look-up drafters, several draft models at once, the shelf of kept prompts, and the
cache's limits.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from app.bench.recording import RecordedAnswer
from engine.acceptance import AcceptanceModel
from engine.config import MAX_DRAFT_TOKENS
from engine.cost import CALIBRATED_SIZES, DRAFT_START_PASSES, CostModel
from engine.length import LONGEST_DRAFT
from engine.loader import CPU_BATCH_TOKENS
from engine.marginal import share_out
from engine.pool import SLICE_TOKENS
from engine.prefix import shared_prefix
from engine.reading import slice_size

NOTE = "A simulation: every figure is predicted from costs and acceptance, none was measured."
SHARED_SPEED = 0.5
"""Of target and drafters on the same cores, while both compute."""


class Drafting(str, Enum):
    """How drafts are made."""

    NONE = "undrafted"
    SERIAL = "serial"
    """For all requests, before each pass of the target."""
    OVERLAPPED = "overlapped"
    """For some requests, while the target verifies others."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What things take, in milliseconds."""

    target: CostModel
    """Passes of the target."""
    read_ms: float
    """A token of a prompt, for the target."""
    drafter: CostModel
    """How a drafter's pass grows with the requests in it: as passes of this curve do with their tokens."""
    drafter_ms: float
    """A drafter's pass for one request."""
    drafter_read_ms: float
    """A token of a prompt, for the drafter."""
    drafter_start_passes: float = DRAFT_START_PASSES
    """What a draft takes besides its passes, in passes."""
    link_ms: float = 0.0
    """From when a draft is made until the target has it."""
    is_apart: bool = False
    """Whether the drafter computes on a device of its own."""
    overhead_ms: float = 0.0
    """Of each answer in a pass, besides the pass."""
    slice_tokens: int = SLICE_TOKENS
    """Of a prompt, in a pass that carries answers too, where no other request waits to be read."""
    read_tokens: int = CPU_BATCH_TOKENS
    """Of a prompt, most in one pass."""

    def pass_ms(self, rows: int, context_tokens: int, requests: int, entering: int = 0) -> float:
        """A pass of the target over so many tokens of answers, and so many of a prompt that enter with them."""
        # What enters costs as any token does up to the sizes that are measured, and beyond as in reading.
        measured = max(rows, min(rows + entering, CALIBRATED_SIZES[-1]))
        return self.target.verify_ms(measured, context_tokens, requests) + (rows + entering - measured) * self.read_ms

    def drafting_ms(self, requests: int, length: int) -> float:
        """Drafts of so many tokens for so many requests."""
        if not (requests and length and self.drafter_ms):
            return 0.0
        growth = self.drafter.verify_ms(requests, 0) / self.drafter.verify_ms(1, 0)
        return (length + self.drafter_start_passes) * self.drafter_ms * growth

    def document(self) -> dict[str, Any]:
        """Plain data for JSON."""
        sizes = (1, 2, 3, 4, 8, 16)
        return {
            "target_ms": {size: self.pass_ms(size, 0, 1) for size in sizes},
            "read_ms": self.read_ms,
            "drafter_ms": {size: self.drafting_ms(size, 1) / (1 + self.drafter_start_passes) for size in sizes},
            "drafter_read_ms": self.drafter_read_ms,
            "link_ms": self.link_ms,
            "drafters_apart": self.is_apart,
            "overhead_ms": self.overhead_ms,
            "slice_tokens": self.slice_tokens,
            "read_tokens": self.read_tokens,
        }


def flat_cost(one_ms: float, more_ms: float, up_to: int = 4 * MAX_DRAFT_TOKENS) -> CostModel:
    """A cost model that is a straight line: one token, and each one more."""
    cost = CostModel()
    for tokens in range(1, up_to + 1):
        cost.set_base(tokens, one_ms + (tokens - 1) * more_ms)
    return cost


@dataclass(frozen=True, slots=True)
class ForeseenAnswer:
    """A request whose answer, and what a drafter makes of it, is known."""

    prompt_tokens: int
    accepted: tuple[int, ...]
    """For each token of the answer: how many of the longest draft that begins there the target accepts."""
    survivals: tuple[tuple[float, ...], ...]
    """For each: how likely that draft's tokens, and all before them, seem beforehand."""
    prompt: tuple[int, ...] = ()
    """Its tokens, where they are known: what it has in common with a request that is answered is not read again."""

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return len(self.accepted)


def even_answers(
    count: int, prompt_tokens: int, answer_tokens: int, acceptance: float, seed: int
) -> tuple[ForeseenAnswer, ...]:
    """Requests whose tokens a drafter guesses with the same probability, whatever it knows.

    Which tokens it guesses is settled once, so that all ways to draft meet the same answers.
    """
    chance = random.Random(seed)
    survivals = tuple(acceptance**length for length in range(1, MAX_DRAFT_TOKENS + 1))
    answers = []
    for _ in range(count):
        guessed = [chance.random() < acceptance for _ in range(answer_tokens + MAX_DRAFT_TOKENS)]
        accepted = tuple(
            sum(1 for _ in itertools.takewhile(bool, guessed[place : place + MAX_DRAFT_TOKENS]))
            for place in range(answer_tokens)
        )
        answers.append(ForeseenAnswer(prompt_tokens, accepted, (survivals,) * answer_tokens))
    return tuple(answers)


def recorded_answers(recorded: Sequence[RecordedAnswer], drafter: str, count: int) -> tuple[ForeseenAnswer, ...]:
    """Requests out of a recording, from the first again when there are fewer."""
    believed = AcceptanceModel(())
    own = [_recorded_answer(answer, drafter, believed) for answer in recorded]
    return tuple(itertools.islice(itertools.cycle(own), count))


def _recorded_answer(answer: RecordedAnswer, drafter: str, believed: AcceptanceModel) -> ForeseenAnswer:
    accepted, survivals = [], []
    for place, chain in enumerate(answer.chains[drafter]):
        hits = map(operator.eq, chain.tokens, answer.answer[place:])
        accepted.append(sum(1 for _ in itertools.takewhile(bool, hits)))
        tokens = (believed.token(drafter, probability, 1.0, 1) for probability in chain.probabilities)
        survivals.append(tuple(itertools.accumulate(tokens, operator.mul)))
    return ForeseenAnswer(len(answer.prompt), tuple(accepted), tuple(survivals))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated pool did."""

    drafting: Drafting
    concurrency: int
    tokens: int
    elapsed_ms: float
    passes: int
    """Of the target, with answers."""
    carried_answers: int
    """In all of them together."""
    verified: int
    accepted: int
    overlapped: int
    """Passes that began while drafts were being made."""
    drafter_busy_ms: float
    parts_ms: Mapping[str, float]
    """Where the target's time went: prefill, verify, other, and draft, which it waited for."""

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.tokens / self.elapsed_ms * 1e3

    @property
    def mean_batch(self) -> float:
        """Answers in a pass."""
        return self.carried_answers / self.passes

    def document(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **asdict(self),
            "simulated": True,
            "drafting": self.drafting.value,
            "tokens_per_second": self.tokens_per_second,
            "mean_batch": self.mean_batch,
        }


@dataclass(slots=True, eq=False)
class _Request:
    """One that is being answered."""

    answer: ForeseenAnswer
    unread_tokens: int
    """Of its prompt, by the target."""
    drafter_unread_tokens: int
    emitted: int = 0
    draft: int | None = None
    """Tokens of the draft that waits to be verified; None where none was made yet, not even an empty one."""
    is_drafted_for: bool = False

    @property
    def remaining_tokens(self) -> int:
        return self.answer.tokens - self.emitted

    @property
    def context_tokens(self) -> int:
        return self.answer.prompt_tokens + self.emitted


@dataclass(slots=True, eq=False)
class _Job:
    """What a processor computes."""

    remaining_ms: float
    """At full speed."""
    done: Callable[[], None]
    event: int = 0
    """The number of the event that ends it; earlier ones were foreseen at another speed."""


@dataclass(slots=True)
class _Counts:
    tokens: int = 0
    passes: int = 0
    carried_answers: int = 0
    verified: int = 0
    accepted: int = 0
    overlapped: int = 0
    drafter_busy_ms: float = 0.0
    parts_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", "verify", "other"), 0.0))


TARGET, DRAFTER, LINK = "target", "drafter", "link"


class Simulation:
    """One run of a pool; runs once."""

    def __init__(
        self,
        machine: Machine,
        answers: Sequence[ForeseenAnswer],
        concurrency: int,
        drafting: Drafting,
        fixed_length: int | None = None,
    ) -> None:
        """Args:
        answers: All asked for at the start; they are taken up in this order.
        concurrency: Requests answered at the same time.
        fixed_length: Tokens of each draft, all of which are sent; None: as many as bring the most for their time.
        """
        self._machine = machine
        self._concurrency = concurrency
        self._drafting = drafting
        self._fixed_length = fixed_length
        self._mean = mean_acceptance(answers)
        self._lengths: dict[tuple[int, bool], int] = {}
        self._waiting = deque(_Request(answer, answer.prompt_tokens, answer.prompt_tokens) for answer in answers)
        self._active: list[_Request] = []
        self._most_rows = max(concurrency, MAX_DRAFT_TOKENS + 1)
        self._now_ms = 0.0
        self._numbers = itertools.count(1)
        self._events: list[tuple[float, int, str, Callable[[], None]]] = []
        self._jobs: dict[str, _Job] = {}
        """What is computed now, by processor."""
        self._orders: deque[dict[_Request, int]] = deque()
        """Batches of requests that are yet to be drafted for, and how many tokens each."""
        self._counts = _Counts()

    def run(self) -> Outcome:
        """Answer everything."""
        self._go_on()
        while self._events:
            at_ms, number, place, happen = heapq.heappop(self._events)
            if place != LINK and (place not in self._jobs or self._jobs[place].event != number):
                continue
            self._pass_time(at_ms)
            happen()
            self._go_on()
        assert not self._active, "requests are left and nothing happens"
        counts = self._counts
        busy_ms = sum(counts.parts_ms.values())
        return Outcome(
            drafting=self._drafting,
            concurrency=self._concurrency,
            tokens=counts.tokens,
            elapsed_ms=self._now_ms,
            passes=counts.passes,
            carried_answers=counts.carried_answers,
            verified=counts.verified,
            accepted=counts.accepted,
            overlapped=counts.overlapped,
            drafter_busy_ms=counts.drafter_busy_ms,
            parts_ms={**counts.parts_ms, "draft": max(0.0, self._now_ms - busy_ms)},
        )

    # The clock and the processors.

    @property
    def _speed(self) -> float:
        return 1.0 if self._machine.is_apart or len(self._jobs) < 2 else SHARED_SPEED

    def _pass_time(self, at_ms: float) -> None:
        elapsed_ms = at_ms - self._now_ms
        for job in self._jobs.values():
            job.remaining_ms = max(0.0, job.remaining_ms - elapsed_ms * self._speed)
        if DRAFTER in self._jobs:
            self._counts.drafter_busy_ms += elapsed_ms
        self._now_ms = at_ms

    def _start(self, place: str, work_ms: float, done: Callable[[], None]) -> None:
        self._jobs[place] = _Job(work_ms, done)
        self._foresee_ends()

    def _end(self, place: str) -> None:
        del self._jobs[place]
        self._foresee_ends()

    def _foresee_ends(self) -> None:
        """Foresee anew when what is computed will be done: how many compute has changed."""
        for place, job in self._jobs.items():
            job.event = next(self._numbers)
            end_ms = self._now_ms + job.remaining_ms / self._speed
            heapq.heappush(self._events, (end_ms, job.event, place, job.done))

    def _go_on(self) -> None:
        """Let whatever is idle take up what there is for it."""
        if TARGET not in self._jobs:
            self._next_round()
        if DRAFTER not in self._jobs and self._orders:
            self._draft(self._orders.popleft())

    # A round of the pool.

    def _next_round(self) -> None:
        while self._waiting and len(self._active) < self._concurrency and not self._reader():
            self._active.append(self._begun(self._waiting.popleft()))
        reader = self._reader()
        batch = [request for request in self._active if not request.unread_tokens]
        if batch:
            ready = self._prepare(batch)
            if ready:
                self._verify(ready, reader)
        elif reader is not None:
            self._read_alone(reader)

    def _begun(self, request: _Request) -> _Request:
        """A request that goes on from what it has in common with another."""
        prompt = request.answer.prompt
        shared = max((shared_prefix(other.answer.prompt, prompt) for other in self._active), default=0)
        request.unread_tokens -= shared
        request.drafter_unread_tokens -= shared
        return request

    def _reader(self) -> _Request | None:
        return next((request for request in self._active if request.unread_tokens), None)

    def _read_alone(self, reader: _Request) -> None:
        work_ms = reader.unread_tokens * self._machine.read_ms

        def done() -> None:
            reader.unread_tokens = 0
            self._counts.parts_ms["prefill"] += work_ms
            self._end(TARGET)

        self._start(TARGET, work_ms, done)

    def _prepare(self, batch: Sequence[_Request]) -> list[_Request]:
        """Order drafts where there are none; those that can be verified now, none while they are waited for."""
        fresh = [request for request in batch if request.draft is None and not request.is_drafted_for]
        if self._drafting is Drafting.OVERLAPPED:
            # Where nobody could be verified meanwhile, one half is, while the other is drafted for.
            half = 0 if len(fresh) < len(batch) else (len(fresh) + 1) // 2
            for group in (fresh[:half], fresh[half:]):
                self._order(group)
            return [request for request in batch if request.draft is not None]
        self._order(fresh)
        return [] if any(request.draft is None for request in batch) else list(batch)

    def _order(self, requests: Sequence[_Request]) -> None:
        length = self._length(len(requests)) if requests else 0
        order = {}
        for request in requests:
            # The pass itself brings the last token.
            room = min(length, request.remaining_tokens - 1, len(request.answer.survivals[request.emitted]))
            # The first token comes before what makes later ones faster.
            if room and request.emitted and self._is_worth_reading(request, len(requests), length):
                request.is_drafted_for = True
                order[request] = room
            else:
                request.draft = 0
        if order:
            self._orders.append(order)

    def _draft(self, order: Mapping[_Request, int]) -> None:
        behind_tokens = sum(request.drafter_unread_tokens for request in order)
        work_ms = self._machine.drafting_ms(len(order), max(order.values()))
        work_ms += behind_tokens * self._machine.drafter_read_ms

        def arrive() -> None:
            for request, tokens in order.items():
                request.draft, request.is_drafted_for = tokens, False

        def done() -> None:
            for request in order:
                request.drafter_unread_tokens = 0
            self._end(DRAFTER)
            arrival = (self._now_ms + self._machine.link_ms, next(self._numbers), LINK, arrive)
            heapq.heappush(self._events, arrival)

        self._start(DRAFTER, work_ms, done)

    def _verify(self, batch: Sequence[_Request], reader: _Request | None) -> None:
        machine, counts = self._machine, self._counts
        sent = self._share(batch)
        rows = len(batch) + sum(sent)
        next_ones = min(len(self._waiting), self._concurrency - len(self._active))
        size = slice_size(machine.slice_tokens, 1 + next_ones, machine.read_tokens)
        entering = min(size, reader.unread_tokens) if reader is not None else 0
        pass_ms = machine.pass_ms(rows, _mean_context(batch), len(batch), entering)
        other_ms = machine.overhead_ms * len(batch)
        started_ms = self._now_ms
        counts.passes += 1
        counts.carried_answers += len(batch)
        counts.overlapped += DRAFTER in self._jobs or bool(self._orders)

        def done() -> None:
            self._end(TARGET)
            # Cores that were shared make both parts longer; the pass is divided by tokens, as the pool does it.
            longer = (self._now_ms - started_ms) / (pass_ms + other_ms) if pass_ms + other_ms else 1.0
            counts.parts_ms["verify"] += longer * pass_ms * rows / (rows + entering)
            counts.parts_ms["prefill"] += longer * pass_ms * entering / (rows + entering)
            counts.parts_ms["other"] += longer * other_ms
            if reader is not None:
                reader.unread_tokens -= entering
            for request, own in zip(batch, sent, strict=True):
                self._commit(request, own)

        self._start(TARGET, pass_ms + other_ms, done)

    def _commit(self, request: _Request, sent: int) -> None:
        accepted = min(sent, request.answer.accepted[request.emitted])
        request.emitted += accepted + 1
        request.draft = None
        self._counts.tokens += accepted + 1
        self._counts.verified += sent
        self._counts.accepted += accepted
        if not request.remaining_tokens:
            self._active.remove(request)

    # How much is drafted, and sent.

    def _length(self, requests: int) -> int:
        """Tokens of a draft, for so many requests that are drafted for together."""
        if self._drafting is Drafting.NONE:
            return 0
        if self._fixed_length is not None:
            return self._fixed_length
        hides = self._hides
        key = (requests, hides)
        if key not in self._lengths:
            most = min(LONGEST_DRAFT, self._most_rows // requests - 1)
            self._lengths[key] = max(range(most + 1), key=lambda length: self._foreseen_rate(requests, length, hides))
        return self._lengths[key]

    def _is_worth_reading(self, request: _Request, requests: int, length: int) -> bool:
        """Whether the rest of an answer is likely to repay what the drafter has yet to read of its prompt."""
        if self._fixed_length is not None or not request.drafter_unread_tokens:
            return True
        plain = self._foreseen_rate(requests, 0, self._hides)
        drafted = self._foreseen_rate(requests, length, self._hides)
        saved_ms = request.remaining_tokens * (1 / plain - 1 / drafted)
        return saved_ms > request.drafter_unread_tokens * self._machine.drafter_read_ms

    @property
    def _hides(self) -> bool:
        """Whether drafting goes on beside the target's passes at no cost to them."""
        return self._drafting is Drafting.OVERLAPPED and self._machine.is_apart and len(self._active) > 1

    def _foreseen_rate(self, requests: int, length: int, hides: bool) -> float:
        """Tokens per millisecond of rounds with drafts of this length, from mean acceptance."""
        machine = self._machine
        tokens = requests * sum(self._mean**accepted for accepted in range(length + 1))
        verify_ms = machine.pass_ms(requests * (1 + length), 0, requests) + requests * machine.overhead_ms
        draft_ms = machine.drafting_ms(requests, length)
        whole_ms = verify_ms + draft_ms + (machine.link_ms if length else 0.0)
        # Two groups take turns: each is drafted for while the other is verified.
        return tokens / (max(verify_ms, draft_ms, whole_ms / 2) if hides else whole_ms)

    def _share(self, batch: Sequence[_Request]) -> list[int]:
        """What each request sends: all that was drafted, or by the marginal rule, as the pool does it."""
        requests = len(batch)
        left = self._most_rows - requests
        drafts = [request.draft or 0 for request in batch]
        if self._fixed_length is not None:
            sent = []
            for draft in drafts:
                sent.append(min(draft, left))
                left -= sent[-1]
            return sent
        context_tokens = _mean_context(batch)
        besides_ms = requests * self._machine.overhead_ms
        if self._drafting is Drafting.SERIAL and any(drafts):
            besides_ms += self._machine.drafting_ms(requests, max(drafts)) + self._machine.link_ms

        def round_ms(count: int) -> float:
            return self._machine.pass_ms(requests + count, context_tokens, requests) + besides_ms

        survivals = [
            request.answer.survivals[request.emitted][:draft] for request, draft in zip(batch, drafts, strict=True)
        ]
        return share_out(survivals, float(requests), round_ms, left)


def _mean_context(batch: Sequence[_Request]) -> int:
    return sum(request.context_tokens for request in batch) // len(batch)


def mean_acceptance(answers: Sequence[ForeseenAnswer]) -> float:
    """Share of draft tokens that are accepted, of those whose draft was accepted up to them."""
    hits = sum(sum(answer.accepted) for answer in answers)
    misses = sum(
        accepted < len(own)
        for answer in answers
        for accepted, own in zip(answer.accepted, answer.survivals, strict=True)
    )
    return hits / (hits + misses) if hits else 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated: one drafter on one machine, and what it makes of the answers."""

    drafter: str
    machine: Machine
    answers: tuple[ForeseenAnswer, ...]

    def outcomes(self, concurrencies: Sequence[int], fixed_length: int | None) -> list[Outcome]:
        """Every way to draft, at each number of requests."""
        return [
            Simulation(self.machine, self.answers, concurrency, drafting, fixed_length).run()
            for concurrency in concurrencies
            for drafting in Drafting
        ]

    def document(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "simulated": True,
            "drafter": self.drafter,
            "costs": self.machine.document(),
            "requests": len(self.answers),
            "prompt_tokens": [answer.prompt_tokens for answer in self.answers],
            "answer_tokens": [answer.tokens for answer in self.answers],
            "mean_acceptance": mean_acceptance(self.answers),
            "overlap_gain": overlap_gains(outcomes),
            "rows": [outcome.document() for outcome in outcomes],
        }


def overlap_gains(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Throughput with overlap against serial rounds, by concurrency."""
    speeds = {(outcome.concurrency, outcome.drafting): outcome.tokens_per_second for outcome in outcomes}
    return {
        concurrency: speed / speeds[concurrency, Drafting.SERIAL]
        for (concurrency, drafting), speed in speeds.items()
        if drafting is Drafting.OVERLAPPED
    }


def render_simulated(scenario: Scenario, outcomes: Sequence[Outcome]) -> str:
    """The outcomes as text for the terminal."""
    apart = "on a device of its own" if scenario.machine.is_apart else "on the target's cores"
    gains = overlap_gains(outcomes)
    plain = {one.concurrency: one.tokens_per_second for one in outcomes if one.drafting is Drafting.NONE}
    lines = [
        f"{NOTE} {scenario.drafter} {apart}, mean acceptance {mean_acceptance(scenario.answers):.2f}, "
        f"{len(scenario.answers)} requests:",
        "at once  drafts      tokens/s  ratio  batch  prefill  verify  waits  other  drafter  overlap gain",
    ]
    for one in outcomes:
        shares = {name: 100 * part_ms / one.elapsed_ms for name, part_ms in one.parts_ms.items()}
        gain = f"{gains[one.concurrency]:11.2f}x" if one.drafting is Drafting.OVERLAPPED else ""
        lines.append(
            f"{one.concurrency:7d}  {one.drafting.value:10}  {one.tokens_per_second:8.1f}  "
            f"{one.tokens_per_second / plain[one.concurrency]:4.2f}x  {one.mean_batch:5.1f}  "
            f"{shares['prefill']:6.0f}%  {shares['verify']:5.0f}%  {shares['draft']:4.0f}%  {shares['other']:4.0f}%  "
            f"{100 * one.drafter_busy_ms / one.elapsed_ms:6.0f}%  {gain}".rstrip()
        )
    return "\n".join(lines) + "\n"
