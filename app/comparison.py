"""Drafter sets and policies against each other and against plain decoding, as a job of the service's worker.

The measuring is the benchmark's own: interleaved, every answer compared with plain's. Finished comparisons are kept,
with the machine and the files they were made with.
"""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.bench.benchmark import Benchmark, Plan, fingerprint
from app.bench.configuration import Configuration
from app.bench.journal import Journal
from app.bench.machine import machine_document, models_document
from app.bench.prompts import Prompt
from app.bench.row import Row, compare, hash_text, row_document, row_from
from app.bench.summary import ConfigSummary, Figures, Summary, summarise
from app.jobs import JobState, ReportingJob
from engine.config import Policy, Sampling, SetConfig, Speculation
from engine.errors import SettingError
from engine.loader import FREE_DRAFTERS
from engine.runtime.api import native
from models.atomic import write_json
from models.folders import data_folder
from models.progress import Progress

SEED = 1
MOST_KEPT = 60


@dataclass(frozen=True, slots=True)
class ComparisonRequest:
    """What is to be compared, on the target that is loaded."""

    drafter_sets: tuple[tuple[str, ...], ...]
    """Each as named in a set's configuration: `ngram`, `suffix`, or a path."""
    policies: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    rounds: int
    max_tokens: int

    def plan(self, config: SetConfig) -> Plan:
        """The benchmark's plan.

        Raises:
            SettingError: nothing is to be compared, or a policy is unknown.
        """
        if not self.drafter_sets or not self.policies:
            raise SettingError("choose at least one drafter set and one policy; plain decoding always runs")
        if not self.prompts:
            raise SettingError("choose at least one prompt: a category, a text of your own, or this conversation")
        configurations = tuple(
            Configuration(Speculation(Policy.parse(policy)), config.exactness, tuple(map(drafter_name, drafters)))
            for drafters in self.drafter_sets
            for policy in self.policies
        )
        specs = {drafter_name(spec): spec for drafters in self.drafter_sets for spec in drafters}
        return Plan(
            set_config=dataclasses.replace(config, drafters=()),
            configurations=configurations,
            drafter_specs=specs,
            prompts=self.prompts,
            rounds=self.rounds,
            sampling=Sampling(temperature=0, seed=SEED),
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class ComparisonSnapshot:
    """How far a comparison has come."""

    state: JobState
    phase: str
    share: float
    error: str
    seconds_left: float | None
    """None until the first answers show how long one takes."""


class Comparison(ReportingJob):
    """One comparison; its result is kept when it is over, also when it was stopped after some answers."""

    doing = "comparing drafter sets"

    def __init__(self, request: ComparisonRequest) -> None:
        super().__init__()
        self.request = request
        self._seconds_left: float | None = None

    def peek_comparison(self) -> ComparisonSnapshot:
        with self._changed:
            return ComparisonSnapshot(self._state, self._phase, self._share, self._error, self._seconds_left)

    def run(self, config: SetConfig) -> None:
        """Measure on the files that `config` names; called by the worker, with nothing loaded.

        Raises:
            QuorumError: something the user can mend; answers that were finished are kept.
            LoadCancelled: it was stopped while loading.
        """
        plan = self.request.plan(config)

        def hashing(progress: Progress) -> None:
            self.report("Looking at the files", progress.share or 0.0)

        models = models_document(plan.set_config.target, plan.drafters, hashing)
        settings = fingerprint(plan, models, hash_text(repr(plan.prompts)), native().version)
        journal = Journal.start(None, settings)
        started = time.monotonic()

        def heard(row: Row) -> None:
            done = len(journal.rows)
            left = (time.monotonic() - started) / done * (plan.answers - done)
            with self._changed:
                self._seconds_left = left
            self.report(f"Answer {done} of {plan.answers}: {row.config}, {row.category}", done / plan.answers)

        benchmark = Benchmark(plan, journal, self.report, heard, self.cancelled)
        complete = False
        try:
            complete = benchmark.run()
        finally:
            if journal.rows:
                keep(plan, models, settings, journal.rows, complete=complete)


def drafter_name(spec: str) -> str:
    """How a configuration calls a drafter."""
    return spec if spec in FREE_DRAFTERS else Path(spec).stem


def keep(
    plan: Plan, models: Mapping[str, Any], settings: Mapping[str, Any], rows: Sequence[Row], *, complete: bool
) -> None:
    """Write a result beside the earlier ones. The oldest go when there are many."""
    result_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    document = {
        "complete": complete,
        "made_at": time.time(),
        "machine": machine_document(plan.set_config),
        "models": models,
        "settings": settings,
        "rounds": plan.rounds,
        "prompts": {prompt.id: prompt.messages[-1].content for prompt in plan.prompts},
        "specs": {own.name: list(plan.specs(own)) for own in plan.configurations},
        "policies": {own.name: str(own.speculation.policy) for own in plan.configurations},
        "target": str(plan.set_config.target),
        "rows": [row_document(row) for row in compare(rows)],
    }
    write_json(_folder() / f"{result_id}.json", document)
    for old in sorted(_folder().glob("*.json"), reverse=True)[MOST_KEPT:]:
        old.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Result:
    """A comparison that was kept."""

    id: str
    document: Mapping[str, Any]
    rows: tuple[Row, ...]
    summary: Summary

    @property
    def name(self) -> str:
        """When it was made, and on what; short, as it stands in a box."""
        made_at = time.localtime(self.document["made_at"])
        year = "" if made_at.tm_year == time.localtime().tm_year else " %Y"
        configurations = len(self.summary.configs) - 1
        return (
            f"{time.strftime(f'%d %b{year}, %H:%M', made_at)} · {self.document['models']['target']['name']} · "
            f"{configurations} + plain"
        )

    @property
    def best(self) -> str:
        """The configuration that is surely faster than plain, and the fastest of those; empty for none."""
        sure = [own for own in self._candidates if own.ratio and own.ratio.overall.low > 1 and _has_interval(own.ratio)]
        return max(sure, key=_speed_up).config if sure else ""

    @property
    def unsure_best(self) -> str:
        """The fastest configuration, where it has answered too few prompts to tell how sure that is; empty for none."""
        fastest = max(self._candidates, key=_speed_up, default=None)
        if fastest is None or not fastest.ratio or fastest.ratio.overall.value <= 1 or _has_interval(fastest.ratio):
            return ""
        return fastest.config

    @property
    def _candidates(self) -> list[ConfigSummary]:
        return [own for own in self.summary.configs if not own.is_baseline and own.ratio]


def _speed_up(own: ConfigSummary) -> float:
    return own.ratio.overall.value if own.ratio else 0.0


def _has_interval(ratio: Figures) -> bool:
    """Whether a category has several prompts: how far apart they lie is all that tells how sure a figure is."""
    return any(category.prompts > 1 for category in ratio.by_category.values())


def kept_results() -> tuple[Result, ...]:
    """All that were kept and can be read, newest first."""
    ids = sorted((path.stem for path in _folder().glob("*.json")), reverse=True)
    return tuple(result for result in map(read_result, ids) if result is not None)


def read_result(result_id: str) -> Result | None:
    """A kept result; None where there is none that can be read."""
    path = _folder() / f"{result_id}.json"
    if path.parent != _folder() or not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(map(row_from, document["rows"]))
        return Result(result_id, document, rows, summarise(rows, (), SEED))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _folder() -> Path:
    folder = data_folder() / "comparisons"
    folder.mkdir(exist_ok=True)
    return folder
