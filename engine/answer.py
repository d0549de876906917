"""One growing answer: its text, limits, times and events, however its tokens are computed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from engine.config import GenerationSettings, PolicyKind
from engine.drafting import Panel
from engine.loader import LoadedSet
from engine.metrics import Ledger, Pace
from engine.pipeline import StepResult
from engine.runtime.sampler import Sampler
from engine.text import TextStream
from engine.types import Finished, FinishReason, Metrics, SpeculationState, StepDone, Timings


class Stepper(Protocol):
    """What runs the steps of an answer."""

    @property
    def pace(self) -> Pace:
        """Tokens per millisecond of the last steps."""

    @property
    def active(self) -> frozenset[str]:
        """Drafters that took part in the last step."""


class Answer:
    """What is told of an answer, step by step."""

    def __init__(
        self,
        loaded: LoadedSet,
        settings: GenerationSettings,
        prompt_tokens: int,
        ledger: Ledger,
        sampler: Sampler,
        starts_thinking: bool | None,
        started: float,
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._set = loaded
        self._settings = settings
        self._ledger = ledger
        self._sampler = sampler
        self._started = started
        self._prefilled = time.perf_counter()
        self._first_token_ms = 0.0
        self._decode_ms = 0.0
        self._text = TextStream(
            loaded.model.vocabulary.piece,
            settings.stop_strings,
            starts_thinking=starts_thinking,
            stops_in_thinking=settings.stops_in_thinking,
        )
        self._ids: list[int] = []
        self._stepper: Stepper | None = None
        self._panel = loaded.panel

    def attach(self, stepper: Stepper, panel: Panel) -> None:
        """Tell who runs the steps, and with which drafters."""
        self._stepper = stepper
        self._panel = panel

    @property
    def said(self) -> str:
        return self._text.said

    @property
    def is_stopped(self) -> bool:
        return self._text.is_stopped

    @property
    def token_count(self) -> int:
        """Tokens taken so far, the one included whose text completed a stop string."""
        return len(self._ids)

    @property
    def remaining_tokens(self) -> int | None:
        limit = self._settings.max_tokens
        return None if limit is None else limit - len(self._ids)

    def limit_reached(self, committed_tokens: int, context_tokens: int) -> FinishReason | None:
        if self.remaining_tokens == 0:
            return FinishReason.LENGTH
        # The pending token needs a cell of its own.
        return FinishReason.CONTEXT if committed_tokens > context_tokens - 1 else None

    def take(self, result: StepResult) -> StepDone:
        now = time.perf_counter()
        if not self._first_token_ms:
            self._first_token_ms = (now - self._started) * 1e3
        self._decode_ms = (now - self._prefilled) * 1e3
        tokens = result.tokens
        if self._settings.top_log_probabilities is not None:
            found = self._sampler.take_log_probabilities()  # an end token's own comes last and is left over
            tokens = tuple(replace(token, log_probabilities=one) for token, one in zip(tokens, found, strict=False))
        texts: list[str] = []
        thoughts: list[str] = []
        for token in tokens:
            self._ids.append(token.id)
            before = len(self._text.thinking)
            texts.append(self._text.push(token.id))
            thoughts.append(self._text.thinking[before:])
            if self._text.is_stopped:
                break
        return StepDone(
            tokens,
            "".join(texts),
            result.record,
            self._metrics(),
            self._timings(),
            self._state(),
            "".join(thoughts),
            tuple(texts),
            tuple(thoughts),
        )

    def finish(self, reason: FinishReason) -> Finished:
        self._text.finish()
        return Finished(
            reason,
            self._text.text,
            tuple(self._ids[: self._text.token_count]),
            self._sampler.seed,
            self._metrics(),
            self._timings(),
            self._state(),
            self._text.thinking,
        )

    def _timings(self) -> Timings:
        return Timings(
            prefill_ms=(self._prefilled - self._started) * 1e3,
            decode_ms=self._decode_ms,
            time_to_first_token_ms=self._first_token_ms,
            tokens_per_second=len(self._ids) / self._decode_ms * 1e3 if self._decode_ms else 0.0,
        )

    def _metrics(self) -> Metrics:
        learning = self._set.learning
        names = self._panel.names
        weights = learning.weights(self._settings.speculation.weights).current
        return self._ledger.metrics(
            weights={name: weights.get(name, 0.0) for name in names},
            draft_ms={drafter.name: learning.cost.draft_ms((drafter.name,)) for drafter in self._panel.models},
            active=self._stepper.active if self._stepper else frozenset(),
            notes=self._panel.failures,
        )

    def _state(self) -> SpeculationState:
        speedup = self._speedup()
        share = self._stepper.pace.uncertainty if self._stepper else None
        uncertainty = None if speedup is None or share is None else speedup * share
        return self._ledger.state(self._why_off(), speedup, uncertainty)

    def _why_off(self) -> str:
        if self._settings.speculation.policy.kind is PolicyKind.OFF:
            return "the policy is plain decoding"
        if not self._set.model.can_roll_back:
            return "this model cannot take back rejected tokens"
        if self._set.setting.pass_sizes == ():
            return "no batch size is exact here"
        if not self._panel.names:
            return "no drafter is loaded"
        return ""

    def _speedup(self) -> float | None:
        pace = self._stepper.pace.tokens_per_ms if self._stepper else None
        if pace is None:
            return None
        cost = self._set.learning.cost
        return pace * (cost.verify_ms(1, self._prompt_tokens + len(self._ids)) + cost.overhead_ms)
