"""What the parts of a real step take on this machine, for a replay to charge.

Measured in steps of the real pipeline, at the context length and in the company in which they happen: a pass in
isolation, on an empty cache and with idle drafters, is faster than the same pass in an answer.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from engine.config import GenerationSettings, LookAhead, Policy, PolicyKind, Sampling, Shape, Speculation
from engine.length import LONGEST_DRAFT
from engine.loader import LoadedSet
from engine.session import Session
from engine.types import GenerationEvent, StepDone, StepRecord

STEPS = 8
"""Timed for each drafter and length; the first step of an answer, in which drafters may have to read, is not."""
SLOPE_CONTEXT_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds. A step costs its pass, its drafting, the overhead, and the sampling of each token it emits."""

    pass_ms: Mapping[int, float]
    """Target pass by its tokens, attention to the context aside; sizes in between are interpolated."""
    draft_ms: Mapping[str, float]
    """Each further pass of a draft; drafters that share the cores take turns."""
    read_ms: Mapping[str, float]
    """Each draft model's time per token of text it reads in bulk."""
    draft_start_ms: Mapping[str, float] = field(default_factory=dict)
    """What a draft costs besides its passes: its thread wakes up, and its first pass has two tokens at times."""
    overhead_ms: float = 0.6
    sample_ms: float = 0.0
    slope_ms: float = 0.0
    """Attention, by token of the pass and token of the context."""

    def target_ms(self, tokens: int, context_tokens: int) -> float:
        """A target pass over `tokens` tokens behind so many others."""
        sizes = sorted(self.pass_ms)
        base_ms = float(np.interp(tokens, sizes, [self.pass_ms[size] for size in sizes]))
        return base_ms + self.slope_ms * tokens * context_tokens


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step, and its time by the clock on the wall, which is more than the sum of its parts."""

    record: StepRecord
    wall_ms: float

    @property
    def rest_ms(self) -> float:
        """What is neither a pass, nor drafting, nor sampling."""
        times = self.record.times
        return self.wall_ms - times.verify_ms - times.draft_ms - times.sample_ms


def measure_step_costs(
    loaded: LoadedSet,
    prompts: Sequence[Sequence[int]],
    progress: Callable[[str, float], None],
    cancel: threading.Event,
) -> StepCosts:
    """Time steps of every length with every draft model, and plain ones, on one prompt after another.

    Returns what was measured until then when cancelled.
    """
    cost = loaded.learning.cost
    slope_ms = (cost.verify_ms(1, SLOPE_CONTEXT_TOKENS) - cost.verify_ms(1, 0)) / SLOPE_CONTEXT_TOKENS
    by_size: dict[int, list[float]] = defaultdict(list)
    drafting: dict[str, dict[int, list[float]]] = {drafter.name: defaultdict(list) for drafter in loaded.panel.models}
    rest: list[float] = []
    sampling: list[float] = []
    names = list(drafting)
    takes = [(prompt, name) for prompt in prompts for name in names or [""]]
    for number, (prompt, name) in enumerate(takes):
        progress(f"Timing steps {name}".rstrip(), number / len(takes))
        for step in _steps(loaded.with_drafters([name] if name else []), prompt, bool(name), cancel):
            record = step.record
            size = record.verified + 1
            context_tokens = record.context_tokens - record.emitted
            by_size[size].append(record.times.verify_ms - slope_ms * size * context_tokens)
            rest.append(step.rest_ms)
            sampling.append(record.times.sample_ms / max(1, record.emitted))
            if record.verified:
                drafting[name][record.verified].append(record.times.draft_ms)
    fits = {name: _line(lengths) for name, lengths in drafting.items()}
    return StepCosts(
        pass_ms={size: median(times) for size, times in sorted(by_size.items())},
        draft_ms={name: slope for name, (_, slope) in fits.items()},
        read_ms={name: cost.read_ms(name) for name in names},
        draft_start_ms={name: start for name, (start, _) in fits.items()},
        overhead_ms=median(rest) if rest else 0.0,
        sample_ms=median(sampling) if sampling else 0.0,
        slope_ms=slope_ms,
    )


def _line(times: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Start and slope of drafting time over draft length."""
    lengths = sorted(times)
    if len(lengths) < 2:
        return 0.0, median(times[lengths[0]]) / lengths[0] if lengths else 0.0
    slope, start = np.polyfit(lengths, [median(times[length]) for length in lengths], 1)
    return max(0.0, float(start)), float(slope)


def _steps(loaded: LoadedSet, prompt: Sequence[int], drafts: bool, cancel: threading.Event) -> Iterator[TimedStep]:
    """Timed steps of every length, in one session, so that the prompt is read once."""
    session = Session(loaded)
    try:
        for length in range(LONGEST_DRAFT + 1 if drafts else 1):
            policy = Policy(PolicyKind.FIXED, length) if length else Policy(PolicyKind.OFF)
            speculation = Speculation(policy, look_ahead=LookAhead.OFF, shape=Shape.CHAIN)
            settings = GenerationSettings(Sampling(temperature=0), speculation, STEPS * (LONGEST_DRAFT + 2))
            steps = _wall_timed(session.generate(prompt, settings, cancel))
            for step in itertools.islice(steps, 2 if length else 1, STEPS + 2):
                if step.record.verified == length:
                    yield step
            steps.close()
    finally:
        session.close()


def _wall_timed(events: Iterator[GenerationEvent]) -> Generator[TimedStep, None, None]:
    started = time.perf_counter()
    for event in events:
        now = time.perf_counter()
        if isinstance(event, StepDone):
            yield TimedStep(event.step, (now - started) * 1e3)
        started = time.perf_counter()
