"""Many requests at once through the pool, against the same requests one after another through sessions.

Both sides answer the same prompts with the same settings and policy, and neither keeps what it read of a prompt. The
sessions' turn comes right before the pool's at every concurrency and in every round, so that what else the machine does
meets both; pools of several shapes take turns in every round. What either has learnt stays with it, as it does for a
user; a warm-up precedes the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from app.bench.configuration import Configuration
from app.bench.prompts import Prompt
from app.bench.rounds import WARM_UP, prompt_tokens, sampling_for
from engine.config import GenerationSettings, Sampling
from engine.loader import LoadedSet
from engine.pool import Pool, PoolRequest, PoolSettings, PoolStatistics, Ticket
from engine.pool_types import TIMED
from engine.session import Session
from engine.types import Finished, FinishReason

Answers = Mapping[str, tuple[int, ...]]
"""Tokens by the prompt's id."""

MARGIN_CELLS = 512
"""Of the pool's cache, beyond what its largest requests fill together."""


@dataclass(frozen=True, slots=True)
class Row:
    """One round of all prompts at one concurrency."""

    configuration: str
    concurrency: int
    round: int
    tokens: int
    elapsed_ms: float
    sequential_ms: float
    """What the same answers took one after another."""
    sequential_tokens: int
    plain_ms: float
    """What the same requests took at once without drafts."""
    plain_tokens: int
    rounds: int
    passes: int
    overlapped: int
    """Passes during which drafts were made for other answers."""
    mean_batch: float
    """Answers in a pass."""
    verified: int
    accepted: int
    parts_ms: Mapping[str, float]
    """Where the time went: prefill, draft, verify, sample, other."""
    first_token_ms: float
    """Median time from a request's admission to its first token."""
    identical: int
    """Answers that are the session's own, token for token."""
    differing: tuple[str, ...]
    """Prompts whose answers are not."""
    equal_ms: tuple[float, ...]
    """When each of as many equal requests, begun at once, was finished."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.elapsed_ms * 1e3

    @property
    def sequential_tokens_per_second(self) -> float:
        return self.sequential_tokens / self.sequential_ms * 1e3

    @property
    def plain_tokens_per_second(self) -> float:
        return self.plain_tokens / self.plain_ms * 1e3

    @property
    def ratio(self) -> float:
        """Throughput against the same requests one after another."""
        return self.tokens_per_second / self.sequential_tokens_per_second

    def document(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "sequential_tokens_per_second": self.sequential_tokens_per_second,
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "ratio": self.ratio,
            "slowest_to_fastest": max(self.equal_ms) / min(self.equal_ms),
        }


Heard = Callable[[Row], None]


class ConcurrentBenchmark:
    """Measures one loaded set. Used by the thread that loaded it."""

    def __init__(
        self,
        loaded: LoadedSet,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        max_tokens: int,
        shapes: Sequence[PoolSettings],
        cancel: threading.Event,
    ) -> None:
        """Args:
        shapes: Of the pools, whose sizes follow from what is measured; they differ in how they overlap.
        """
        self._shapes = shapes
        self._loaded = loaded
        self._requests = {prompt.id: tuple(prompt_tokens(loaded, prompt)) for prompt in prompts}
        self._warm_up = tuple(prompt_tokens(loaded, WARM_UP))
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._cancel = cancel

    def run(self, configuration: Configuration, concurrency: int, rounds: int, heard: Heard) -> Iterator[Row]:
        """Measure; fewer rows when cancelled."""
        with ExitStack() as pools:
            contestants: list[tuple[str, Pool]] = []
            for shape in self._shapes:
                pool = pools.enter_context(closing(Pool(self._loaded, self._settings(shape, concurrency))))
                name = configuration.name
                contestants.append((name if len(self._shapes) == 1 else f"{name}, overlap {shape.overlap.value}", pool))
                self._run_pool(pool, [(WARM_UP.id, self._warm_up)] * concurrency, self._generation(configuration, 0))
            for number in range(1, rounds + 1):
                beside = self._beside(contestants[0][1], configuration, number)
                for name, pool in contestants:
                    row = self._row(pool, name, self._generation(configuration, number), concurrency, number, beside)
                    if row is None:
                        return
                    heard(row)
                    yield row

    def _settings(self, shape: PoolSettings, concurrency: int) -> PoolSettings:
        largest = sorted(map(len, self._requests.values()), reverse=True)[:concurrency]
        cells = sum(largest) + (len(largest) + 1) * self._max_tokens + MARGIN_CELLS
        waiting = max(len(self._requests), concurrency)
        return replace(
            shape,
            most_active=concurrency,
            most_waiting=waiting,
            context_tokens=max(cells, self._loaded.context.context_tokens),
            most_kept=0,
        )

    def _generation(self, configuration: Configuration, number: int) -> GenerationSettings:
        return GenerationSettings(sampling_for(self._sampling, number), configuration.speculation, self._max_tokens)

    def _beside(self, pool: Pool, configuration: Configuration, number: int) -> _Beside:
        started = time.perf_counter()
        expected = self._one_by_one(self._generation(configuration, number))
        sequential_ms = (time.perf_counter() - started) * 1e3
        plain_settings = self._generation(configuration.baseline, number)
        started = time.perf_counter()
        plain = self._run_pool(pool, list(self._requests.items()), plain_settings)
        plain_ms = (time.perf_counter() - started) * 1e3
        return _Beside(expected, sequential_ms, sum(len(one.last.token_ids) for one in plain), plain_ms)

    def _row(
        self, pool: Pool, name: str, settings: GenerationSettings, concurrency: int, number: int, beside: _Beside
    ) -> Row | None:
        expected = beside.expected
        before = pool.statistics
        started = time.perf_counter()
        finished = self._run_pool(pool, list(self._requests.items()), settings)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        after = pool.statistics
        longest = max(self._requests.items(), key=lambda item: (len(expected.get(item[0], ())), item[0]))
        equal = self._run_pool(pool, [longest] * concurrency, settings)
        if self._cancel.is_set():
            return None
        found: Answers = {one.name: one.last.token_ids for one in finished}
        differing = tuple(prompt_id for prompt_id, tokens in expected.items() if found[prompt_id] != tokens)
        passes = after.passes - before.passes
        return Row(
            configuration=name,
            concurrency=concurrency,
            round=number,
            tokens=sum(map(len, found.values())),
            elapsed_ms=elapsed_ms,
            sequential_ms=beside.sequential_ms,
            sequential_tokens=sum(map(len, expected.values())),
            plain_ms=beside.plain_ms,
            plain_tokens=beside.plain_tokens,
            rounds=after.rounds - before.rounds,
            passes=passes,
            overlapped=after.overlapped - before.overlapped,
            mean_batch=(after.carried_answers - before.carried_answers) / max(1, passes),
            verified=after.verified - before.verified,
            accepted=after.accepted - before.accepted,
            parts_ms={name.removesuffix("_ms"): _part(after, name) - _part(before, name) for name in TIMED},
            first_token_ms=median(one.last.timings.time_to_first_token_ms for one in finished),
            identical=len(expected) - len(differing),
            differing=differing,
            equal_ms=tuple(one.finished_ms for one in equal),
        )

    def _one_by_one(self, settings: GenerationSettings) -> Answers:
        """The answers of sessions, each with drafters that have read nothing."""
        answers = {}
        for name, tokens in self._requests.items():
            self._loaded.panel.forget()
            with closing(Session(self._loaded)) as session:
                *_, last = session.generate(tokens, settings, self._cancel)
            assert isinstance(last, Finished)
            if last.reason is not FinishReason.CANCELLED:
                answers[name] = last.token_ids
        return answers

    def _run_pool(
        self, pool: Pool, requests: Sequence[tuple[str, tuple[int, ...]]], settings: GenerationSettings
    ) -> list[_Answered]:
        """Ask for all at once and step until nothing is left to do."""
        started = time.perf_counter()
        tickets = [(name, pool.submit(PoolRequest(tokens, settings))) for name, tokens in requests]
        answered: list[_Answered] = []
        while pool.step():
            if self._cancel.is_set():
                for _, ticket in tickets:
                    ticket.cancel()
            for name, ticket in tickets:
                answered += [_Answered(name, last, (time.perf_counter() - started) * 1e3) for last in _last_of(ticket)]
        for name, ticket in tickets:
            answered += [_Answered(name, last, (time.perf_counter() - started) * 1e3) for last in _last_of(ticket)]
        return answered


@dataclass(frozen=True, slots=True)
class _Beside:
    """What the pool is held against in one round."""

    expected: Answers
    sequential_ms: float
    plain_tokens: int
    plain_ms: float


@dataclass(frozen=True, slots=True)
class _Answered:
    """An answer and when it was finished, counted from when all were asked for."""

    name: str
    last: Finished
    finished_ms: float


def _last_of(ticket: Ticket) -> Iterator[Finished]:
    while (event := ticket.read(0)) is not None:
        if isinstance(event, Finished):
            yield event


def _part(statistics: PoolStatistics, name: str) -> float:
    return float(getattr(statistics, name))


def summarised(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each configuration and concurrency: medians over the rounds, and counts."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.configuration, row.concurrency), []).append(row)
    return [
        {
            "configuration": configuration,
            "concurrency": concurrency,
            "rounds": len(own),
            "tokens_per_second": median(row.tokens_per_second for row in own),
            "sequential_tokens_per_second": median(row.sequential_tokens_per_second for row in own),
            "plain_tokens_per_second": median(row.plain_tokens_per_second for row in own),
            "ratio": median(row.ratio for row in own),
            "mean_batch": median(row.mean_batch for row in own),
            "passes": median(row.passes for row in own),
            "overlapped": sum(row.overlapped for row in own) / max(1, sum(row.passes for row in own)),
            "acceptance": sum(row.accepted for row in own) / max(1, sum(row.verified for row in own)),
            "verified_per_answer_pass": sum(row.verified for row in own)
            / max(1.0, sum(row.mean_batch * row.passes for row in own)),
            "first_token_ms": median(row.first_token_ms for row in own),
            "slowest_to_fastest": median(max(row.equal_ms) / min(row.equal_ms) for row in own),
            "identical": sum(row.identical for row in own),
            "answers": sum(row.identical + len(row.differing) for row in own),
            "parts": _parts(own),
        }
        for (configuration, concurrency), own in groups.items()
    ]


def _parts(rows: Sequence[Row]) -> dict[str, float]:
    """Shares of the pool's time."""
    sums = {name: sum(row.parts_ms[name] for row in rows) for name in rows[0].parts_ms}
    total_ms = sum(sums.values())
    return {name: part_ms / total_ms for name, part_ms in sums.items()}


def render_concurrent(summary: Sequence[Mapping[str, Any]]) -> str:
    """The summary as text for the terminal."""
    titles = (
        "at once",
        "tokens/s",
        "undrafted",
        "one by one",
        "ratio",
        "batch",
        "prefill",
        "draft",
        "verify",
        "sample",
    )
    lines = ["  ".join((*titles, "other", "spread", "identical"))]
    for entry in summary:
        parts = "".join(f"{100 * entry['parts'][name]:7.0f}%" for name in ("draft", "verify", "sample", "other"))
        lines.append(
            f"{entry['concurrency']:7d}  {entry['tokens_per_second']:8.1f}  "
            f"{entry['plain_tokens_per_second']:9.1f}  "
            f"{entry['sequential_tokens_per_second']:10.1f}  {entry['ratio']:5.2f}x  {entry['mean_batch']:5.1f}  "
            f"{100 * entry['parts']['prefill']:6.0f}%{parts}  {entry['slowest_to_fastest']:5.2f}x  "
            f"{entry['identical']}/{entry['answers']}  {entry['configuration']}"
        )
    return "\n".join(lines) + "\n"
