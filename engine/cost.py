"""What things cost on this machine: target passes by size, drafting, reading. Nothing else keeps times.

A target pass of n tokens over a context of L takes `load · base(n) + slope · n · L`: weights and overhead, then
attention. `base` is measured at a few sizes when a model is first loaded, kept on disk, and refined by every real pass;
it is neither linear nor monotone in n, so sizes in between are interpolated only until they have been seen. `load` is
what all sizes have in common: without it a size measured on a busy machine, and therefore never used, would stay dear.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.runtime.context import Context, Run
from engine.runtime.model import LoadCancelled
from engine.stored import StoredEntries

CALIBRATED_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
CALIBRATION_ROUNDS = 2
CALIBRATION_BUDGET_S = 8.0
READING_ROUNDS = 2
DOUBT_ROUNDS = 3
DOUBT_FACTOR = 1.6
"""Kernels make 3 tokens cost up to 1.4 times what 4 do; more than this is noise and is measured again."""
AS_FAST_FACTOR = 1.05
"""Times closer than this are not told apart."""
DRAFT_START_PASSES = 0.3
"""A draft takes about so much of a pass more than its passes: its threads wake."""
MOST_DRAFT_FACTOR = 1.5
"""A draft slower than foretold by more counts as that much: a drafter that has rested reads before it drafts."""
LEARNING_RATE = 0.08
LOAD_RATE = 0.05
MOST_LOAD = 8.0
OUTLIER_FACTOR = 2.5
"""A pass this many times slower than foretold met something else on the machine and counts as that much at most."""

SLOPE_FROM_TOKENS = 256
"""Below, attention is lost in the noise of the weights' time."""
SLOPE_RATE = 0.02
STEEPEST_DOUBLING_TOKENS = 500
"""No model measured doubles its one-token time within fewer tokens of context."""

CalibrationProgress = Callable[[int, int], None]
"""Called with measurements done and in all."""


@dataclass(slots=True)
class Mean:
    """A running mean that forgets: the first observations count fully, later ones at the learning rate."""

    value: float
    count: int = 0

    def learn(self, observed: float) -> None:
        self.count += 1
        self.value += (observed - self.value) * max(LEARNING_RATE, 1 / (self.count + 1))


@dataclass(slots=True)
class CostModel:
    """Measured costs in milliseconds. Sizes are tokens in one pass of one target."""

    _base: dict[tuple[int, int], Mean] = field(default_factory=dict)
    """By (sequences, tokens)."""
    _load: float = 1.0
    """How much slower passes of all sizes are now than those that `_base` remembers: what else the machine does."""
    _slope: float = 0.0
    _draft: dict[str, Mean] = field(default_factory=dict)
    """Per drafted token, by drafter set (names joined)."""
    _read: dict[str, Mean] = field(default_factory=dict)
    """Per token that a drafter reads in bulk."""
    _draft_threads: dict[str, int] = field(default_factory=dict)
    """With how many threads a drafter that drafts alone is fastest."""
    _overhead: Mean = field(default_factory=lambda: Mean(0.3))
    clock: Callable[[], float] = time.perf_counter
    """Seconds; everything that is timed is timed by it, so that a replay can bring its own."""

    def verify_ms(self, tokens: int, context_tokens: int, sequences: int = 1) -> float:
        """Expected time of a target pass over `tokens` tokens; never more than that many passes of one token."""
        return self._load * self._base_ms(sequences, tokens) + self._slope * tokens * context_tokens

    def _base_ms(self, sequences: int, tokens: int) -> float:
        return min(self._nearest_base_ms(sequences, tokens), tokens * self._nearest_base_ms(sequences, 1))

    def _nearest_base_ms(self, sequences: int, tokens: int) -> float:
        known = self._base.get((sequences, tokens))
        if known is not None:
            return known.value
        if sequences > 1:
            return self._nearest_base_ms(1, tokens) * self._share_of_many(sequences, tokens)
        sizes = sorted(size for count, size in self._base if count == 1)
        if not sizes:
            return 10.0 + tokens
        lower = max((size for size in sizes if size <= tokens), default=sizes[0])
        upper = min((size for size in sizes if size >= tokens), default=None)
        low_ms = self._base[1, lower].value
        if upper is None:
            # Beyond the largest known size the cost per token stays what it was there.
            return low_ms * tokens / lower
        if upper == lower:
            return low_ms
        share = (tokens - lower) / (upper - lower)
        return low_ms + share * (self._base[1, upper].value - low_ms)

    def _share_of_many(self, sequences: int, tokens: int) -> float:
        """How much dearer a pass is for several sequences than for one, by the nearest size that was seen of both."""
        sizes = [size for count, size in self._base if count == sequences]
        if not sizes:
            return 1.0
        nearest = min(sizes, key=lambda size: abs(size - tokens))
        return self._base[sequences, nearest].value / self._nearest_base_ms(1, nearest)

    def observe_verify(self, tokens: int, context_tokens: int, elapsed_ms: float, sequences: int = 1) -> None:
        """Learn from a real target pass that ran alone.

        A part of what is new is put down to the machine, and so holds for sizes that were not seen for long too.
        """
        expected_ms = self.verify_ms(tokens, context_tokens, sequences)
        observed_ms = min(elapsed_ms, OUTLIER_FACTOR * expected_ms)
        load = self._load * (observed_ms / expected_ms) ** LOAD_RATE if expected_ms and observed_ms else self._load
        self._load = min(max(load, 1 / MOST_LOAD), MOST_LOAD)
        error = observed_ms - self.verify_ms(tokens, context_tokens, sequences)
        base_ms = self._base_ms(sequences, tokens)
        # However steep attention is believed to be, the weights' own time stays above zero.
        seen_ms = max(base_ms + error / self._load, base_ms / OUTLIER_FACTOR)
        self._base.setdefault((sequences, tokens), Mean(base_ms)).learn(seen_ms)
        if context_tokens >= SLOPE_FROM_TOKENS:
            self._slope += SLOPE_RATE * error / (tokens * context_tokens)
            steepest = self._load * self._base_ms(1, 1) / STEEPEST_DOUBLING_TOKENS
            self._slope = min(max(self._slope, 0.0), steepest)

    def passes_seen(self, tokens: int) -> int:
        """How many real passes of this size its time rests on."""
        known = self._base.get((1, tokens))
        return known.count if known is not None else 0

    def set_base(self, tokens: int, elapsed_ms: float) -> None:
        """Take a calibrated time for a pass of `tokens` tokens in one sequence."""
        self._base[1, tokens] = Mean(elapsed_ms, CALIBRATION_ROUNDS)

    def draft_ms(self, names: Iterable[str]) -> float:
        """Expected time per drafted token when these model drafters draft at once; zero for none."""
        names = sorted(names)
        if not names:
            return 0.0
        known = self._draft.get("+".join(names))
        if known is not None:
            return known.value
        # Drafters that share the cores take turns, until measured otherwise.
        return sum(self._draft[name].value if name in self._draft else self.verify_ms(1, 0) / 4 for name in names)

    def drafting_curve(self, names: Iterable[str], up_to: int) -> tuple[float, ...]:
        """Expected times of drafts of 0, 1, 2, … `up_to` passes; zero for none."""
        pass_ms = self.draft_ms(names)
        return (0.0, *((passes + DRAFT_START_PASSES) * pass_ms for passes in range(1, up_to + 1)))

    def observe_draft(self, names: Iterable[str], passes: int, elapsed_ms: float, extra_tokens: int = 0) -> None:
        """Learn what a pass takes from a draft.

        Args:
            passes: Of the drafter that took most.
            extra_tokens: Read besides one in each pass, by the drafter that read most.
        """
        names = sorted(names)
        if passes and names:
            reading_ms = extra_tokens * max(map(self.read_ms, names)) if extra_tokens else 0.0
            pass_ms = max(elapsed_ms - reading_ms, elapsed_ms / 4) / (passes + DRAFT_START_PASSES)
            mean = self._draft.setdefault("+".join(names), Mean(pass_ms))
            mean.learn(min(pass_ms, MOST_DRAFT_FACTOR * mean.value))

    def read_ms(self, name: str) -> float:
        """Expected time per token for a drafter to read text it has fallen behind by."""
        known = self._read.get(name)
        return known.value if known is not None else self.draft_ms((name,)) / 4

    def observe_read(self, name: str, tokens: int, elapsed_ms: float) -> None:
        if tokens:
            self._read.setdefault(name, Mean(elapsed_ms / tokens)).learn(elapsed_ms / tokens)

    def draft_threads(self, name: str) -> int | None:
        """With how many threads this drafter was fastest when it drafted alone; None where that is not known."""
        return self._draft_threads.get(name)

    def set_drafter(self, name: str, elapsed_ms: Mapping[int, float]) -> None:
        """Take measured times per drafted token, by threads.

        Fewer threads are preferred where they are as fast: they leave more to others and wait less for each other.
        """
        fastest_ms = min(elapsed_ms.values())
        threads = min(count for count, own_ms in elapsed_ms.items() if own_ms <= AS_FAST_FACTOR * fastest_ms)
        self._draft_threads[name] = threads
        self._draft[name] = Mean(elapsed_ms[threads], CALIBRATION_ROUNDS)

    def knows_drafter(self, name: str) -> bool:
        """Whether this drafter has been timed on this machine."""
        return name in self._draft_threads and name in self._read

    @property
    def overhead_ms(self) -> float:
        """Time per step that is neither drafting nor the target pass."""
        return self._overhead.value

    def observe_overhead(self, elapsed_ms: float) -> None:
        self._overhead.learn(min(elapsed_ms, 5.0))

    def curve(self, context_tokens: int, up_to: int) -> tuple[float, ...]:
        """Expected times for passes of 1, 2, … `up_to` tokens."""
        return tuple(self.verify_ms(tokens, context_tokens) for tokens in range(1, up_to + 1))

    @property
    def is_calibrated(self) -> bool:
        return all((1, size) in self._base for size in CALIBRATED_SIZES)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `from_dict`."""
        return {
            "base": [
                [sequences, tokens, self._load * mean.value] for (sequences, tokens), mean in sorted(self._base.items())
            ],
            "slope": self._slope,
            "draft": {name: mean.value for name, mean in self._draft.items()},
            "read": {name: mean.value for name, mean in self._read.items()},
            "draft_threads": self._draft_threads,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Restore a stored curve; it is believed like a calibration and refined further.

        Raises:
            KeyError, OverflowError, TypeError, ValueError: it is damaged.
        """
        model = cls()
        for sequences, tokens, value in data["base"]:
            model._base[int(sequences), int(tokens)] = _stored_mean(value)
        model._draft_threads = {str(name): max(1, int(count)) for name, count in dict(data["draft_threads"]).items()}
        model._slope = float(data["slope"])
        model._draft = {str(name): _stored_mean(value) for name, value in dict(data["draft"]).items()}
        model._read = {str(name): _stored_mean(value) for name, value in dict(data["read"]).items()}
        if not 0 <= model._slope < math.inf:
            raise ValueError(f"a slope of {model._slope} cannot be")
        return model


def _stored_mean(value: Any) -> Mean:
    mean = Mean(float(value), CALIBRATION_ROUNDS)
    if not 0 <= mean.value < math.inf:
        raise ValueError(f"a time of {mean.value} ms cannot be")
    return mean


def calibrate(
    cost: CostModel,
    context: Context,
    progress: CalibrationProgress | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Time target passes of the calibrated sizes on an empty sequence; seconds at most.

    The fastest of the rounds counts: whatever else ran on the machine can only have slowed a pass down. On a machine so
    busy that one round takes the whole budget, one round it is; real passes refine it.

    Raises:
        LoadCancelled: `cancel` was set; nothing was learnt.
    """
    token = max(context.model.vocabulary.bos, 1)
    sequence = context.allocate()
    fastest: dict[int, float] = {}
    done = 0

    def measure(size: int) -> None:
        if cancel is not None and cancel.is_set():
            raise LoadCancelled("the measurement of this machine was cancelled")
        context.truncate(sequence, 0)
        started = cost.clock()
        context.decode([Run(sequence, [token] * size, size)])
        elapsed_ms = (cost.clock() - started) * 1e3
        fastest[size] = min(fastest.get(size, elapsed_ms), elapsed_ms)

    def is_time_left() -> bool:
        return cost.clock() - began < CALIBRATION_BUDGET_S

    began = cost.clock()
    try:
        context.decode([Run(sequence, [token] * 4, 1)])
        for number in range(CALIBRATION_ROUNDS):
            for size in CALIBRATED_SIZES if number == 0 or is_time_left() else ():
                measure(size)
                done += 1
                if progress is not None:
                    progress(done, CALIBRATION_ROUNDS * len(CALIBRATED_SIZES))
        for _ in range(DOUBT_ROUNDS):
            for size in _doubtful(fastest) if is_time_left() else ():
                measure(size)
    finally:
        context.free(sequence)
    for size, elapsed_ms in fastest.items():
        cost.set_base(size, elapsed_ms)


def _doubtful(fastest: Mapping[int, float]) -> list[int]:
    """Sizes whose time cannot be the machine's own: slower than single passes, or than much larger ones."""
    return [
        size
        for size, elapsed_ms in fastest.items()
        if elapsed_ms > size * fastest[1]
        or any(elapsed_ms > DOUBT_FACTOR * other_ms for other, other_ms in fastest.items() if other > size)
    ]


def reading_ms(cost: CostModel, context: Context) -> float:
    """What a token of a prompt takes in passes as large as they get: the faster of two, on an empty sequence."""
    run_tokens = [max(context.model.vocabulary.bos, 1)] * context.settings.batch_tokens
    sequence = context.allocate()
    context.hold_alone(sequence)
    times_ms = []
    try:
        for _ in range(READING_ROUNDS):
            started = cost.clock()
            context.decode([Run(sequence, run_tokens, 0)])
            times_ms.append((cost.clock() - started) * 1e3)
            context.truncate(sequence, 0)
    finally:
        context.free(sequence)
    return min(times_ms) / len(run_tokens)


class CostStore:
    """Cost models on disk: one entry for each model, device, thread count and llama.cpp version."""

    VERSION = 4

    def __init__(self, path: Path | None) -> None:
        self._entries = StoredEntries(path, self.VERSION)

    def load(self, key: str) -> CostModel | None:
        """The stored model, or None where there is none that can be read."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        try:
            return CostModel.from_dict(entry)
        except (KeyError, OverflowError, TypeError, ValueError):
            return None

    def save(self, key: str, cost: CostModel) -> None:
        """Keep the model for the next start."""
        self._entries.put(key, cost.to_dict())
