"""A whole run: loads what the configurations need, measures round by round, and keeps every row as it comes.

Configurations that can share one loaded set are interleaved prompt by prompt. Exactness decides how a set is loaded,
so each kind has a set and a baseline of its own, one after the other. A peer's settings follow our own configurations
in each round, one server at a time, with every prompt in turn.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.bench.configuration import Configuration
from app.bench.journal import Journal
from app.bench.machine import kv_document
from app.bench.peer import Peer, PeerServer, PeerSetting, peer_row
from app.bench.prompts import Prompt
from app.bench.rounds import (
    WARM_UP,
    Contestant,
    Task,
    check_prompts,
    prompt_tokens,
    rotated,
    run_round,
    sampling_for,
    schedule_first_round,
    schedule_round,
    warm_up,
)
from app.bench.row import Row
from engine.config import Exactness, Sampling, SetConfig
from engine.length import LONGEST_DRAFT
from engine.loader import FREE_DRAFTERS, LoadedSet, SetProgress


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    set_config: SetConfig
    """The target, and the drafters of configurations that name none."""
    configurations: tuple[Configuration, ...]
    """Without the baselines."""
    drafter_specs: Mapping[str, str]
    """For every drafter a configuration names: `ngram`, `suffix`, or its path."""
    prompts: tuple[Prompt, ...]
    rounds: int
    sampling: Sampling
    max_tokens: int
    peer: Peer | None = None
    limit_per_category: int | None = None
    """Prompts of each category that are run, those whose plain answer loops not counted; None: all, loops too."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """All drafters of all configurations."""
        return self._union(self.configurations)

    def groups(self) -> list[tuple[SetConfig, tuple[Configuration, ...]]]:
        """What is loaded at once, and the configurations that run on it, each group's baseline first."""
        by_exactness: dict[Exactness, list[Configuration]] = {}
        for configuration in self.configurations:
            by_exactness.setdefault(configuration.exactness, []).append(configuration)
        if not by_exactness:
            by_exactness[self.set_config.exactness] = []
        groups = []
        for exactness, own in by_exactness.items():
            config = replace(self.set_config, drafters=self._union(own), exactness=exactness)
            groups.append((config, (replace(Configuration(), exactness=exactness).baseline, *own)))
        return groups

    def specs(self, configuration: Configuration) -> tuple[str, ...]:
        """The drafters a configuration uses."""
        if configuration.is_plain:
            return ()
        if configuration.drafters is None:
            return self.set_config.drafters
        return tuple(dict.fromkeys(self.drafter_specs[name] for name in configuration.drafters))

    def _union(self, configurations: Sequence[Configuration]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(spec for configuration in configurations for spec in self.specs(configuration)))

    @property
    def draft_model(self) -> Path | None:
        """The first draft model, which a peer drafts with: it takes only one."""
        return next((Path(spec) for spec in self.drafters if spec not in FREE_DRAFTERS), None)

    @property
    def peer_settings(self) -> tuple[PeerSetting, ...]:
        return self.peer.settings(self.draft_model is not None) if self.peer else ()

    @property
    def answers(self) -> int:
        """How many are measured in all; warm-ups, and prompts that gave their place to another, aside."""
        contestants = sum(len(configurations) for _, configurations in self.groups()) + len(self.peer_settings)
        sizes = Counter(prompt.category for prompt in self.prompts).values()
        prompts = sum(size if self.limit_per_category is None else min(size, self.limit_per_category) for size in sizes)
        return prompts * self.rounds * contestants


@dataclass(slots=True)
class Findings:
    """What a run found besides its rows."""

    warm_up: list[Row] = field(default_factory=list)
    kv: dict[str, str] = field(default_factory=dict)
    ceiling: dict[str, float] = field(default_factory=dict)


RowReport = Callable[[Row], None]


class Benchmark:
    """Runs a plan; rows go into the journal, which may hold some from before."""

    def __init__(
        self, plan: Plan, journal: Journal, loading: SetProgress, heard: RowReport, cancel: threading.Event
    ) -> None:
        """Args:
        loading: Hears how far loading has come.
        heard: Hears of every row when it is finished.
        cancel: Set to end after the pass in hand; finished rows stay.
        """
        self._plan = plan
        self._journal = journal
        self._loading = loading
        self._heard = heard
        self._cancel = cancel
        self._rows = {row.key: row for row in journal.rows}
        self.prompts = plan.prompts
        """Those that are run; of a limited plan, they are known after the first round."""
        self.findings = Findings()

    def run(self) -> bool:
        """Measure; whether everything was finished.

        Raises:
            QuorumError: something the user can mend; finished rows stay in the journal.
            LoadCancelled: cancelled while loading.
        """
        for index, (config, configurations) in enumerate(self._plan.groups()):
            loaded = LoadedSet.load(config, self._loading, self._cancel)
            try:
                self._describe(loaded)
                check_prompts(loaded, self._plan.prompts, self._plan.max_tokens)
                self._run_group(loaded, configurations, with_peer=index == 0)
                loaded.save_learnt()
            finally:
                loaded.close()
            if self._cancel.is_set():
                return False
        return True

    def _describe(self, loaded: LoadedSet) -> None:
        known = self.findings.kv
        self.findings.kv = {
            name: value if known.get(name, value) == value else f"{known[name]}, then {value}"
            for name, value in kv_document(loaded).items()
        }
        self.findings.ceiling = self.findings.ceiling or ceiling(loaded)

    def _run_group(self, loaded: LoadedSet, configurations: Sequence[Configuration], *, with_peer: bool) -> None:
        plan = self._plan
        names = dict(zip(loaded.config.drafters, loaded.panel.names, strict=True))
        contestants = [
            Contestant(own, loaded.with_drafters([names[spec] for spec in plan.specs(own)])) for own in configurations
        ]
        self.findings.warm_up += warm_up(contestants, plan.sampling, plan.max_tokens, self._cancel)
        for round_number in range(1, plan.rounds + 1):
            for row in run_round(
                self._schedule(contestants, round_number), self._is_done, plan.sampling, plan.max_tokens, self._cancel
            ):
                self._keep(row)
            if round_number == 1:
                self.prompts = self._counted(contestants[0])
            if with_peer:
                for setting in rotated(plan.peer_settings, round_number - 1):
                    self._run_peer(setting, contestants[0], round_number)
            if self._cancel.is_set():
                return

    def _schedule(self, contestants: Sequence[Contestant], round_number: int) -> Iterator[Task]:
        limit = self._plan.limit_per_category
        if limit is None or round_number > 1:
            return schedule_round(self.prompts, contestants, round_number)
        baseline = contestants[0].name
        return schedule_first_round(
            self.prompts, limit, contestants, lambda prompt: self._rows[prompt.id, baseline, 1].is_loop
        )

    def _counted(self, baseline: Contestant) -> tuple[Prompt, ...]:
        """The prompts that found a place in the first round."""
        if self._plan.limit_per_category is None:
            return self.prompts
        first = {prompt.id: self._rows.get((prompt.id, baseline.name, 1)) for prompt in self.prompts}
        return tuple(prompt for prompt in self.prompts if (row := first[prompt.id]) is not None and not row.is_loop)

    def _is_done(self, task: Task) -> bool:
        return (task.prompt.id, task.contestant.name, task.round) in self._rows

    def _keep(self, row: Row) -> None:
        self._rows[row.key] = row
        self._journal.add(row)
        self._heard(row)

    def _run_peer(self, setting: PeerSetting, plain: Contestant, round_number: int) -> None:
        """All prompts of one round on a fresh server."""
        plan = self._plan
        open_prompts = [prompt for prompt in self.prompts if (prompt.id, setting.name, round_number) not in self._rows]
        if plan.peer is None or not open_prompts or self._cancel.is_set():
            return
        arguments = plan.peer.arguments(setting, plain.loaded.config, plan.draft_model)
        with PeerServer(plan.peer, arguments) as server:
            if not server.wait_until_ready(self._cancel):
                return
            sampling = sampling_for(plan.sampling, round_number)
            for prompt in (WARM_UP, *open_prompts):
                tokens = prompt_tokens(plain.loaded, prompt)
                started = time.perf_counter()
                reply = server.complete(tokens, sampling, plan.max_tokens, self._cancel)
                if reply is None:
                    return
                if prompt is not WARM_UP:
                    elapsed = time.perf_counter() - started
                    memory_bytes = server.memory_bytes()
                    self._keep(
                        peer_row(prompt, setting, plain.name, round_number, reply, sampling, elapsed, memory_bytes)
                    )


def ceiling(loaded: LoadedSet) -> dict[str, float]:
    """What a perfect drafter that costs nothing could reach here: whole passes of the size that is cheapest a token."""
    curve = loaded.learning.cost.curve(0, LONGEST_DRAFT + 1)
    tokens = max(range(1, len(curve) + 1), key=lambda count: count / curve[count - 1])
    return {"ratio": tokens * curve[0] / curve[tokens - 1], "pass_tokens": tokens}


def fingerprint(plan: Plan, models: Mapping[str, Any], prompts_sha256: str, version: str) -> dict[str, Any]:
    """What rows must have in common to be put together."""
    return {
        "target": models["target"]["sha256"],
        "drafters": [drafter.get("sha256", drafter["name"]) for drafter in models["drafters"]],
        "prompts": prompts_sha256,
        "max_tokens": plan.max_tokens,
        "temperature": plan.sampling.temperature,
        "seed": plan.sampling.seed,
        "context_tokens": plan.set_config.context_tokens,
        "threads": plan.set_config.placement.threads,
        "gpu_layers": plan.set_config.placement.gpu_layers,
        "llama_cpp_python": version,
    }
