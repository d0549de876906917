"""A drafter that is itself a language model: a second GGUF file, or a derived copy of the target.

It keeps its own mirror of the committed tokens in its own context, used in its own lane. What it drafts beyond them
stays in the mirror: if the target commits the same tokens, they need not be read again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine.config import MAX_DRAFT_TOKENS, KvType, ModelPlacement, Sampling
from engine.drafters.base import Drafter, DraftRequest, Drawing, Score, Threads
from engine.errors import IncompatibleDrafter
from engine.memory import cache_in_memory, check_memory
from engine.prefix import shared_prefix
from engine.residual import Row
from engine.runtime.context import Context, ContextSettings, PassCancelled, Run
from engine.runtime.lane import Lane
from engine.runtime.model import LoadProgress, Model
from engine.runtime.sampler import Distribution
from engine.runtime.vocabulary import Vocabulary, check_compatible
from engine.types import Draft

DRAFTER_KV_TYPE = KvType.F16
"""Drafts need no exactness, so the cache has the fastest format."""
SCORED_CATCH_UP_TOKENS = 64
"""A catch-up is scored on so many of the last tokens it reads. A draft reads for speed: the row of logits that a guess
takes is a third of a small model's pass."""
SHORT_READ_TOKENS = 16
"""Reading so few tokens is not worth stopping."""
SPARE_CELLS = 3 * MAX_DRAFT_TOKENS
"""Room beyond the target's context: for a draft at its end, and for a branch that runs ahead beside that draft."""


def drafter_settings(placement: ModelPlacement, context_tokens: int) -> ContextSettings:
    """How a draft model's context is made, for a target's context of so many tokens."""
    return ContextSettings(
        context_tokens=context_tokens + SPARE_CELLS,
        kv_type=DRAFTER_KV_TYPE,
        threads=placement.threads,
        max_outputs=SCORED_CATCH_UP_TOKENS,
    )


class Prediction(NamedTuple):
    """The most probable next token, its probability, the entropy of the distribution in nats, and the second choice."""

    token: int
    probability: float
    entropy: float
    second: tuple[int, float]


def predict(logits: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Prediction:
    """Greedy prediction from one row of logits, shape (vocabulary,)."""
    token = int(logits.argmax())
    shifted = logits - logits[token]
    weights = np.exp(shifted)
    total = float(weights.sum())
    entropy = float(np.log(total)) - float(weights @ np.maximum(shifted, -1e4)) / total
    weights[token] = -1.0
    second = int(weights.argmax())
    return Prediction(token, 1.0 / total, max(0.0, entropy), (second, float(weights[second]) / total))


@dataclass(slots=True)
class Mirror:
    """One sequence of the drafter's context, and the drafter's prediction after each of its tokens where it has one."""

    sequence: int
    tokens: list[int]
    predictions: list[Prediction | None]


class ModelDrafter(Drafter):
    """Owns a model, its context and the lane in which they run."""

    is_free = False

    def __init__(self, name: str, model: Model, context: Context, lane: Lane) -> None:
        """Use `load` instead: the context is made in the lane."""
        self.name = name
        self.model = model
        self._context = context
        self.lane = lane
        self._committed: list[int] = []
        self._mirror = Mirror(context.allocate(), [], [])
        self._branch: Mirror | None = None
        self._known = 0
        """Leading mirror tokens already found equal to the committed ones."""
        self._prompt_tokens = 0
        self._scored = 0
        self._score = Score()
        self._passes = 0
        self._extra_tokens = 0
        self._distribution: tuple[Sampling, Distribution] | None = None

    @classmethod
    def load(
        cls,
        path: Path,
        name: str,
        target: Vocabulary,
        *,
        placement: ModelPlacement,
        context_tokens: int,
        is_translated: bool = False,
        progress: LoadProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> ModelDrafter:
        """Load a GGUF file as a drafter for `target`; one that is translated may have another vocabulary.

        Raises:
            ModelFileError: the file cannot be used.
            IncompatibleDrafter: its vocabulary is not the target's, or it cannot take tokens back.
            MemoryShortage: its cache finds no room.
        """
        lane = Lane(f"drafter-{name}")

        def build() -> ModelDrafter:
            model = Model(path, gpu_layers=placement.gpu_layers, progress=progress, cancel=cancel)
            try:
                if not is_translated:
                    check_compatible(target, model.vocabulary, name)
                if not model.can_roll_back:
                    raise IncompatibleDrafter(
                        f"{name} cannot draft: it is a recurrent model, which cannot take rejected tokens back. "
                        "Choose a drafter without recurrent layers."
                    )
                settings = drafter_settings(placement, context_tokens)
                needed_bytes = cache_in_memory(model, placement, settings.context_tokens)
                check_memory(path, needed_bytes, f"a drafter's context of {settings.context_tokens} tokens")
                return cls(name, model, Context(model, settings, lane), lane)
            except BaseException:
                model.close()
                raise

        return lane.run(build).result()

    def begin(self, tokens: Sequence[int]) -> None:
        # A branch of another text may differ from the mirror where the new text is known to agree with it.
        self.lane.run(self._drop_branch).result()
        self._committed = list(tokens)
        self._known = shared_prefix(self._mirror.tokens, self._committed)
        self._prompt_tokens = self._scored = len(self._committed)

    def accept(self, tokens: Sequence[int]) -> None:
        self._committed.extend(tokens)

    def truncate(self, length: int) -> None:
        del self._committed[length:]
        self._known = min(self._known, length)
        self._scored = min(self._scored, length)

    def forget(self) -> None:
        self._committed = []
        self._known = self._scored = self._prompt_tokens = 0
        self.lane.run(self._empty_mirror).result()

    def take_score(self) -> Score:
        score, self._score = self._score, Score()
        return score

    @property
    def behind_tokens(self) -> int:
        return len(self._committed) - self._known

    @property
    def vocabulary_size(self) -> int:
        return self.model.vocabulary.size

    @property
    def threads(self) -> int:
        return self._context.settings.threads

    @property
    def last_passes(self) -> int:
        return self._passes

    @property
    def last_extra_tokens(self) -> int:
        return self._extra_tokens

    def start(self, request: DraftRequest) -> Future[Draft]:
        return self.lane.run(self._draft, request)

    def start_beside(self, request: DraftRequest) -> Future[Draft]:
        return self.lane.run_beside(self._draft, request)

    def start_look_ahead(self, request: DraftRequest) -> Future[Draft]:
        return self.lane.run_beside(self._look_ahead, request)

    def start_catch_up(self, max_tokens: int, cancel: threading.Event) -> Future[int] | None:
        if not self.behind_tokens:
            return None
        return self.lane.run(self._catch_up, max_tokens, cancel)

    def check(self, tokens: Sequence[int]) -> None:
        assert self._committed == list(tokens), f"{self.name} has heard of other tokens than were committed"
        self.lane.run(self._check_mirrors).result()

    def close(self) -> None:
        self._drop_distribution()
        self.lane.run(self.model.close).result()
        self.lane.end_thread()

    def end_thread(self) -> None:
        self.lane.end_thread()

    # Everything below runs in the drafter's lane.

    def _use(self, threads: Threads | None) -> None:
        own = self._context.settings.threads
        threads = threads or Threads(own, own)
        self._context.set_threads(threads.one_token, threads.more_tokens)

    def _draft(self, request: DraftRequest) -> Draft:
        self._passes = self._extra_tokens = 0
        self._use(request.threads)
        goal = [*self._committed, *request.path]
        self._settle_branch(goal)
        if request.drawing is not None:
            # A row of logits is not kept, so the last token is read once more.
            self._truncate(self._mirror, min(len(self._mirror.tokens), self._match(self._mirror, goal), len(goal) - 1))
        try:
            if not self._read(self._mirror, goal, len(goal), 1, request.cancel):
                return Draft(self.name)
        finally:
            self._learn_score()
        if request.drawing is not None:
            return self._draw(self._mirror, request, request.drawing)
        return self._continue(self._mirror, len(goal), request)

    def _draw(self, mirror: Mirror, request: DraftRequest, drawing: Drawing) -> Draft:
        """Draw tokens after all that the mirror holds, whose last token was read in the last pass."""
        if self._distribution is None or self._distribution[0] != drawing.sampling:
            self._drop_distribution()
            self._distribution = (drawing.sampling, Distribution(drawing.sampling, drawing.vocabulary_size))
        tokens: list[int] = []
        rows: list[Row] = []
        probabilities: list[float] = []
        while True:
            prediction = mirror.predictions[-1]
            assert prediction is not None
            row = self._distribution[1].row(self._context.logits()[-1])
            tokens.append(drawing.chance.pick(row))
            rows.append(row)
            probabilities.append(float(row[tokens[-1]]))
            if len(tokens) == request.max_tokens or request.cancel.is_set():
                break
            if not request.keep_drafting(probabilities, prediction.entropy):
                break
            if len(mirror.tokens) + 1 > self._context.context_tokens - 1 or tokens[-1] >= self.vocabulary_size:
                break
            self._feed(mirror, tokens[-1:], outputs=1, cancel=None)
        return Draft(self.name, tuple(tokens), tuple(probabilities), rows=tuple(rows))

    def _drop_distribution(self) -> None:
        if self._distribution is not None:
            self._distribution[1].close()
            self._distribution = None

    def _look_ahead(self, request: DraftRequest) -> Draft:
        """Draft on a copy of the mirror, which the next `_draft` keeps if the verdict agrees with it."""
        self._use(request.threads)
        goal = [*self._committed, *request.path]
        self._drop_branch()
        mirror = self._mirror
        branch = Mirror(self._context.copy(mirror.sequence), mirror.tokens.copy(), mirror.predictions.copy())
        self._branch = branch
        if not self._read(branch, goal, len(goal), 1, request.cancel):
            return Draft(self.name)
        return self._continue(branch, len(goal), request)

    def _catch_up(self, max_tokens: int, cancel: threading.Event) -> int:
        self._use(None)
        self._drop_branch()
        before = self._match(self._mirror, self._committed)
        length = min(len(self._committed), before + max_tokens)
        scored = min(max(1, length - self._prompt_tokens), SCORED_CATCH_UP_TOKENS)
        self._read(self._mirror, self._committed, length, scored, cancel)
        self._learn_score()
        return self._known - before

    def _check_mirrors(self) -> None:
        mirrors = [self._mirror] if self._branch is None else [self._mirror, self._branch]
        for mirror in mirrors:
            held, cached = len(mirror.tokens), self._context.length(mirror.sequence)
            assert held == cached == len(mirror.predictions), f"{self.name} mirrors {held} tokens of {cached} cached"
        known = self._mirror.tokens[: self._known]
        assert known == self._committed[: self._known], f"{self.name} takes other tokens for known"
        assert len(known) == self._known, f"{self.name} knows more tokens than it has"

    def _settle_branch(self, goal: list[int]) -> None:
        """Promote the look-ahead branch if it knows more of the goal than the mirror does, else drop it."""
        branch = self._branch
        if branch is None:
            return
        if self._match(branch, goal) <= self._match(self._mirror, goal):
            self._drop_branch()
            return
        self._branch = None
        self._context.free(self._mirror.sequence)
        self._mirror = branch

    def _drop_branch(self) -> None:
        if self._branch is not None:
            self._context.free(self._branch.sequence)
            self._branch = None

    def _empty_mirror(self) -> None:
        self._drop_branch()
        self._truncate(self._mirror, 0)

    def _match(self, mirror: Mirror, goal: list[int]) -> int:
        """Leading tokens that mirror and goal share, counted on from where the mirror is known to agree."""
        matched = min(self._known, len(mirror.tokens), len(goal))
        limit = min(len(mirror.tokens), len(goal))
        while matched < limit and mirror.tokens[matched] == goal[matched]:
            matched += 1
        return matched

    def _read(self, mirror: Mirror, goal: list[int], length: int, scored: int, cancel: threading.Event) -> bool:
        """Make the mirror hold `goal[:length]` with predictions after its last `scored` tokens, as far as they are not
        known yet; False when cancelled or out of room.
        """
        if length + 1 > self._context.context_tokens:
            return False
        matched = self._match(mirror, goal[:length])
        if matched == length and mirror.predictions[length - 1] is None:
            matched -= 1
        if matched < min(length, len(mirror.tokens)):
            self._truncate(mirror, matched)
        missing = goal[len(mirror.tokens) : length] if len(mirror.tokens) < length else []
        is_short = len(missing) <= SHORT_READ_TOKENS
        try:
            for start in range(0, len(missing), self._context.settings.batch_tokens):
                chunk = missing[start : start + self._context.settings.batch_tokens]
                self._feed(mirror, chunk, min(len(chunk), scored), cancel=None if is_short else cancel)
        except PassCancelled:
            return False
        finally:
            if mirror is self._mirror:
                self._known = min(self._match(mirror, goal), len(self._committed))
        return True

    def _continue(self, mirror: Mirror, position: int, request: DraftRequest) -> Draft:
        """Draft after the first `position` tokens; predictions already in the mirror are taken over."""
        tokens: list[int] = []
        probabilities: list[float] = []
        seconds: list[tuple[int, float]] = []
        entropy = 0.0
        while len(tokens) < request.max_tokens:
            prediction = mirror.predictions[position - 1]
            assert prediction is not None
            tokens.append(prediction.token)
            probabilities.append(prediction.probability)
            seconds.append(prediction.second)
            entropy = prediction.entropy
            if len(tokens) == request.max_tokens or request.cancel.is_set():
                break
            if not request.keep_drafting(probabilities, entropy):
                break
            if position + 1 > self._context.context_tokens - 1:
                break
            if len(mirror.tokens) > position and mirror.tokens[position] != prediction.token:
                self._truncate(mirror, position)
            if len(mirror.tokens) == position:
                self._feed(mirror, [prediction.token], outputs=1, cancel=None)
            elif mirror.predictions[position] is None:
                break
            position += 1
        return Draft(self.name, tuple(tokens), tuple(probabilities), last_entropy=entropy, seconds=tuple(seconds))

    def _feed(self, mirror: Mirror, tokens: list[int], outputs: int, cancel: threading.Event | None) -> None:
        self._context.decode([Run(mirror.sequence, tokens, outputs)], cancel)
        self._passes += 1
        self._extra_tokens += len(tokens) - 1
        mirror.tokens.extend(tokens)
        mirror.predictions.extend([None] * (len(tokens) - outputs))
        mirror.predictions.extend(predict(row) for row in self._context.logits())

    def _truncate(self, mirror: Mirror, length: int) -> None:
        self._context.truncate(mirror.sequence, length)
        kept = self._context.length(mirror.sequence)
        del mirror.tokens[kept:], mirror.predictions[kept:]

    def _learn_score(self) -> None:
        """Compare the predictions made along the way with what was committed."""
        hits = scored = 0
        for position in range(max(self._scored, 1), min(len(self._committed), len(self._mirror.predictions) + 1)):
            prediction = self._mirror.predictions[position - 1]
            if prediction is not None:
                scored += 1
                hits += prediction.token == self._committed[position]
        self._scored = max(self._scored, min(len(self._committed), len(self._mirror.predictions) + 1))
        self._score += Score(hits, scored)
