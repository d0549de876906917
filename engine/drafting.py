"""Asking the drafters: each alone and then a vote, or a vote on every token; and letting them run ahead."""

from __future__ import annotations

import functools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from engine.config import Acceptance, Sampling, VoteMode
from engine.cost import CostModel
from engine.drafters.base import Drafter, DraftRequest, Drawing, KeepDrafting, Score, Threads, always
from engine.errors import QuorumError
from engine.residual import Generator
from engine.runtime.sampler import Sampler
from engine.types import Draft, VotedDraft
from engine.verify.sampled import Drawn, trunk_of
from engine.vote import losers, vote

MEASURED_READ_TOKENS = 64
MEASURED_DRAFT_TOKENS = 6
MEASURED_DRAFTS = 3

KeepFor = Callable[[str], KeepDrafting]
"""The length rule's question, for a named drafter."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """The outcome of drafting."""

    voted: VotedDraft
    proposals: Mapping[str, int]
    """Tokens each participating drafter proposed."""
    draft_ms: float
    vote_ms: float
    drafts: Sequence[Draft] = ()
    """What was voted on, where whole drafts were."""
    losers: Sequence[VotedDraft] = ()
    """Those of them that part from the voted one."""
    drawn: Drawn | None = None
    """The drafts, where their tokens were drawn and are to be judged as such."""

    @classmethod
    def cast(cls, drafts: Sequence[Draft], weights: Mapping[str, float], draft_ms: float) -> Ballot:
        """Vote on whole drafts; the time it takes is left to be told."""
        voted = vote(drafts, weights)
        proposals = {draft.source: len(draft) for draft in drafts if draft.tokens}
        return cls(voted, proposals, draft_ms, 0.0, drafts, losers(voted, drafts, weights))

    def led_by(self, preferred: VotedDraft) -> Ballot:
        """The ballot with one of its losers, or the voted draft itself, in the voted one's place."""
        if preferred is self.voted:
            return self
        others = (self.voted, *(loser for loser in self.losers if loser is not preferred))
        return replace(self, voted=preferred, losers=others)


@dataclass(slots=True)
class LookAheadRun:
    """Drafters running ahead of the target."""

    futures: dict[str, Future[Draft]]
    stop: threading.Event
    """Set to end every draft after the token in hand."""


class Panel:
    """All drafters of a set, in the order in which they were named. A drafter that fails leaves the panel."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self.failures: dict[str, str] = {}
        """Why drafters that left did so."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._drafters)

    @property
    def free(self) -> tuple[Drafter, ...]:
        return tuple(drafter for drafter in self._working() if drafter.is_free)

    @property
    def models(self) -> tuple[Drafter, ...]:
        return tuple(drafter for drafter in self._working() if not drafter.is_free)

    def _working(self) -> list[Drafter]:
        return [drafter for drafter in self._drafters.values() if drafter.name not in self.failures]

    def named(self, names: Sequence[str]) -> list[Drafter]:
        """The working drafters among `names`."""
        return [self._drafters[name] for name in names if name not in self.failures]

    def only(self, names: Collection[str]) -> Panel:
        """Some of these drafters as a panel of their own; a failure is known to both."""
        panel = Panel([drafter for drafter in self._drafters.values() if drafter.name in names])
        panel.failures = self.failures
        return panel

    def forget(self) -> None:
        """Let all drafters drop what they have read, but not what they have learnt."""
        for drafter in self._working():
            drafter.forget()

    def begin(self, tokens: Sequence[int]) -> None:
        for drafter in self._working():
            drafter.begin(tokens)

    def accept(self, tokens: Sequence[int]) -> None:
        for drafter in self._working():
            drafter.accept(tokens)

    def take_scores(self) -> dict[str, Score]:
        return {drafter.name: drafter.take_score() for drafter in self._working()}

    def ask(self, drafters: Sequence[Drafter], request: Callable[[Drafter], DraftRequest]) -> list[Draft]:
        """Let drafters draft, several models at the same time; one that fails abstains and is not asked again."""
        several = sum(not drafter.is_free for drafter in drafters) > 1
        starts = [(drafter, drafter.start_beside if several else drafter.start) for drafter in drafters]
        futures = [(drafter.name, start(request(drafter))) for drafter, start in starts]
        return [self._result(name, future) for name, future in futures]

    def threads(self, drafter: Drafter, sharers: int, cost: CostModel) -> Threads:
        """How many threads a drafter uses beside others.

        Alone, as many as make it fastest; at the same time as others, its share: threads that wait for each other's
        cores are slower than fewer threads.
        """
        alone = cost.draft_threads(drafter.name) or drafter.threads
        share = max(1, drafter.threads // sharers)
        return Threads(min(alone, share), share)

    def _result(self, name: str, future: Future[Draft]) -> Draft:
        try:
            return future.result()
        except QuorumError as error:
            self.failures[name] = str(error)
            return Draft(name)

    def hint(self, length: int, cancel: threading.Event) -> list[Draft]:
        """What the free drafters say, before anything is planned."""
        if length == 0:
            return []
        request = DraftRequest((), length, always, cancel)
        return self.ask(self.free, lambda _drafter: request)

    def end_threads(self) -> None:
        """Let no drafter have a thread: its compute threads slow those of the target."""
        for drafter in self._working():
            drafter.end_thread()

    def catch_up(self, names: Sequence[str], max_tokens: int, cost: CostModel, cancel: threading.Event) -> None:
        """Let drafters read a slice of what they are behind by."""
        for drafter in self.named(names):
            started = cost.clock()
            future = drafter.start_catch_up(max_tokens, cancel)
            if future is None:
                continue
            try:
                read = future.result()
            except QuorumError as error:
                self.failures[drafter.name] = str(error)
                continue
            cost.observe_read(drafter.name, read, (cost.clock() - started) * 1e3)

    def measure(self, cost: CostModel, cancel: threading.Event) -> None:
        """Time the draft models that have not been timed yet: some text to read, then some tokens to draft."""
        for drafter in self.models:
            if cost.knows_drafter(drafter.name):
                continue
            drafter.begin(_measured_text(drafter))
            self.catch_up((drafter.name,), MEASURED_READ_TOKENS, cost, cancel)
            drafted_ms = {
                threads: self._drafted_ms(drafter, threads, cost, cancel)
                for threads in sorted({1, max(1, drafter.threads // 2), drafter.threads})
            }
            if drafter.name not in self.failures:
                cost.set_drafter(drafter.name, drafted_ms)
            drafter.forget()

    def _drafted_ms(self, drafter: Drafter, threads: int, cost: CostModel, cancel: threading.Event) -> float:
        """The least time per pass of some short drafts, each begun at another place."""
        request = DraftRequest((), MEASURED_DRAFT_TOKENS, always, cancel, Threads(threads, drafter.threads))
        fastest_ms = math.inf
        for length in range(MEASURED_READ_TOKENS, MEASURED_READ_TOKENS - MEASURED_DRAFTS, -1):
            drafter.truncate(length)
            started = cost.clock()
            self._result(drafter.name, drafter.start(request))
            fastest_ms = min(fastest_ms, (cost.clock() - started) * 1e3 / max(1, drafter.last_passes))
        drafter.begin(_measured_text(drafter))
        return fastest_ms

    def start_look_ahead(
        self, names: Sequence[str], path: tuple[int, ...], max_tokens: int, cost: CostModel
    ) -> LookAheadRun | None:
        """Let drafters draft beyond a path that is being verified; None when nobody can."""
        stop = threading.Event()
        futures = {}
        for drafter in self.named(names):
            threads = self.threads(drafter, len(names) + 1, cost)
            request = DraftRequest(path, max_tokens, always, stop, threads)
            futures[drafter.name] = drafter.start_look_ahead(request)
        running = {name: future for name, future in futures.items() if future is not None}
        return LookAheadRun(running, stop) if running else None

    def finish_look_ahead(self, ahead: LookAheadRun) -> list[Draft]:
        """Stop the drafters that run ahead and wait for them; what they have."""
        ahead.stop.set()
        return [self._result(name, future) for name, future in ahead.futures.items()]


def _measured_text(drafter: Drafter) -> list[int]:
    """Tokens that the drafter knows, however few these are."""
    return [token % drafter.vocabulary_size for token in range(MEASURED_READ_TOKENS)]


class Drafting(ABC):
    """A way to arrive at one voted draft."""

    def __init__(self, panel: Panel, cost: CostModel) -> None:
        self._panel = panel
        self._cost = cost

    @abstractmethod
    def draft(
        self,
        names: Sequence[str],
        length: int,
        hint: Sequence[Draft],
        weights: Mapping[str, float],
        keep: KeepFor,
        cancel: threading.Event,
    ) -> Ballot:
        """Draft and vote.

        Args:
            names: The model drafters that take part; free drafters always do.
            length: Most tokens to draft.
            hint: What the free drafters have already said.
            weights: Voting weights by drafter.
            keep: The length rule's question.
            cancel: Set to end early with what there is.
        """


class DraftApart(Drafting):
    """Every drafter drafts its own chain at the same time; then one vote over the prefix tree."""

    def draft(
        self,
        names: Sequence[str],
        length: int,
        hint: Sequence[Draft],
        weights: Mapping[str, float],
        keep: KeepFor,
        cancel: threading.Event,
    ) -> Ballot:
        started = self._cost.clock()
        drafters = self._panel.named(names)
        sharers = len(drafters)

        def request(drafter: Drafter) -> DraftRequest:
            threads = self._panel.threads(drafter, sharers, self._cost)
            return DraftRequest((), length, keep(drafter.name), cancel, threads)

        drafts = self._panel.ask(drafters, request)
        drafted = self._cost.clock()
        draft_ms = (drafted - started) * 1e3
        self._cost.observe_draft(names, _most_passes(drafters), draft_ms, _most_extra_tokens(drafters))
        ballot = Ballot.cast([*drafts, *hint], weights, draft_ms)
        return replace(ballot, vote_ms=(self._cost.clock() - drafted) * 1e3)


class DraftByDrawing:
    """Every model drafter draws a chain from its own distribution; nothing is voted on."""

    def __init__(self, panel: Panel, cost: CostModel, sampling: Sampling, vocabulary_size: int, seed: int) -> None:
        """Args:
        sampling: The target's.
        vocabulary_size: The target's.
        seed: Of the answer.
        """
        self._panel = panel
        self._cost = cost
        self._sampling = sampling
        self._vocabulary_size = vocabulary_size
        self._seeds = np.random.SeedSequence([seed, len(panel.names)])

    def draft(self, names: Sequence[str], length: int, keep: KeepFor, cancel: threading.Event) -> Ballot:
        """As `Drafting.draft`; the ballot has what was drawn, or nothing where no drafter could."""
        started = self._cost.clock()
        drafters = self._panel.named(names)
        *seeds, own = self._seeds.spawn(len(drafters) + 1)
        chances = {one.name: _chance(seed) for one, seed in zip(drafters, seeds, strict=True)}

        def request(drafter: Drafter) -> DraftRequest:
            drawing = Drawing(self._sampling, self._vocabulary_size, chances[drafter.name])
            threads = self._panel.threads(drafter, len(drafters), self._cost)
            return DraftRequest((), length, keep(drafter.name), cancel, threads, drawing)

        drafts = [draft for draft in self._panel.ask(drafters, request) if draft.rows]
        draft_ms = (self._cost.clock() - started) * 1e3
        self._cost.observe_draft(names, _most_passes(drafters), draft_ms, _most_extra_tokens(drafters))
        proposals = {draft.source: len(draft) for draft in drafts}
        if not drafts:
            return Ballot(VotedDraft(), proposals, draft_ms, 0.0)
        return Ballot(trunk_of(drafts), proposals, draft_ms, 0.0, drafts, drawn=Drawn(tuple(drafts), _chance(own)))


def _most_passes(drafters: Sequence[Drafter]) -> int:
    """Of any of them in the last draft."""
    return max((drafter.last_passes for drafter in drafters), default=0)


def _most_extra_tokens(drafters: Sequence[Drafter]) -> int:
    return max((drafter.last_extra_tokens for drafter in drafters), default=0)


def _chance(seed: np.random.SeedSequence) -> Generator:
    return Generator(np.random.default_rng(seed))


class DraftTogether(Drafting):
    """Lock-step: all drafters propose one token, the vote picks it, and all go on from there."""

    def draft(
        self,
        names: Sequence[str],
        length: int,
        hint: Sequence[Draft],
        weights: Mapping[str, float],
        keep: KeepFor,
        cancel: threading.Event,
    ) -> Ballot:
        steps: list[VotedDraft] = []
        probabilities: list[float] = []
        proposals: dict[str, int] = {}
        draft_ms = vote_ms = 0.0
        passes = 0
        while len(steps) < length and not cancel.is_set():
            started = self._cost.clock()
            drafters = [*self._panel.named(names), *self._panel.free]
            path = tuple(step.tokens[0] for step in steps)
            drafts = self._panel.ask(drafters, functools.partial(self._request, path, len(names), cancel))
            drafted = self._cost.clock()
            chosen = vote(drafts, weights)
            draft_ms += (drafted - started) * 1e3
            vote_ms += (self._cost.clock() - drafted) * 1e3
            if not chosen.tokens:
                break
            passes += _most_passes(drafters)
            for draft in drafts:
                if draft.tokens:
                    proposals[draft.source] = proposals.get(draft.source, 0) + 1
            steps.append(chosen)
            probabilities.append(chosen.probabilities[0])
            entropy = next(draft.last_entropy for draft in drafts if draft.source == chosen.winner)
            if not keep(chosen.winner)(probabilities, entropy):
                break
        self._cost.observe_draft(names, passes, draft_ms)
        if not steps:
            return Ballot(VotedDraft(), proposals, draft_ms, vote_ms)
        voted = VotedDraft(
            tokens=tuple(step.tokens[0] for step in steps),
            probabilities=tuple(probabilities),
            agreement=tuple(step.agreement[0] for step in steps),
            proposers=tuple(step.proposers[0] for step in steps),
            winner=steps[0].winner,
            match_length=steps[0].match_length,
        )
        return Ballot(voted, proposals, draft_ms, vote_ms)

    def _request(self, path: tuple[int, ...], sharers: int, cancel: threading.Event, drafter: Drafter) -> DraftRequest:
        return DraftRequest(path, 1, always, cancel, self._panel.threads(drafter, max(1, sharers), self._cost))


def make_drafting(mode: VoteMode, panel: Panel, cost: CostModel) -> Drafting:
    """The drafting that a vote mode names."""
    return DraftTogether(panel, cost) if mode is VoteMode.COLLECTIVE else DraftApart(panel, cost)


def make_drawing(acceptance: Acceptance, panel: Panel, cost: CostModel, sampler: Sampler) -> DraftByDrawing | None:
    """The drafting for residual acceptance; None where tokens are matched, be it because they cannot be drawn."""
    if acceptance is Acceptance.MATCH or sampler.distribution is None:
        return None
    return DraftByDrawing(panel, cost, sampler.sampling, sampler.vocabulary_size, sampler.seed)
