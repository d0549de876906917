"""Which installed files can draft for a target, and why the others cannot.

A drafter is compatible when its token ids mean what the target's mean: llama.cpp's own rules, checked on both
vocabularies, which are loaded without weights. It is worth choosing when it is smaller than the target and finds room
in memory beside it. A verdict is remembered with the size and time of change of both files, so that a changed file is
judged anew.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from engine.errors import IncompatibleDrafter, ModelFileError
from engine.loader import FREE_DRAFTERS
from engine.runtime.api import native
from engine.runtime.model import Model
from engine.runtime.vocabulary import MAX_SIZE_DIFFERENCE, check_compatible
from models.atomic import write_json
from models.budget import RESERVE_BYTES, estimate
from models.catalogue import drafters_for
from models.derive import all_derived, list_derived
from models.folders import cache_folder
from models.gguf_file import GgufFacts, read_header
from models.library import InstalledModel, list_models

MOST_MODEL_DRAFTERS = 3
DEFAULT_CONTEXT_TOKENS = 4096

_REMEMBERED_VERDICTS = 1000


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a file can draft for a target."""

    name: str
    path: Path
    is_compatible: bool
    reason: str = ""
    """Why it cannot: the rule that failed and, where one is to blame, the token and both texts."""
    caution: str = ""
    """Why it is compatible and still no good choice."""
    suggestion: str = ""
    """What to use instead, where there is a reason or a caution."""
    measured: str = ""
    """How a derived copy did against its target, where that was measured."""

    @property
    def is_worth_choosing(self) -> bool:
        return self.is_compatible and not self.caution


def choose_drafters(
    target: Path, context_tokens: int = DEFAULT_CONTEXT_TOKENS, free_bytes: int | None = None
) -> tuple[str, ...]:
    """The drafters to use when the user names none, as `SetConfig` takes them.

    `ngram` and `suffix`, and up to three installed models that fit the target and, together with it, `free_bytes` of
    memory (None: what is available now): first derived copies whose agreement and cost were measured, by cost for each
    token they would foresee, then the cheapest. A context of 0 tokens is all that the target was trained for.
    Expansions and copies of them are left out: they agree with each other by construction, which says nothing about
    drafting.
    """
    facts = read_header(target)
    context_tokens = context_tokens or facts.context_tokens
    left_bytes = psutil.virtual_memory().available if free_bytes is None else free_bytes
    left_bytes -= estimate(target, context_tokens, is_target=True).lasting + RESERVE_BYTES
    chosen: list[str] = []
    seen: set[tuple[str, int]] = set()
    with _Judge(target, facts) as judge:
        for model in _most_gainful_first(_cheapest_first(list_models())):
            assert model.facts is not None
            likeness = (model.facts.name, model.facts.size_bytes)
            if (
                len(chosen) == MOST_MODEL_DRAFTERS
                or likeness in seen
                or judge.caution_about(model.path, model.facts)
                or judge.reason_against(model.path, model.facts)
            ):
                continue
            needed_bytes = estimate(model.path, context_tokens, is_target=False).lasting
            if needed_bytes <= left_bytes:
                seen.add(likeness)
                chosen.append(str(model.path))
                left_bytes -= needed_bytes
    return (*FREE_DRAFTERS, *chosen)


def explain(target: Path, candidate: Path) -> Verdict:
    """Whether one file can draft for the target, and if not, why not and what can."""
    with _Judge(target, read_header(target)) as judge:
        verdict = _verdict(judge, candidate.stem, candidate)
    return verdict if verdict.is_worth_choosing else replace(verdict, suggestion=suggest(target))


def pairings(target: Path) -> tuple[Verdict, ...]:
    """A verdict on every installed model, those worth choosing first and the cheapest first among them."""
    installed = list_models()
    broken = [Verdict(model.name, model.path, False, model.fault) for model in installed if model.fault]
    with _Judge(target, read_header(target)) as judge:
        verdicts = [_verdict(judge, model.name, model.path, model.facts) for model in _cheapest_first(installed)]
    good = [verdict for verdict in verdicts if verdict.is_worth_choosing]
    suggestion = _suggestion(target, [verdict.name for verdict in good])
    others = [replace(verdict, suggestion=suggestion) for verdict in (*verdicts, *broken) if verdict not in good]
    measured = {copy.path: copy.measured for copy in list_derived(target)}
    ordered = (*good, *sorted(others, key=lambda verdict: not verdict.is_compatible))
    return tuple(replace(verdict, measured=measured.get(verdict.path, "")) for verdict in ordered)


def suggest(target: Path) -> str:
    """One sentence that names a drafter for the target: an installed one, or how to get one."""
    with _Judge(target, read_header(target)) as judge:
        for model in _cheapest_first(list_models()):
            assert model.facts is not None
            if not judge.caution_about(model.path, model.facts) and not judge.reason_against(model.path, model.facts):
                return _suggestion(target, [model.name])
    return _suggestion(target, [])


def _suggestion(target: Path, names: list[str]) -> str:
    if names:
        return f"{' or '.join(names[:2])} can draft for this target"
    deriving = f"`python launch.py models derive {target.name}` makes a drafter from the target itself"
    offers = drafters_for(read_header(target))
    if offers:
        return f"`python launch.py models fetch {offers[-1].reference}` gets one of its family, or {deriving}"
    return f"{deriving}; ngram and suffix fit every target"


def _verdict(judge: _Judge, name: str, candidate: Path, facts: GgufFacts | None = None) -> Verdict:
    try:
        facts = facts or read_header(candidate)
        reason = judge.reason_against(candidate, facts)
    except ModelFileError as error:
        return Verdict(name, candidate, False, str(error))
    return Verdict(name, candidate, not reason, reason, "" if reason else judge.caution_about(candidate, facts))


def _cheapest_first(models: Iterable[InstalledModel]) -> list[InstalledModel]:
    """Usable ones by size: what a pass reads is what it costs."""
    sizes = [(model.facts.size_bytes, model) for model in models if model.facts and not model.fault]
    return [model for _, model in sorted(sizes, key=lambda entry: entry[0])]


def order_reason(chosen: Sequence[str]) -> str:
    """Why `choose_drafters` gave its model drafters in this order, in one sentence; empty where it gave none."""
    paths = [Path(name) for name in chosen if name not in FREE_DRAFTERS]
    if not paths:
        return ""
    costs = _measured_costs()
    measured = [f"{path.stem} {costs[path]:.2f}" for path in paths if path in costs]
    others = [path.stem for path in paths if path not in costs]
    by_size = f"{' then '.join(others)} by size, smallest first"
    if not measured:
        return by_size
    by_cost = f"measured copies first, by the target's passes each foreseen token costs ({', '.join(measured)})"
    return f"{by_cost}; then {by_size}" if others else by_cost


def _measured_costs() -> dict[Path, float]:
    """For each measured copy, what a token that it foresees costs, in passes of the target."""
    return {
        copy.path: copy.cost_ratio / copy.agreement
        for copy in all_derived()
        if copy.agreement and copy.cost_ratio is not None
    }


def _most_gainful_first(models: list[InstalledModel]) -> list[InstalledModel]:
    """Measured copies first, by cost for each foreseen token; the rest as they stand."""
    costs = _measured_costs()
    return sorted(models, key=lambda model: costs.get(model.path, math.inf))


class _Judge(contextlib.AbstractContextManager["_Judge"]):
    """Judges candidates for one target; loads the target's vocabulary at most once, and only if it must."""

    def __init__(self, target: Path, facts: GgufFacts) -> None:
        self._target = target
        self._facts = facts
        self._resources = contextlib.ExitStack()
        self._loaded: Model | None = None
        self._known = _remembered()
        self._new: dict[str, str] = {}

    def __exit__(self, *_: object) -> None:
        self._resources.close()
        if self._new:
            kept = list((_remembered() | self._new).items())[-_REMEMBERED_VERDICTS:]
            write_json(_index(), dict(kept))

    def reason_against(self, candidate: Path, facts: GgufFacts) -> str:
        """Why the candidate cannot draft for the target; empty when it can."""
        if facts.kind != "model":
            return f"{candidate.name} holds no language model but {facts.kind!r}"
        if not facts.is_complete:
            return f"{candidate.name} is the first of {facts.split_count} parts, and some of the others are missing"
        if facts.vocabulary_size and self._facts.vocabulary_size:
            difference = abs(facts.vocabulary_size - self._facts.vocabulary_size)
            if difference > MAX_SIZE_DIFFERENCE:
                return (
                    f"{candidate.name} cannot draft for this target: vocabulary sizes differ by more than "
                    f"{MAX_SIZE_DIFFERENCE} (target {self._facts.vocabulary_size}, drafter {facts.vocabulary_size})"
                )
        key = f"{native().version} | {_state(self._target)} | {_state(candidate)}"
        if key not in self._known:
            self._known[key] = self._new[key] = self._compare(candidate)
        return self._known[key]

    def caution_about(self, candidate: Path, facts: GgufFacts) -> str:
        """Why a compatible candidate is not worth choosing; empty when it is."""
        if candidate.resolve() == self._target.resolve():
            return f"{candidate.name} is the target itself; drafting with it cannot be faster"
        if facts.size_bytes >= self._facts.size_bytes:
            return (
                f"{candidate.name} ({facts.size_bytes / 1e6:,.0f} MB) is no smaller than the target "
                f"({self._facts.size_bytes / 1e6:,.0f} MB), so a pass of it costs as much as it could save"
            )
        if facts.expansion:
            return f"{candidate.name} is made from an expansion: what it agrees with is true by construction"
        return ""

    def _compare(self, candidate: Path) -> str:
        try:
            if self._loaded is None:
                self._loaded = self._resources.enter_context(_vocabulary_of(self._target))
            with _vocabulary_of(candidate) as drafter:
                check_compatible(self._loaded.vocabulary, drafter.vocabulary, candidate.stem)
        except (IncompatibleDrafter, ModelFileError) as error:
            return str(error)
        return ""


@contextlib.contextmanager
def _vocabulary_of(path: Path) -> Iterator[Model]:
    with contextlib.closing(Model(path, vocabulary_only=True)) as model:
        yield model


def _state(path: Path) -> str:
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def _index() -> Path:
    return cache_folder() / "pairs.json"


def _remembered() -> dict[str, str]:
    """Empty where the index is missing or unreadable: it only saves time."""
    try:
        known = json.loads(_index().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in known.items() if isinstance(value, str)} if isinstance(known, Mapping) else {}
