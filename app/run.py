"""An answer in the making: the worker records the engine's events, any number of readers watch.

Reading tells that somebody is there. A run that nobody has read for the grace time is abandoned, and the worker ends
it; a page that comes back before that goes on reading where the answer has got to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.conversations import AnswerToken
from app.jobs import Job, JobState
from engine.config import GenerationSettings
from engine.types import (
    EmittedToken,
    Finished,
    FinishReason,
    GenerationEvent,
    Metrics,
    PrefillProgress,
    SpeculationState,
    StepDone,
    StepTimes,
    Timings,
)

GRACE_S = 15.0
NOW_WINDOW_S = 1.5
"""The stretch of time over which the present speed is taken."""

TRACED_STEPS = 40

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class StepReading:
    """One step, as far as a plot needs it."""

    sent: int
    """Draft tokens sent to the target: the speculation length."""
    accepted: int
    weights: tuple[float, ...] = ()
    """Voting weights after it, in the order of the metrics' drafters."""
    chosen: int = 0
    """The speculation length that the plan chose; what was sent may be less."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """An answer as it stands."""

    state: JobState
    text: str = ""
    thinking: str = ""
    """The thought that precedes the answer."""
    prefill: PrefillProgress | None = None
    steps: tuple[StepReading, ...] = ()
    tokens: tuple[AnswerToken, ...] = ()
    metrics: Metrics | None = None
    timings: Timings | None = None
    times: StepTimes = field(default_factory=StepTimes)
    """Where the time of all steps went."""
    speculation: SpeculationState | None = None
    length_reason: str = ""
    """Why the last step had the length it had."""
    tokens_per_second_now: float | None = None
    finish_reason: FinishReason | None = None
    dropped_messages: int = 0
    """The oldest messages that the target was not given, for want of room; known once it is over."""
    rewritten_tokens: int = 0
    """Tokens of the conversation so far that had to be read anew, since the template renders them differently now."""
    is_abandoned: bool = False
    """It was ended because nobody was reading."""
    error: str = ""

    @property
    def is_over(self) -> bool:
        return self.state not in (JobState.WAITING, JobState.RUNNING)


class Run(Job):
    """One answer to the last question of a conversation."""

    doing = "answering a chat"

    def __init__(
        self,
        conversation_id: str,
        turn: int,
        settings: GenerationSettings,
        clock: Clock,
        grace_s: float = GRACE_S,
        begun: str = "",
        begun_tokens: Sequence[AnswerToken] = (),
    ) -> None:
        """Args:
        turn: Index of the question.
        begun: What there is of the answer already, when it is continued.
        begun_tokens: The same, token by token.
        """
        super().__init__()
        self.begun = begun
        self.conversation_id = conversation_id
        self.turn = turn
        self.settings = settings
        self._clock = clock
        self._grace_s = grace_s
        self._read_at = clock()
        self._text = [begun]
        self._thinking: list[str] = []
        self._tokens = list(begun_tokens)
        self._begun_tokens = len(self._tokens)
        self._traced: deque[StepDone] = deque(maxlen=TRACED_STEPS)
        self._prefill: PrefillProgress | None = None
        self._steps: list[StepReading] = []
        self._metrics: Metrics | None = None
        self._timings: Timings | None = None
        self._times = StepTimes()
        self._speculation: SpeculationState | None = None
        self._length_reason = ""
        self._emitted: deque[tuple[float, int]] = deque()
        self._finished: Finished | None = None
        self._is_abandoned = False

    def read(self) -> RunSnapshot:
        """The answer as it stands, for somebody who is there to read it."""
        with self._changed:
            self._read_at = self._clock()
            return self._snapshot()

    def peek(self) -> RunSnapshot:
        """The answer as it stands; does not count as reading."""
        with self._changed:
            return self._snapshot()

    @property
    def is_read(self) -> bool:
        """Whether somebody has read it within the grace time."""
        return self.unread_s <= self._grace_s

    @property
    def unread_s(self) -> float:
        """Seconds since it was last read."""
        with self._changed:
            return self._clock() - self._read_at

    def abandon(self) -> None:
        """Cancel it because nobody reads it."""
        with self._changed:
            self._is_abandoned = True
        self.cancel()

    def record(self, event: GenerationEvent) -> tuple[AnswerToken, ...]:
        """Take in one event of the engine; returns the tokens it brought."""
        batch: tuple[AnswerToken, ...] = ()
        with self._changed:
            if isinstance(event, PrefillProgress):
                self._prefill = event
            else:
                self._metrics = event.metrics
                self._timings = event.timings
                self._speculation = event.state
                if isinstance(event, Finished):
                    self._text = [self.begun, event.text]
                    self._thinking = [event.thinking]
                    del self._tokens[self._begun_tokens + len(event.token_ids) :]
                    self._finished = event
                else:
                    batch = tuple(map(_answer_token, event.tokens, event.token_texts, event.token_thoughts))
                    self._text.append(event.text)
                    self._thinking.append(event.thinking)
                    self._tokens += batch
                    self._traced.append(event)
                    weights = tuple(drafter.weight for drafter in event.metrics.drafters)
                    step = event.step
                    self._steps.append(StepReading(step.verified, step.accepted, weights, step.planned_length))
                    self._times += step.times
                    self._length_reason = step.reason
                    self._note_pace(step.emitted)
            self._touch()
        return batch

    @property
    def traced(self) -> tuple[StepDone, ...]:
        """The engine's own events of the last steps."""
        with self._changed:
            return tuple(self._traced)

    def _note_pace(self, emitted: int) -> None:
        now = self._clock()
        self._emitted.append((now, emitted))
        while now - self._emitted[0][0] > NOW_WINDOW_S:
            self._emitted.popleft()

    def _pace(self) -> float | None:
        """Tokens per second of late; the first step of the window only marks its beginning."""
        if self.is_over or len(self._emitted) < 2:
            return None
        elapsed_s = self._emitted[-1][0] - self._emitted[0][0]
        tokens = sum(count for _, count in self._emitted) - self._emitted[0][1]
        return tokens / elapsed_s if elapsed_s > 0 else None

    def _snapshot(self) -> RunSnapshot:
        return RunSnapshot(
            state=self._state,
            text="".join(self._text),
            thinking="".join(self._thinking),
            prefill=self._prefill,
            steps=tuple(self._steps),
            tokens=tuple(self._tokens),
            metrics=self._metrics,
            timings=self._timings,
            times=self._times,
            speculation=self._speculation,
            length_reason=self._length_reason,
            tokens_per_second_now=self._pace(),
            finish_reason=self._finished.reason if self._finished else None,
            dropped_messages=self._finished.dropped_messages if self._finished else 0,
            rewritten_tokens=self._finished.rewritten_tokens if self._finished else 0,
            is_abandoned=self._is_abandoned,
            error=self._error,
        )


def _answer_token(token: EmittedToken, text: str, thought: str) -> AnswerToken:
    return AnswerToken(token.id, thought + text, token.provenance, token.proposers, token.agreement, token.probability)
