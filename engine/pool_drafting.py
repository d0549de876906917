"""Drafting for a batch of requests: who drafts, what each request sends to the target, and what is learnt of it."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from engine.active import ActiveRequest
from engine.config import LookAhead, PolicyKind, SetConfig
from engine.drafters.base import KeepDrafting, Score
from engine.drafters.model import ModelDrafter
from engine.drafters.pooled import Order, PooledDrafter
from engine.drafting import Ballot, Panel
from engine.errors import QuorumError
from engine.length import AutoLength, LengthRule
from engine.loader import FREE_DRAFTERS, LoadedSet
from engine.marginal import share_out
from engine.plan import READY_BEHIND_TOKENS
from engine.pool_plan import Drafters, PoolPlan, PoolPlanner, Way
from engine.runtime.devices import has_gpu
from engine.types import Draft, Verdict, VotedDraft
from engine.vote import vote

READING_SLICE_TOKENS = 64
"""A draft model that is far behind on a request reads this much of it in a round, so that answers go on."""

FORESEEN_TOKENS = 7
"""A look-up draft that is worth more than so many tokens of a draft model at its mean acceptance needs no model."""

NOTHING = Ballot(VotedDraft(), {}, 0.0, 0.0)


class PoolDrafting:
    """Owns what drafts for a pool's requests. Used and closed by the pool's owner."""

    def __init__(
        self, loaded: LoadedSet, requests: int, context_tokens: int, overlap: LookAhead, cores: Collection[int]
    ) -> None:
        """Args:
        requests: Most at a time.
        context_tokens: Of all requests together.
        overlap: Whether drafting beside the target's passes is a choice, the only one, or none.
        cores: Processor cores that draft models are kept to; empty for all.
        """
        self._set = loaded
        self._learning = loaded.learning
        self._clock = loaded.learning.cost.clock
        self._drafters: dict[str, PooledDrafter] = {}
        self.failures: dict[str, str] = {}
        """Why drafters do not draft here, by name."""
        placements = dict(zip(loaded.panel.names, loaded.config.drafters, strict=False))
        for drafter in loaded.panel.models if loaded.model.can_roll_back else ():
            if not isinstance(drafter, ModelDrafter):
                self.failures[drafter.name] = "a drafter of another vocabulary drafts for one conversation at a time"
                continue
            placement = loaded.config.placement_of(placements[drafter.name])
            try:
                self._drafters[drafter.name] = PooledDrafter(drafter, placement, requests, context_tokens)
            except QuorumError as error:
                self.failures[drafter.name] = str(error)
        for one in self._drafters.values():
            one.keep_to(cores)
        self._has_own_cores = bool(cores)
        runs_apart = self._has_own_cores or _run_apart(loaded.config)
        self._planner = PoolPlanner(
            tuple(self._drafters), loaded.learning.cost, loaded.learning.acceptance, overlap, runs_apart=runs_apart
        )
        self._overlap = overlap
        self._works: list[DraftsInWork] = []
        """Drafts that are being made while the target verifies others, the oldest first."""
        self._reading: _Slice | None = None
        """What is being read meanwhile."""
        self._full: set[str] = set()
        """Drafters that had no room for a slice, until a request ends."""
        self.reason = ""
        """Of the last round's choice, in words."""
        self._open: dict[int, ActiveRequest] = {}
        self._never = threading.Event()

    def open(self, active: ActiveRequest) -> None:
        """A request's answer begins."""
        if active.speculation.policy.kind is PolicyKind.OFF or not self._set.model.can_roll_back:
            return
        active.panel = Panel([FREE_DRAFTERS[drafter.name]() for drafter in self._set.panel.free])
        active.panel.begin(active.tokens)
        self._open[active.number] = active
        for drafter in self._drafters.values():
            drafter.open(active.number, active.tokens)

    def drop(self, active: ActiveRequest) -> None:
        """A request has ended."""
        if self._open.pop(active.number, None) is not None:
            self._full.clear()
            for drafter in self._drafters.values():
                drafter.drop(active.number)

    def check(self) -> None:
        """Check the drafters' mirrors against the committed tokens.

        Raises:
            AssertionError: they do not agree.
        """
        for drafter in () if self._works or self._reading else self._drafters.values():
            drafter.check({number: active.tokens for number, active in self._open.items()})

    def close(self) -> None:
        """Free the drafters' contexts."""
        for work in self._works:
            self._finish(work)
        self._works.clear()
        for drafter in self._drafters.values():
            drafter.close()

    def read(self, batch: Sequence[ActiveRequest]) -> None:
        """Let draft models read a slice of what they are behind by, where that is likely to be repaid."""
        if self._reading is not None and not self._heard_of_slice():
            return
        free = [active for active in batch if active.number in self._open and active.answer is not None]
        for active in free:
            if active.answer is None or not active.answer.token_count:
                continue  # the first token comes before what makes later ones faster
            cost = self._learning.cost
            behind = {name: one.behind_tokens(active.number, active.tokens) for name, one in self._drafters.items()}
            late = {
                name: tokens
                for name, tokens in behind.items()
                if tokens > READY_BEHIND_TOKENS and name not in self._full
            }
            if not late:
                continue
            reads = {name: tokens * cost.read_ms(name) for name, tokens in late.items()}
            names: Drafters = tuple(late)
            if self._is_auto(active):
                names = self._planner.worth_reading(
                    len(free), mean_tokens(batch), active.answer.remaining_tokens, reads
                )
            if names:
                self._start_slice(names[0], active)
                return

    def _start_slice(self, name: str, active: ActiveRequest) -> None:
        drafter = self._drafters[name]
        requests = {number: one.tokens for number, one in self._open.items()}
        started = self._clock()
        future = drafter.start_reading(active.number, requests, READING_SLICE_TOKENS, drafter.threads)
        self._reading = _Slice(name, future, started)
        if not self._works:
            self._heard_of_slice(waits=True)

    def _heard_of_slice(self, *, waits: bool = False) -> bool:
        """Whether the slice that was begun is read."""
        assert self._reading is not None
        reading = self._reading
        if not (waits or reading.future.done()):
            return False
        self._reading = None
        try:
            read = reading.future.result()
        except QuorumError as error:
            self._lose(reading.name, error)
            return True
        if read is None:
            self._full.add(reading.name)
            return True
        if waits:
            self._learning.cost.observe_read(reading.name, read, (self._clock() - reading.started) * 1e3)
        return True

    def _lose(self, name: str, error: QuorumError) -> None:
        self.failures[name] = str(error)
        self._drafters.pop(name, None)

    def prepare(self, answering: Sequence[ActiveRequest]) -> tuple[PoolPlan, list[ActiveRequest], float]:
        """Draft for answers, or find out who was drafted for meanwhile.

        Returns:
            The plan; those with a ballot, who are to be verified next, at least one; and the milliseconds waited.
        """
        waited_ms = 0.0
        autos = [active for active in answering if active.number in self._open and self._is_auto(active)]
        plan = self._planner.plan(len(answering), mean_tokens(answering), lambda names: self._are_ready(names, autos))
        if not autos and self._overlap is LookAhead.ON and len(answering) > 1:
            plan = replace(plan, way=Way(overlaps=True))
        self.reason = plan.reason
        while self._works and (not plan.way.overlaps or self._works[0].is_done):
            waited_ms += self._finish(self._works.pop(0))
        worked_on = {asked.active.number for work in self._works for asked in work.asked}
        ready = [active for active in answering if active.ballot is not None]
        fresh = [active for active in answering if active.ballot is None and active.number not in worked_on]
        if not plan.way.overlaps:
            waited_ms += self._finish(self._start(plan, fresh))
            return plan, list(answering), waited_ms
        # Where nobody could be verified meanwhile, one half is, while the other is drafted for.
        half = 0 if ready or self._works else (len(fresh) + 1) // 2
        groups = (fresh[:half], fresh[half:])
        self._works += [self._start(plan, group) for group in groups if group]
        while not ready:
            waited_ms += self._finish(self._works.pop(0))
            ready = [active for active in answering if active.ballot is not None]
        return plan, ready, waited_ms

    def _end_threads(self) -> None:
        """Let no drafter have a thread: its compute threads slow those of the target."""
        for drafter in self._drafters.values():
            drafter.end_thread()

    @property
    def is_drafting(self) -> bool:
        """Whether drafts are being made meanwhile."""
        return bool(self._works)

    def _start(self, plan: PoolPlan, batch: Sequence[ActiveRequest]) -> DraftsInWork:
        """Begin to draft for requests that have no ballot."""
        started = self._clock()
        autos = sum(active.number in self._open and self._is_auto(active) for active in batch)
        asked: list[_Asked] = []
        orders: dict[str, list[Order]] = {}
        for active in batch:
            rule = self._rule(active)
            room = min(active.room_tokens, rule.limit()) if active.number in self._open else 0
            hint = active.panel.hint(room, self._never)
            names = plan.way.drafters if self._is_auto(active) else tuple(self._drafters)
            if not room or (self._is_auto(active) and self._is_enough(hint, active, names)):
                names = ()
            names = tuple(
                name for name in names if name in self._drafters and self._behind(name, active) <= READY_BEHIND_TOKENS
            )
            asked.append(_Asked(active, names, hint))
            for name in names:
                keep = self._keep(name, names, active, autos, plan)
                orders.setdefault(name, []).append(Order(active.number, active.tokens, room, keep))
        sharers = len(orders) + (plan.way.overlaps and not self._has_own_cores)
        is_beside = plan.way.overlaps or len(orders) > 1
        if not is_beside and self._reading is None:
            self._end_threads()
        futures: dict[str, Future[list[Draft]]] = {}
        for name, own in orders.items():
            drafter = self._drafters[name]
            start = drafter.start_beside if is_beside else drafter.start
            futures[name] = start(own, max(1, drafter.threads // sharers))
        return DraftsInWork(plan, asked, orders, futures, started)

    def _finish(self, work: DraftsInWork) -> float:
        """Wait for drafts and vote on them: every request has a ballot then. Returns the milliseconds waited."""
        waiting = self._clock() if work.plan.way.overlaps else work.started
        made: dict[int, list[Draft]] = {asked.active.number: [] for asked in work.asked}
        for name, future in work.futures.items():
            try:
                drafts = future.result()
            except QuorumError as error:
                self._lose(name, error)
                continue
            for order, draft in zip(work.orders[name], drafts, strict=True):
                made[order.request].append(draft)
        done = self._clock()
        names = tuple(sorted(work.futures))
        passes = max((self._drafters[name].last_passes for name in names if name in self._drafters), default=0)
        if names and passes and not work.plan.way.overlaps:
            requests = max(len(own) for own in work.orders.values())
            self._planner.observe_draft(names, requests, passes, (done - work.started) * 1e3)
        for asked in work.asked:
            drafts = [*made[asked.active.number], *asked.hint]
            weights = self._learning.weights(asked.active.speculation.weights).current
            ballot = Ballot.cast(drafts, weights, (done - waiting) * 1e3)
            pace = work.plan.pace / max(1, len(work.asked))
            preferred = self._rule(asked.active).prefer(ballot.voted, ballot.losers, len(asked.active.tokens), pace)
            asked.active.ballot = ballot.led_by(preferred)
            asked.active.asked = asked.names
        return (done - waiting) * 1e3

    def share(self, batch: Sequence[ActiveRequest], most_rows: int) -> list[VotedDraft]:
        """What each request sends: as its policy says, or by the marginal rule over the cost of the whole pass."""
        requests = len(batch)
        setting = self._set.setting
        most_rows = max(requests, setting.fitting(most_rows)) if setting.pass_sizes is not None else most_rows
        sent: list[VotedDraft] = []
        free: list[VotedDraft] = []
        left = most_rows - requests
        for active in batch:
            voted = active.ballot.voted if active.ballot is not None else VotedDraft()
            voted = voted.trimmed(min(active.room_tokens, active.sampler.allowed_length(voted.tokens)))
            is_auto = self._is_auto(active)
            sent.append(VotedDraft() if is_auto else voted.trimmed(left))
            free.append(voted if is_auto else VotedDraft())
            left -= len(sent[-1])
        rows = requests + sum(map(len, sent))
        context_tokens = mean_tokens(batch)
        cost = self._learning.cost
        besides_ms = self._planner.overhead_ms(requests) + max(
            (active.ballot.draft_ms for active in batch if active.ballot is not None), default=0.0
        )

        def pass_ms(count: int) -> float:
            if count and setting.fitting(rows + count) != rows + count:
                return math.inf
            return cost.verify_ms(rows + count, context_tokens, requests) + besides_ms

        survivals = [self._learning.acceptance.survivals(voted) for voted in free]
        counts = share_out(survivals, float(rows), pass_ms, max(0, left))
        return [
            voted.trimmed(count) if count else fixed for voted, count, fixed in zip(free, counts, sent, strict=True)
        ]

    def learn(
        self, active: ActiveRequest, sent: VotedDraft, verdict: Verdict, emitted: Sequence[int], round_ms: float
    ) -> Mapping[str, Score]:
        """Take in the verdict on one request; how its drafters' guesses fared."""
        ballot = active.ballot or NOTHING
        active.panel.accept(emitted)
        scores = dict(active.panel.take_scores())
        if active.number in self._open:
            for name, drafter in self._drafters.items():
                scores[name] = drafter.take_score(active.number)
        verified, accepted = len(sent), verdict.accepted
        drafts = (ballot.voted, *ballot.losers)
        acceptance = self._learning.acceptance
        acceptance.learn_all(active.asked, drafts, verdict.chosen(sent.tokens))
        acceptance.hear(scores)
        self._learning.weights(active.speculation.weights).learn(ballot.voted, verified, accepted, scores)
        self._rule(active).learn(verified, accepted, round_ms)
        active.pace.learn(len(emitted), round_ms)
        active.active = frozenset(ballot.proposals)
        active.ballot = None
        return scores

    def learn_round(self, plan: PoolPlan, requests: int, tokens: int, round_ms: float, besides_ms: float) -> None:
        """Take in what a round brought that read no prompt.

        Args:
            besides_ms: Of its time, what was neither drafting nor the target's pass.
        """
        self._planner.learn(plan, tokens, round_ms)
        self._planner.observe_overhead(requests, besides_ms)

    def _rule(self, active: ActiveRequest) -> LengthRule:
        return self._learning.rule(active.speculation.policy)

    def _is_auto(self, active: ActiveRequest) -> bool:
        return isinstance(self._rule(active), AutoLength)

    def _behind(self, name: str, active: ActiveRequest) -> int:
        return self._drafters[name].behind_tokens(active.number, active.tokens)

    def _are_ready(self, names: Drafters, autos: Sequence[ActiveRequest]) -> bool:
        """Whether most requests are read by all of these drafters."""
        ready = sum(all(self._behind(name, active) <= READY_BEHIND_TOKENS for name in names) for active in autos)
        return 2 * ready >= len(autos)

    def _is_enough(self, hint: Sequence[Draft], active: ActiveRequest, names: Drafters) -> bool:
        """Whether what the free drafters say promises more than draft models usually bring."""
        acceptance = self._learning.acceptance
        voted = vote(hint, self._learning.weights(active.speculation.weights).current)
        mean = acceptance.mean(names)
        return sum(acceptance.survivals(voted)) >= sum(mean**length for length in range(1, FORESEEN_TOKENS + 1))

    def _keep(self, name: str, names: Drafters, active: ActiveRequest, requests: int, plan: PoolPlan) -> KeepDrafting:
        rule = self._rule(active)
        context_tokens = len(active.tokens)
        if not self._is_auto(active) or requests <= 1:
            return rule.keep_drafting(name, names, context_tokens, plan.pace)
        cost, acceptance = self._learning.cost, self._learning.acceptance
        mean = acceptance.mean(names)
        place_ms = cost.verify_ms(2 * requests, context_tokens, requests) - cost.verify_ms(
            requests, context_tokens, requests
        )
        worth = plan.pace * (max(0.0, place_ms) + self._planner.draft_pass_ms(names, requests)) / requests
        survivals = [1.0]

        def keep(probabilities: Sequence[float], _entropy: float) -> bool:
            """Whether one more token, whose place and pass all requests share, is likely to be worth them."""
            for probability in probabilities[len(survivals) - 1 :]:
                survivals.append(survivals[-1] * acceptance.token(name, probability, 1.0, 1))
            return survivals[-1] * mean >= worth

        return keep


@dataclass(frozen=True, slots=True)
class _Slice:
    """Committed tokens of a request that a draft model reads."""

    name: str
    """Of the drafter."""
    future: Future[int | None]
    started: float
    """By the cost model's clock."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one request is drafted with."""

    active: ActiveRequest
    names: Drafters
    hint: Sequence[Draft]


@dataclass(frozen=True, slots=True)
class DraftsInWork:
    """Drafts that are being made."""

    plan: PoolPlan
    asked: Sequence[_Asked]
    orders: Mapping[str, Sequence[Order]]
    futures: Mapping[str, Future[list[Draft]]]
    started: float
    """By the cost model's clock."""

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.futures.values())


def _run_apart(config: SetConfig) -> bool:
    """Whether target and draft models lie on different processors."""
    if not has_gpu():
        return False
    return any(
        (config.placement_of(name).gpu_layers == 0) != (config.placement.gpu_layers == 0) for name in config.drafters
    )


def mean_tokens(batch: Sequence[ActiveRequest]) -> int:
    """Of the requests, committed."""
    return sum(len(active.tokens) for active in batch) // max(1, len(batch))
