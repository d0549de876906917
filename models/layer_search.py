"""Which layers a target can spare: tried one after the other, and the copy that agrees most is kept.

Layers in the middle are tried first, since they are missed least in most models, so that a search that runs out of time
has tried the likely ones. Copies are tried in the format asked for: the target is brought into it once, and layers are
left out of that. The copy that is kept is measured on text that took no part in the choice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import LlamaFileType

from engine.errors import ModelFileError, SettingError
from models.agreement import Answer, agreement, pass_times_ms, write_text
from models.atomic import scratch_beside
from models.derive import (
    LAYERED_ARCHITECTURES,
    DerivedModel,
    all_derived,
    default_layers,
    derive,
    note_measurement,
    remove_derived,
    write_copy,
)
from models.folders import derived_folder
from models.gguf_file import GgufFacts, read_header
from models.progress import Progress, Report, no_report

DEFAULT_SECONDS = 120.0
_TEXT_SHARE = 0.25
"""Of the time, for the target to write."""
_TOKENS_EACH = 96
_CENTRE = 0.6
"""Where, as a share of the depth, a layer is missed least."""
_LONGEST_DRAFT = 16
_KEPT_ENDS = 2
"""First and last layers are never spared: they turn tokens into meaning and back."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Layers that were left out on trial, and how well the rest agreed."""

    dropped_layers: tuple[int, ...]
    agreement: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A copy in the format asked for."""

    dropped_layers: tuple[int, ...]
    agreement: float
    cost_ratio: float
    """Time of one pass, as a share of one of the target's."""
    size_bytes: int

    @property
    def best_speedup(self) -> float:
        """What drafting with this copy alone could reach if verifying a whole draft cost one pass; 1 is no gain."""
        return max(
            sum(self.agreement**position for position in range(length + 1)) / (length * self.cost_ratio + 1)
            for length in range(_LONGEST_DRAFT + 1)
        )


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The copy that was kept, beside the one that would have been made without a search."""

    made: DerivedModel
    before: Measured
    after: Measured
    compared_tokens: int
    target_agreement: float
    """The target's own, scored in batches instead of one by one: no copy can be expected to do better."""
    trials: tuple[Trial, ...]
    is_complete: bool
    """Every layer that may be spared was tried; otherwise time ran out."""


def search(
    target: Path,
    file_type: LlamaFileType | None,
    seconds: float = DEFAULT_SECONDS,
    report: Report = no_report,
    cancel: threading.Event | None = None,
    drop_count: int | None = None,
) -> SearchResult:
    """Derive the drafter that agrees most with `target` among those that lack `drop_count` layers.

    Layers are chosen one after the other: the one missed least, then the one missed least besides it. None leaves out
    as many as the copy that would be made without a search.

    Raises:
        SettingError, ModelFileError: layers of this target cannot be left out, or mean nothing.
        Cancelled: `cancel` was set; what had been derived before stays.
    """
    facts = read_header(target)
    _check(target, facts)
    if drop_count is not None and not 1 <= drop_count <= facts.layer_count - 2 * _KEPT_ENDS:
        raise SettingError(
            f"{target.name} can spare from 1 to {facts.layer_count - 2 * _KEPT_ENDS} layers, asked for {drop_count}"
        )
    deadline = time.monotonic() + seconds
    text = write_text(target, _TOKENS_EACH, _TEXT_SHARE * seconds, report, cancel)
    to_choose, to_report = text[::2], text[1::2]
    best: tuple[int, ...] = ()
    is_complete = True
    usual = default_layers(facts.layer_count)
    with _in_format(target, file_type, report, cancel) as whole:
        bench = _Bench(whole, to_choose, seconds, deadline, report, cancel)
        for count in range(1, (drop_count or len(usual)) + 1):
            is_complete = bench.try_each(best, _candidates(facts.layer_count)) and is_complete
            best = bench.best(count)
    known = all_derived()
    copies = [derive(target, layers, file_type, report, cancel) for layers in (usual, best)]
    report(Progress("measuring the copies", done_share=1.0))
    target_ms, *copies_ms = pass_times_ms([target, *(copy.path for copy in copies)])
    shares = [agreement(copy.path, to_report, cancel).share for copy in copies]
    own = agreement(target, to_report, cancel)
    before, after = (
        Measured(copy.dropped_layers, share, pass_ms / target_ms, copy.size_bytes)
        for copy, share, pass_ms in zip(copies, shares, copies_ms, strict=True)
    )
    if before.agreement > after.agreement and len(usual) == len(best):
        after, copies[1] = before, copies[0]
    made = note_measurement(copies[1], after.agreement, after.cost_ratio)
    for copy in copies:
        if copy.path != made.path and copy not in known:
            remove_derived(copy)
    return SearchResult(made, before, after, own.compared_tokens, own.share, tuple(bench.trials), is_complete)


class _Bench:
    """Tries copies while there is time."""

    def __init__(
        self,
        whole: Path,
        text: tuple[Answer, ...],
        seconds: float,
        deadline: float,
        report: Report,
        cancel: threading.Event | None,
    ) -> None:
        self.trials: list[Trial] = []
        self._whole = whole
        self._text = text
        self._seconds = seconds
        self._deadline = deadline
        self._report = report
        self._cancel = cancel
        self._longest_s = 0.0

    def try_each(self, dropped: tuple[int, ...], layers: Iterator[int]) -> bool:
        """Leave out one layer more than `dropped`, each in turn; False when time ran out before the end."""
        for layer in layers:
            if layer in dropped:
                continue
            now = time.monotonic()
            # One copy is always tried, so that there is something to choose.
            if now + self._longest_s > self._deadline and self.best(len(dropped) + 1):
                return False
            self._try(tuple(sorted((*dropped, layer))))
            self._longest_s = max(self._longest_s, time.monotonic() - now)
        return True

    def best(self, drop_count: int) -> tuple[int, ...]:
        """The layers of the best trial that left out so many; empty when there is none."""
        trials = [trial for trial in self.trials if len(trial.dropped_layers) == drop_count]
        return max(trials, key=lambda trial: trial.agreement).dropped_layers if trials else ()

    def _try(self, dropped: tuple[int, ...]) -> None:
        with _trial_copy(self._whole, dropped, self._cancel) as copy:
            share_agreed = agreement(copy, self._text, self._cancel).share
        self.trials.append(Trial(dropped, share_agreed))
        share = 1 - max(0.0, self._deadline - time.monotonic()) / max(self._seconds, 1e-9)
        named = ", ".join(map(str, dropped))
        best = max(trial.agreement for trial in self.trials)
        self._report(
            Progress(f"without layer {named}: {share_agreed:.0%} agreement, best {best:.0%}", done_share=share)
        )


@contextlib.contextmanager
def _in_format(
    target: Path, file_type: LlamaFileType | None, report: Report, cancel: threading.Event | None
) -> Iterator[Path]:
    """The target with all its layers in the format of the copies, for as long as the search lasts."""
    if file_type is None:
        yield target
        return
    with scratch_beside(derived_folder() / "whole.gguf") as path:
        write_copy(target, path, (), file_type, report, cancel)
        yield path


@contextlib.contextmanager
def _trial_copy(whole: Path, dropped: tuple[int, ...], cancel: threading.Event | None) -> Iterator[Path]:
    """A copy that vanishes when it has been tried."""
    with scratch_beside(derived_folder() / "trial.gguf") as path:
        write_copy(whole, path, dropped, None, no_report, cancel)
        yield path


def _candidates(layer_count: int) -> Iterator[int]:
    spared = range(_KEPT_ENDS, max(_KEPT_ENDS + 1, layer_count - _KEPT_ENDS))
    return iter(sorted(spared, key=lambda layer: abs(layer / layer_count - _CENTRE)))


def _check(target: Path, facts: GgufFacts) -> None:
    if facts.expansion:
        raise SettingError(
            f"{target.name} is an expansion: its extra layers do nothing, so that leaving them out agrees always and "
            "means nothing. Search with the model it was made from"
        )
    if facts.architecture not in LAYERED_ARCHITECTURES or facts.layer_count <= 2 * _KEPT_ENDS:
        raise ModelFileError(
            f"{target} ({facts.architecture}, {facts.layer_count} layers) has no layers that can be left out; "
            "fewer bits work for any model: `--bits q4_0`"
        )
