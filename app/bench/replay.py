"""Replays a recording through the real pipeline with a clock of its own: any policy, in a fraction of a second.

Planning, voting, trimming and learning are the engine's own code. Only the models are replaced: the target by its
recorded answer and a cost curve, the drafters by their recorded chains and their measured time per pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from app.bench.recording import RecordedAnswer
from app.bench.step_costs import StepCosts
from engine.config import KvType, Speculation
from engine.cost import CALIBRATED_SIZES, CostModel
from engine.drafters.base import Drafter, DraftRequest, Score, finished
from engine.drafters.model import SCORED_CATCH_UP_TOKENS
from engine.drafting import Panel
from engine.learning import Learning
from engine.loader import FREE_DRAFTERS
from engine.metrics import Ledger
from engine.pipeline import Pipeline
from engine.runtime.context import Context, Run
from engine.runtime.sampler import Sampler
from engine.setting import Setting
from engine.types import Draft, Metrics

CHAINS_ONLY = Setting(KvType.F16, is_exact=None, pass_sizes=None, allows_branches=False)


class ReplayClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def advance_ms(self, elapsed_ms: float) -> None:
        self.seconds += elapsed_ms / 1e3


@dataclass(slots=True)
class ReplayTarget:
    """Stands in for the target's context and sampler: its choices are the recorded answer."""

    tokens: Sequence[int]
    costs: StepCosts
    clock: ReplayClock
    length_tokens: int = 0
    context_tokens: int = 1 << 20
    parked_tokens: int = 0
    model: Any = field(
        default_factory=lambda: SimpleNamespace(can_roll_back=True, vocabulary=SimpleNamespace(end_tokens=frozenset()))
    )

    def decode(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self.clock.advance_ms(self.costs.target_ms(len(run.tokens), self.length_tokens))
            self.length_tokens += len(run.tokens)

    def length(self, _sequence: int) -> int:
        return self.length_tokens

    def truncate(self, _sequence: int, length: int) -> None:
        self.length_tokens = length

    def allowed_length(self, draft: Sequence[int]) -> int:
        return len(draft)

    def match(self, _context: Context, draft: Sequence[int], _first_output: int) -> tuple[int, int]:
        start = self.length_tokens - len(draft)
        accepted = 0
        while accepted < len(draft) and self.tokens[start + accepted] == draft[accepted]:
            accepted += 1
        self.clock.advance_ms((accepted + 1) * self.costs.sample_ms + self.costs.overhead_ms)
        return accepted, self.tokens[start + accepted]


class ReplayDrafter(Drafter):
    """A draft model that answers from a recording."""

    is_free = False

    def __init__(self, name: str, costs: StepCosts, clock: ReplayClock) -> None:
        self.name = name
        self._costs = costs
        self._clock = clock
        self._answer: RecordedAnswer | None = None
        self._committed = 0
        self._read = 0
        self._tail: tuple[int, ...] = ()
        self._passes = 0
        self._score = Score()

    def play(self, answer: RecordedAnswer) -> None:
        """Take the chains of another answer."""
        self._answer = answer
        self._read = 0
        self._tail = ()

    def begin(self, tokens: Sequence[int]) -> None:
        self._committed = len(tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        self._committed += len(tokens)

    def truncate(self, length: int) -> None:
        self._committed = length

    @property
    def behind_tokens(self) -> int:
        return self._committed - self._read

    @property
    def last_passes(self) -> int:
        return self._passes

    def take_score(self) -> Score:
        score, self._score = self._score, Score()
        return score

    def start_catch_up(self, max_tokens: int, cancel: threading.Event) -> Future[int] | None:
        assert self._answer is not None
        read = min(max_tokens, self.behind_tokens)
        end = self._read + read - len(self._answer.prompt)
        self._score_guesses(max(0, end - SCORED_CATCH_UP_TOKENS), end)
        self._advance_reading(read)
        future: Future[int] = Future()
        future.set_result(read)
        return future

    def _advance_reading(self, tokens: int) -> None:
        self._clock.advance_ms(tokens * self._costs.read_ms[self.name])
        self._read += tokens

    def start(self, request: DraftRequest) -> Future[Draft]:
        assert self._answer is not None
        position = self._committed - len(self._answer.prompt)
        if request.path or position >= len(self._answer.answer):
            return finished(Draft(self.name))
        self._judge(position)
        chain = self._answer.chains[self.name][position]
        # A pass reads what was committed and gives the first token; what it had drafted right needs no pass.
        behind = self.behind_tokens
        if behind > 3:
            self._advance_reading(behind - 1)
        known = self._tail[: len(chain.tokens)] == chain.tokens[: len(self._tail)] and len(self._tail)
        self._passes = 0 if known else 1
        drafted = 0
        while True:
            drafted += 1
            if drafted >= min(request.max_tokens, len(chain.tokens)):
                break
            if not request.keep_drafting(chain.probabilities[:drafted], chain.entropies[drafted - 1]):
                break
            self._passes += drafted >= int(known)
        start_ms = self._costs.draft_start_ms.get(self.name, 0.0)
        self._clock.advance_ms(start_ms + self._passes * self._costs.draft_ms[self.name])
        self._read = self._committed
        self._tail = chain.tokens[:drafted]
        return finished(
            Draft(
                self.name,
                chain.tokens[:drafted],
                chain.probabilities[:drafted],
                last_entropy=chain.entropies[drafted - 1],
            )
        )

    def _score_guesses(self, first: int, end: int) -> None:
        """Score the own guesses of those tokens of the answer that were not read before."""
        assert self._answer is not None
        chains = self._answer.chains[self.name]
        places = range(max(first, self._read - len(self._answer.prompt)), end)
        hits = sum(chains[index].tokens[0] == self._answer.answer[index] for index in places)
        self._score += Score(hits, len(places))

    def _judge(self, position: int) -> None:
        """Score what was committed since the last draft."""
        assert self._answer is not None
        first = max(0, self._read - len(self._answer.prompt))
        self._score_guesses(first, position)
        advanced = self._committed - self._read
        matched = self._tail[:advanced] == tuple(self._answer.answer[first:position])
        self._tail = self._tail[advanced:] if matched and self._read else ()


@dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """What one policy made of one recorded answer."""

    prompt_id: str
    category: str
    tokens: int
    seconds: float
    plain_seconds: float
    metrics: Metrics

    @property
    def ratio_to_plain(self) -> float:
        return self.plain_seconds / self.seconds


def cost_model(costs: StepCosts, clock: Callable[[], float]) -> CostModel:
    """A calibrated cost model that knows the replayed machine."""
    model = CostModel(clock=clock)
    for size in CALIBRATED_SIZES:
        model.set_base(size, costs.target_ms(size, 0))
    for name, elapsed_ms in costs.draft_ms.items():
        model.set_drafter(name, {1: elapsed_ms})
        model.observe_read(name, 1, costs.read_ms[name])
    return model


def replay(
    answers: Iterable[RecordedAnswer], drafters: Sequence[str], speculation: Speculation, costs: StepCosts
) -> list[ReplayedAnswer]:
    """Run all answers in order with one set of learners, as a loaded set would."""
    clock = ReplayClock()
    model_drafters = [ReplayDrafter(name, costs, clock) for name in drafters if name not in FREE_DRAFTERS]
    free = [name for name in drafters if name in FREE_DRAFTERS]
    learning = Learning(
        cost_model(costs, clock), free, [d.name for d in model_drafters], runs_apart=False, setting=CHAINS_ONLY
    )
    results = []
    for answer in answers:
        for drafter in model_drafters:
            drafter.play(answer)
        panel = Panel([*model_drafters, *(FREE_DRAFTERS[name]() for name in free)])
        tokens = list(answer.prompt)
        target = ReplayTarget((*answer.prompt, *answer.answer), costs, clock)
        target.length_tokens = len(tokens) - 1
        ledger = Ledger(len(tokens), 0)
        panel.begin(tokens)
        pipeline = Pipeline(
            cast(Context, target), 0, tokens, cast(Sampler, target), panel, learning, ledger, speculation
        )
        started = clock.seconds
        end = len(answer.prompt) + len(answer.answer)
        while len(tokens) < end:
            pipeline.step(end - len(tokens), threading.Event())
        rest_ms = costs.overhead_ms + costs.sample_ms
        places = range(len(answer.prompt) - 1, end - 1)
        plain_ms = sum(costs.target_ms(1, place) + rest_ms for place in places)
        results.append(
            ReplayedAnswer(
                answer.prompt_id,
                answer.category,
                len(answer.answer),
                clock.seconds - started,
                plain_ms / 1e3,
                ledger.metrics({}, {}, frozenset(), {}),
            )
        )
    return results
