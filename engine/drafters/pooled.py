"""A draft model that drafts for many requests at once: a context of its own beside the drafter's, one mirror a request.

One pass carries a token of each request, so drafting for several costs little more than for one. A request whose draft
is long enough drops out; the others go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from engine.config import MAX_DRAFT_TOKENS, ModelPlacement
from engine.drafters.base import KeepDrafting, Score
from engine.drafters.model import ModelDrafter, Prediction, drafter_settings, predict
from engine.memory import cache_in_memory, check_memory
from engine.prefix import shared_prefix
from engine.runtime.context import Context, Run
from engine.types import Draft

LEAST_SHARED_TOKENS = 16
"""What less would be gained by, a mirror does not take over from another one."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be drafted for one request."""

    request: int
    tokens: Sequence[int]
    """Committed; they do not change while the draft is made."""
    max_tokens: int
    keep_drafting: KeepDrafting


@dataclass(slots=True)
class _Mirror:
    """What the drafter holds of one request, and what it predicts after each token where it knows."""

    sequence: int
    tokens: list[int] = field(default_factory=list)
    predictions: list[Prediction | None] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)
    """Names of the cache cells that hold the tokens; those that were taken over are another mirror's too."""
    known: int = 0
    """Leading tokens found equal to the committed ones."""
    scored: int = 0
    score: Score = field(default_factory=Score)


@dataclass(slots=True)
class _Growing:
    """A draft in the making."""

    order: Order
    mirror: _Mirror
    position: int
    """Tokens of the mirror that the next prediction stands after."""
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    entropy: float = 0.0

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.order.max_tokens

    def take(self) -> bool:
        """Take over the prediction at hand; whether the draft goes on after it."""
        prediction = self.mirror.predictions[self.position - 1]
        assert prediction is not None
        self.tokens.append(prediction.token)
        self.probabilities.append(prediction.probability)
        self.entropy = prediction.entropy
        return not self.is_done and self.order.keep_drafting(self.probabilities, prediction.entropy)

    def draft(self, name: str) -> Draft:
        return Draft(name, tuple(self.tokens), tuple(self.probabilities), last_entropy=self.entropy)


class PooledDrafter:
    """Drafts with another drafter's model, in that drafter's lane. Methods are called by the pool's owner."""

    def __init__(self, drafter: ModelDrafter, placement: ModelPlacement, requests: int, context_tokens: int) -> None:
        """Args:
        drafter: Whose model and lane are used; it outlives this one.
        requests: Most at a time.
        context_tokens: Of all requests together.

        Raises:
            MemoryShortage: the cache finds no room.
            DecodeError: no context could be made.
        """
        self.name = drafter.name
        self.threads = drafter.threads
        self._drafter = drafter
        settings = drafter_settings(placement, context_tokens + requests * MAX_DRAFT_TOKENS)
        settings = replace(settings, max_outputs=max(MAX_DRAFT_TOKENS, requests + 1), max_sequences=requests + 1)
        needed_bytes = cache_in_memory(drafter.model, placement, settings.context_tokens)
        check_memory(drafter.model.path, needed_bytes, f"drafting for {requests} requests at once")
        self._lane = drafter.lane
        self._context = self._lane.run(Context, drafter.model, settings, self._lane).result()
        self._mirrors: dict[int, _Mirror] = {}
        self._new_cells = itertools.count()
        self.last_passes = 0
        """Model passes of the last draft."""

    def open(self, request: int, tokens: Sequence[int]) -> None:
        """A request begins: its mirror goes on from the one that holds most of the same text."""
        self._lane.run(self._open, request, tokens)

    def behind_tokens(self, request: int, tokens: Sequence[int]) -> int:
        """Committed tokens that are to be read before it can draft."""
        mirror = self._mirrors.get(request)
        return len(tokens) - (mirror.known if mirror is not None else 0)

    def start(self, orders: Sequence[Order], threads: int) -> Future[list[Draft]]:
        """Begin to draft for several requests; the drafts come in their order, empty where there is no room."""
        return self._lane.run(self._draft, orders, threads)

    def start_beside(self, orders: Sequence[Order], threads: int) -> Future[list[Draft]]:
        """As `start`, while other work goes on."""
        return self._lane.run_beside(self._draft, orders, threads)

    def start_reading(
        self, request: int, requests: Mapping[int, Sequence[int]], most_tokens: int, threads: int
    ) -> Future[int | None]:
        """Read some of the committed tokens of one request; how many, None where there is no room for them.

        Args:
            requests: The committed tokens of all open ones. Whoever begins as the one that is read takes over what
                its mirror holds.
        """
        return self._lane.run(self._read_some, request, requests, most_tokens, threads)

    def take_score(self, request: int) -> Score:
        """How its guesses on a request fared since the last call."""
        mirror = self._mirrors.get(request)
        if mirror is None:
            return Score()
        score, mirror.score = mirror.score, Score()
        return score

    def drop(self, request: int) -> None:
        """Forget a request, once what is being drafted for it is done."""
        self._lane.run(self._drop, request)

    def check(self, requests: Mapping[int, Sequence[int]]) -> None:
        """Check the mirrors against the committed tokens of all open requests.

        Raises:
            AssertionError: they do not agree.
        """
        self._lane.run(self._check, requests).result()

    def keep_to(self, cores: Collection[int]) -> None:
        """Draft in a thread that runs on these processor cores only; where there is room, when none are given."""
        self._lane.keep_to(cores)

    def end_thread(self) -> None:
        """Wait for what was begun beside other work, and go on in the caller's thread."""
        self._lane.end_thread()

    def close(self) -> None:
        """Free the context."""
        self._lane.run(self._context.close).result()
        self._lane.keep_to(())

    # Everything below runs in the drafter's lane.

    def _check(self, requests: Mapping[int, Sequence[int]]) -> None:
        for request, mirror in self._mirrors.items():
            assert request in requests, f"{self.name} mirrors a request that has ended"
            held, cached = len(mirror.tokens), self._context.length(mirror.sequence)
            assert held == cached == len(mirror.predictions), f"{self.name} mirrors {held} tokens of {cached} cached"
            assert held == len(mirror.cells), f"{self.name} counts {len(mirror.cells)} cells for {held} tokens"
            known = list(requests[request][: mirror.known])
            assert mirror.tokens[: mirror.known] == known, f"{self.name} takes other tokens for known"

    def _open(self, request: int, tokens: Sequence[int]) -> None:
        source = max(self._mirrors.values(), key=lambda other: shared_prefix(other.tokens, tokens), default=None)
        mirror = self._mirrors[request] = _Mirror(self._context.allocate(), scored=len(tokens))
        if source is not None:
            self._take_over(mirror, source, tokens)

    def _drop(self, request: int) -> None:
        self._context.free(self._mirrors.pop(request).sequence)

    def _take_over(self, mirror: _Mirror, source: _Mirror, tokens: Sequence[int]) -> None:
        """Let a mirror of these tokens go on from another one that holds more of them."""
        shared = shared_prefix(source.tokens, tokens)
        if shared < mirror.known + LEAST_SHARED_TOKENS or not self._drafter.model.can_roll_back:
            return
        if self._context.sees_back_from(source.sequence, shared):
            self._context.free(mirror.sequence)
            mirror.sequence = self._context.copy(source.sequence, shared)
            mirror.tokens, mirror.predictions = source.tokens[:shared], source.predictions[:shared]
            mirror.cells, mirror.known = source.cells[:shared], shared

    def _settle(self, mirror: _Mirror, tokens: Sequence[int]) -> None:
        """Find how far the mirror agrees with the committed tokens."""
        limit = min(len(mirror.tokens), len(tokens))
        while mirror.known < limit and mirror.tokens[mirror.known] == tokens[mirror.known]:
            mirror.known += 1

    def _free_cells(self) -> int:
        held = set().union(*(mirror.cells for mirror in self._mirrors.values()))
        return self._context.context_tokens - len(held)

    def _read_some(
        self, request: int, requests: Mapping[int, Sequence[int]], most_tokens: int, threads: int
    ) -> int | None:
        self._context.set_threads(threads, threads)
        tokens, mirror = requests[request], self._mirrors[request]
        self._settle(mirror, tokens)
        before = mirror.known
        self._truncate(mirror, before)
        end = min(len(tokens), before + most_tokens, before + self._context.settings.batch_tokens)
        if end - before > self._free_cells():
            return None
        self._feed([(mirror, tokens[before:end])])
        mirror.known = end
        for other, own in requests.items():
            if self._mirrors[other].known < end:
                self._take_over(self._mirrors[other], mirror, own)
        return end - before

    def _draft(self, orders: Sequence[Order], threads: int) -> list[Draft]:
        self._context.set_threads(threads, threads)
        self.last_passes = 0
        growing = self._catch_up(orders)
        alive = [one for one in growing.values() if not one.is_done and one.take()]
        cells = self._free_cells()
        while alive:
            fed = [one for one in alive if not self._goes_on(one)]
            fed = [one for one in fed[: max(0, cells)] if len(one.mirror.tokens) == one.position]
            if fed:
                self._feed([(one.mirror, one.tokens[-1:]) for one in fed])
                cells -= len(fed)
            ready = [one for one in alive if len(one.mirror.tokens) > one.position]
            for one in ready:
                one.position += 1
            alive = [one for one in ready if one.mirror.predictions[one.position - 1] is not None and one.take()]
        return [
            growing[order.request].draft(self.name) if order.request in growing else Draft(self.name)
            for order in orders
        ]

    def _goes_on(self, one: _Growing) -> bool:
        """Whether the mirror already holds what was drafted last; what it holds otherwise is cut off."""
        mirror = one.mirror
        if len(mirror.tokens) > one.position:
            if mirror.tokens[one.position] == one.tokens[-1] and mirror.predictions[one.position] is not None:
                return True
            self._truncate(mirror, one.position)
        return False

    def _catch_up(self, orders: Sequence[Order]) -> dict[int, _Growing]:
        """Let all mirrors end with their request's committed tokens; those that find room, ready to draft."""
        growing: dict[int, _Growing] = {}
        missing: list[tuple[_Mirror, Sequence[int]]] = []
        cells = self._free_cells()
        for order in orders:
            mirror = self._mirrors[order.request]
            self._settle(mirror, order.tokens)
            kept = mirror.known
            if kept == len(order.tokens) and mirror.predictions[kept - 1] is None:
                kept -= 1
            tokens = order.tokens[kept:]
            if tokens:
                self._truncate(mirror, kept)
                if len(tokens) + 1 > cells:
                    continue
                cells -= len(tokens)
                missing.append((mirror, tokens))
            growing[order.request] = _Growing(order, mirror, len(order.tokens))
        self._feed(missing)
        for one in growing.values():
            one.mirror.known = len(one.order.tokens)
            self._learn_score(one.mirror, one.order.tokens)
        return growing

    def _feed(self, entering: Sequence[tuple[_Mirror, Sequence[int]]]) -> None:
        """Let tokens enter their mirrors, in as few passes as hold them."""
        room = self._context.settings.batch_tokens
        batch: list[tuple[_Mirror, Sequence[int]]] = []
        size = 0
        for mirror, tokens in entering:
            for start in range(0, len(tokens), room):
                part = tokens[start : start + room]
                if batch and (size + len(part) > room or len(batch) == self._context.settings.max_outputs):
                    self._enter(batch)
                    batch, size = [], 0
                batch.append((mirror, part))
                size += len(part)
        if batch:
            self._enter(batch)

    def _enter(self, batch: Sequence[tuple[_Mirror, Sequence[int]]]) -> None:
        """One pass; each mirror that tokens enter has a prediction after the last of them."""
        self._context.decode([Run(mirror.sequence, tokens, 1) for mirror, tokens in batch])
        self.last_passes += 1
        for (mirror, tokens), row in zip(batch, self._context.logits(), strict=True):
            mirror.tokens.extend(tokens)
            mirror.cells.extend(itertools.islice(self._new_cells, len(tokens)))
            mirror.predictions.extend([None] * (len(tokens) - 1))
            mirror.predictions.append(predict(row))

    def _truncate(self, mirror: _Mirror, length: int) -> None:
        if length < len(mirror.tokens):
            self._context.truncate(mirror.sequence, length)
            kept = self._context.length(mirror.sequence)
            del mirror.tokens[kept:], mirror.predictions[kept:], mirror.cells[kept:]
            mirror.known = min(mirror.known, kept)

    def _learn_score(self, mirror: _Mirror, tokens: Sequence[int]) -> None:
        """Compare the predictions made along the way with what was committed."""
        hits = scored = 0
        end = min(len(tokens), len(mirror.predictions) + 1)
        for position in range(max(mirror.scored, 1), end):
            prediction = mirror.predictions[position - 1]
            if prediction is not None:
                scored += 1
                hits += prediction.token == tokens[position]
        mirror.scored = max(mirror.scored, end)
        mirror.score += Score(hits, scored)
