"""A target and drafters that follow a script, and a bench that runs the real pipeline on them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from engine.config import KvType, LookAhead, Policy, Shape, Speculation, VoteMode, WeightRule
from engine.cost import CostModel
from engine.drafters.base import Drafter, DraftRequest, Score, Threads, finished
from engine.drafting import Panel
from engine.errors import DecodeError
from engine.learning import Learning
from engine.metrics import Ledger
from engine.pipeline import Pipeline, StepResult
from engine.runtime.context import Run
from engine.setting import Setting
from engine.types import Draft, Metrics

END = 0
"""The end-of-generation token."""
WRONG = 99
"""What the target would say after a text that is not its own."""
PROMPT = (1, 2, 3)
UNRESTRICTED = Setting(KvType.F16, is_exact=None, pass_sizes=None, allows_branches=True)


class ScriptedTarget:
    """Context, model and sampler in one: says `answer` after `PROMPT`, judging by what its cache really holds."""

    def __init__(self, answer: Sequence[int], context_tokens: int = 1000, spare_sequences: int = 8) -> None:
        self.full = (*PROMPT, *answer)
        self.context_tokens = context_tokens
        self.spare_sequences = spare_sequences
        self.parked_tokens = 0
        self.tidied = 0
        self.sequences = {0: list(PROMPT[:-1])}
        self.passes: list[tuple[int, ...]] = []
        self.trees = 0
        """Passes with side branches."""
        self.fails = False
        self.while_decoding: Callable[[], None] = lambda: None
        self.model = SimpleNamespace(can_roll_back=True, vocabulary=SimpleNamespace(end_tokens=frozenset({END})))
        self._rows: list[tuple[int, ...]] = []

    @property
    def cells(self) -> list[int]:
        """What the conversation's sequence holds."""
        return self.sequences[0]

    def decode(self, runs: Sequence[Run]) -> None:
        assert all(run.outputs == len(run.tokens) for run in runs)
        entering = sum(len(run.tokens) for run in runs)
        assert len(self.cells) + self.parked_tokens + entering <= self.context_tokens, "a pass that does not fit"
        self.while_decoding()
        if self.fails:
            raise DecodeError("scripted")
        self.passes.append(tuple(token for run in runs for token in run.tokens))
        self.trees += len(self.sequences) > 1
        self._rows = []
        for run in runs:
            for token in run.tokens:
                held = [self.sequences[sequence] for sequence in (run.sequence, *run.also)]
                for cells in held:
                    cells.append(token)
                assert all(cells == held[0] for cells in held), "a shared token has one past"
                self._rows.append(tuple(held[0]))

    def copy(self, sequence: int) -> int:
        branch = max(self.sequences) + 1
        assert branch <= self.spare_sequences
        self.sequences[branch] = self.sequences[sequence].copy()
        return branch

    def free(self, sequence: int) -> None:
        del self.sequences[sequence]

    def park(self, sequence: int, kept: int) -> None:
        self.parked_tokens += len(self.sequences[sequence]) - kept
        del self.sequences[sequence][kept:]

    def adopt(self, sequence: int, branch: int, kept: int) -> None:
        self.park(sequence, kept)
        self.sequences[sequence] += self.sequences.pop(branch)[kept:]

    def tidy(self, _sequence: int) -> None:
        self.tidied += bool(self.parked_tokens)
        self.parked_tokens = 0

    def length(self, sequence: int) -> int:
        return len(self.sequences[sequence])

    def truncate(self, sequence: int, length: int) -> None:
        assert length <= len(self.sequences[sequence])
        del self.sequences[sequence][length:]

    def choose(self, prefix: Sequence[int]) -> int:
        length = len(prefix)
        is_own = tuple(prefix) == self.full[:length] and length < len(self.full)
        return self.full[length] if is_own else WRONG

    def allowed_length(self, draft: Sequence[int]) -> int:
        return len(draft)

    def match(self, _context: object, draft: Sequence[int], first_output: int) -> tuple[int, int]:
        accepted = 0
        while accepted < len(draft) and self.choose(self._rows[first_output + accepted]) == draft[accepted]:
            assert self._rows[first_output + accepted + 1][-1] == draft[accepted], "rows belong to the draft"
            accepted += 1
        return accepted, self.choose(self._rows[first_output + accepted])


Guess = Callable[[tuple[int, ...]], Sequence[int]]
"""What a drafter would say after these tokens."""


def knows(answer: Sequence[int], *mistakes: int) -> Guess:
    """A drafter that knows the answer except for the tokens at some places, where it says 50 + the place."""
    own = tuple(50 + place if place in mistakes else token for place, token in enumerate(answer))
    return lambda tokens: own[len(tokens) - len(PROMPT) :]


def silent(_tokens: tuple[int, ...]) -> Sequence[int]:
    """A drafter that abstains."""
    return ()


class ScriptedDrafter(Drafter):
    """Says what its guess says, and keeps a record of what it was told and asked."""

    def __init__(
        self,
        name: str,
        guess: Guess,
        *,
        is_free: bool = False,
        probability: float = 0.9,
        second_guess: Guess | None = None,
    ) -> None:
        self.name = name
        self.is_free = is_free
        self._guess = guess
        self._second_guess = second_guess
        self._probability = probability
        self.committed: list[int] = []
        self.behind = 0
        self.drafts = 0
        self.threads_given = 1
        self.threads_used: Threads | None = None
        self.look_aheads = 0
        self.read: list[int] = []
        self.fails_while = ""
        """`drafting`, `ahead` or `reading`."""
        self.while_drafting: Callable[[], None] = lambda: None
        self.pending_look_ahead: Callable[[threading.Event], None] | None = None
        """When set, a look-ahead runs this in a thread of its own before it answers."""
        self._score = Score()

    def begin(self, tokens: Sequence[int]) -> None:
        self.committed = list(tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        self.committed.extend(tokens)
        self._score += Score(len(tokens), len(tokens))

    def truncate(self, length: int) -> None:
        del self.committed[length:]

    def take_score(self) -> Score:
        score, self._score = self._score, Score()
        return score

    @property
    def behind_tokens(self) -> int:
        return self.behind

    @property
    def threads(self) -> int:
        return self.threads_given

    @property
    def last_passes(self) -> int:
        return 1

    def start(self, request: DraftRequest) -> Future[Draft]:
        self.drafts += 1
        self.threads_used = request.threads
        self.while_drafting()
        if self.fails_while == "drafting":
            return failed()
        return finished(self._draft(request))

    def start_look_ahead(self, request: DraftRequest) -> Future[Draft] | None:
        if self.is_free:
            return None
        self.look_aheads += 1
        if self.fails_while == "ahead":
            return failed()
        wait = self.pending_look_ahead
        if wait is None:
            return finished(self._draft(request))
        future: Future[Draft] = Future()

        def work() -> None:
            wait(request.cancel)
            future.set_result(self._draft(request))

        threading.Thread(target=work).start()
        return future

    def start_catch_up(self, max_tokens: int, cancel: threading.Event) -> Future[int] | None:
        future: Future[int] = Future()
        if self.fails_while == "reading":
            future.set_exception(DecodeError("scripted"))
            return future
        count = min(max_tokens, self.behind)
        self.read.append(count)
        self.behind -= count
        future.set_result(count)
        return future

    def _draft(self, request: DraftRequest) -> Draft:
        tokens: list[int] = []
        text = (*self.committed, *request.path)
        for token in self._guess(text)[: request.max_tokens]:
            tokens.append(token)
            if not request.keep_drafting([self._probability] * len(tokens), 0.1):
                break
        seconds: tuple[tuple[int, float], ...] = ()
        if self._second_guess is not None:
            seconds = tuple((token, 1 - self._probability) for token in self._second_guess(text)[: len(tokens)])
        return Draft(self.name, tuple(tokens), (self._probability,) * len(tokens), seconds=seconds)


def failed() -> Future[Draft]:
    future: Future[Draft] = Future()
    future.set_exception(DecodeError("scripted"))
    return future


class Bench:
    """A pipeline on a scripted target; checks after every step what must hold after every step."""

    def __init__(
        self,
        target: ScriptedTarget,
        drafters: Sequence[ScriptedDrafter],
        policy: str = "fixed:3",
        *,
        look_ahead: LookAhead = LookAhead.OFF,
        vote: VoteMode = VoteMode.TREE,
        weights: WeightRule = WeightRule.HEDGE,
        shape: Shape = Shape.CHAIN,
        setting: Setting = UNRESTRICTED,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.tokens = list(PROMPT)
        self.panel = Panel(drafters)
        self.panel.begin(self.tokens)
        self.learning = Learning(
            CostModel(),
            [drafter.name for drafter in self.panel.free],
            [drafter.name for drafter in self.panel.models],
            runs_apart=False,
            setting=setting,
        )
        self.ledger = Ledger(len(PROMPT), 0)
        self.cancel = threading.Event()
        stand_in: Any = target
        self.pipeline = Pipeline(
            stand_in,
            0,
            self.tokens,
            stand_in,
            self.panel,
            self.learning,
            self.ledger,
            Speculation(Policy.parse(policy), weights, vote, look_ahead, shape),
        )

    def step(self, remaining_tokens: int | None = None) -> StepResult | None:
        result = self.pipeline.step(remaining_tokens, self.cancel)
        ended = result is not None and result.ended
        assert tuple(self.tokens) == self.target.full[: len(self.tokens)], "the answer is the target's own"
        assert self.target.cells == self.tokens[: len(self.tokens) - (not ended)], "all but the pending token is cached"
        assert list(self.target.sequences) == [0], "branches are gone"
        for drafter in self.panel.named(self.panel.names):
            assert isinstance(drafter, ScriptedDrafter)
            assert drafter.committed == self.tokens, "every drafter has heard what was committed"
        if result is not None:
            assert len(result.tokens) == result.record.emitted
        return result

    def run(self, max_tokens: int | None = None) -> list[StepResult]:
        """Steps until the answer ends or has `max_tokens` tokens."""
        results: list[StepResult] = []
        while max_tokens is None or len(self.answer) < max_tokens:
            result = self.step(None if max_tokens is None else max_tokens - len(self.answer))
            assert result is not None
            results.append(result)
            if result.ended:
                break
        return results

    @property
    def answer(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(PROMPT) :])

    @property
    def metrics(self) -> Metrics:
        return self.ledger.metrics(
            weights=self.pipeline._weights.current,
            draft_ms={},
            active=self.pipeline.active,
            notes=self.panel.failures,
        )


def check_sums(metrics: Metrics) -> None:
    """What the counters promise each other, in every answer."""
    assert metrics.drafted == metrics.verified + metrics.trimmed + metrics.unused_look_ahead
    assert metrics.verified == metrics.accepted + metrics.rejected
    assert metrics.emitted == metrics.accepted + metrics.corrected + metrics.bonus + metrics.plain
    assert metrics.proposed >= metrics.drafted
    assert sum(metrics.lengths.values()) == metrics.verify_steps + metrics.plain_steps
    assert sum(length * steps for length, steps in metrics.lengths.items()) == metrics.verified
    assert sum(metrics.verified_by_position) == metrics.verified
    assert sum(metrics.accepted_by_position) == metrics.accepted
    assert min(metrics.trimmed, metrics.rejected, metrics.unused_look_ahead) >= 0
